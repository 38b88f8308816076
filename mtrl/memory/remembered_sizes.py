"""What a preflight has found, kept for the next start of the same run, which need not search again.

That start runs the update once in the remembered sizes. If anything is otherwise than it was, it searches as if there
were no file: the sizes of a run are always those that a search has chosen.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mtrl.memory.kept_layers import KeepableLayers, report_kept_layers
from mtrl.memory.plan import Plan
from mtrl.memory.preflight import GIB, DoesNotFit, Limits, bytes_outside_allocator
from mtrl.models.forward import Forward
from mtrl.models.parallel.ranks import Ranks
from mtrl.protocols import Generator, PromptEncoder
from mtrl.types import Needs
from mtrl.utils.files import atomic_write, regular_file
from mtrl.utils.package_version import code_version
from mtrl.utils.terminal import say_at_once
from mtrl.workers.learner import Learner

SLACK = 0.03  # of the device: what room and peak may lose stays below the MARGIN of kept layers
LIBRARIES = ("torch", "transformers", "triton", "peft", "bitsandbytes", "flash_attn", "vllm")
NO_SIZES = {"make_encoder", "seed", "step", "version", "_name_or_path"}  # what says nothing about memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run's passes. A size of 0 is the configured one."""

    peaks: Mapping[str, int]  # bytes of each phase
    room: int  # bytes that were free before
    kept_layers: int
    update_tokens: int  # tokens of a pass of an update, so that more layers are kept
    cut_to: int  # tokens or rows of any pass, so that it fits
    rows_at_once: int  # responses that the local engine samples at once

    @classmethod
    def of(cls, peaks: Mapping[str, int], room: int, learner: Learner, generator: Generator | None) -> Sizes:
        """Those that a preflight has chosen."""
        rows = getattr(generator, "rows_at_once", 0)  # other engines have no such limit
        tokens = learner.configured_batching.tokens or 0
        return cls(peaks, room, len(learner.kept_layers), tokens, learner.cut_to, rows)

    @classmethod
    def from_json(cls, text: str) -> Sizes:
        """Raises a ValueError if anything else is stored."""
        stored = json.loads(text)
        if not isinstance(stored, dict) or stored.keys() != {each.name for each in fields(cls)}:
            raise ValueError("other entries")
        peaks = stored["peaks"]
        numbers = [*peaks.values(), *(stored[name] for name in stored.keys() - {"peaks"})] if peaks else []
        if not numbers or "update" not in peaks or not all(type(each) is int and each >= 0 for each in numbers):
            raise ValueError("no sizes")
        return cls(**stored)

    def limit(self, limits: Limits) -> Limits:
        """The limits of a run with passes of these sizes."""
        limits = limits.within(self.cut_to) if self.cut_to else limits
        return replace(limits, update=limits.update.within(self.update_tokens)) if self.update_tokens else limits

    def apply(self, layers: KeepableLayers, learners: Sequence[Learner], generator: Any) -> None:
        """Give learners and engine the sizes that the search would have given them."""
        learners[0].kept_layers = layers.keep(self.kept_layers)
        if self.update_tokens:
            learners[0].configured_batching = learners[0].configured_batching.within(self.update_tokens)
        if self.cut_to != learners[0].cut_to:
            for learner in learners:
                learner.cut_to = self.cut_to
        if self.rows_at_once:
            generator.rows_at_once = self.rows_at_once

    def explain_no_use(
        self, layers: KeepableLayers, run_update: Callable[[Limits], dict[str, int]], limits: Limits, room: int,
        slack: int,
    ) -> str | None:  # fmt: skip
        """Why a run must not take these sizes, with `room` bytes free now; None after an update in them that took as
        much memory as then."""
        if (why := self.explain_other_room(room, slack)) is not None:
            return why
        layers.keep(self.kept_layers)
        try:
            peak = run_update(self.limit(limits))["update"]
        except DoesNotFit:
            return "the update does not fit"
        if abs(peak - self.peaks["update"]) > slack:
            return f"the update takes {peak / GIB:,.1f} GiB, it took {self.peaks['update'] / GIB:,.1f}"
        return None

    def explain_other_room(self, room: int, slack: int) -> str | None:
        """Phases that are not run must fit: they did with as much room as then."""
        states, most = 0, 0
        for phase, peak in self.peaks.items():  # in their order: those before have no states beside them
            states = peak if phase == "optimizer" else states
            most = max(most, peak if phase == "optimizer" else states + peak)
        if abs(room - self.room) > slack or room < min(most, self.room):
            return f"{room / GIB:,.1f} GiB are free, {self.room / GIB:,.1f} were then"
        return None


@dataclass(frozen=True)
class RememberedSizes:
    """The file of one configuration on one kind of device. Without it, or if it cannot be read, a run searches."""

    file: Path
    device: torch.device

    def reuse_or_search(
        self,
        search: Callable[[], dict[str, int]],
        run_update: Callable[[Limits], dict[str, int]],
        limits: Limits,
        layers: KeepableLayers,
        learners: Sequence[Learner],
        generator: Generator | None,
        encoder: PromptEncoder,
    ) -> dict[str, int]:
        """The peaks of all phases, after `run_update` in the remembered sizes or after the `search`; learners and
        engine have the sizes then."""
        room, sizes = free_bytes(self.device), self.read()
        if sizes is not None:
            why = sizes.explain_no_use(layers, run_update, limits, room, slack_bytes(self.device))
            if why is None:
                sizes.apply(layers, learners, generator)
                say_at_once(f"memory: the sizes of passes are those of an earlier start, remembered in {self.file}")
                if layers.layers:
                    report_kept_layers(layers, learners[0], sizes.limit(limits), encoder)
                return dict(sizes.peaks)
            self.forget(why)
            layers.keep(0)
        peaks = search()
        self.write(Sizes.of(peaks, room, learners[0], generator))
        return peaks

    def read(self) -> Sizes | None:
        try:
            return Sizes.from_json(regular_file(self.file).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError) as error:
            say_at_once(f"memory: {self.file} cannot be read ({error}); the sizes of passes are measured again")
            return None

    def write(self, sizes: Sizes) -> None:
        """Other starts see all of it or nothing."""
        try:
            with atomic_write(self.file) as out:
                out.write(json.dumps(asdict(sizes)).encode())
        except OSError as error:
            logger.warning("cannot store the sizes of passes in %s (%s); the next start measures again",
                           self.file.parent, error.strerror)  # fmt: skip

    def forget(self, why: str) -> None:
        say_at_once(f"memory: the sizes in {self.file} are not those of this start ({why}); they are measured again")
        with suppress(OSError):  # `write` reports a folder that cannot be written to
            self.file.unlink()


# ------------------------------------------------------------------------------------------------------- what they suit
def describe_start(plan: Plan, limits: Limits, models: Sequence[Forward], **more: Any) -> dict[str, Any]:
    """All that the memory of the passes depends on, as JSON that is the same in every process."""
    device = models[0].backbone.device
    return {
        "code": code_version(),
        "libraries": {name: library_version(name) for name in LIBRARIES},
        "device": describe_device(device),
        "plan": to_plain(replace(plan, critic=None)),
        "limits": to_plain(limits),
        "models": [describe_model(each) for each in models],
        **{name: to_plain(value) for name, value in more.items()},
    }


def describe_model(forward: Forward) -> dict[str, Any]:
    """The model of some passes, and the settings of these passes."""
    model, own = forward.backbone.model, vars(forward).items()
    weights = list(model.parameters())
    return {
        "config": to_plain(model.config.to_dict()),
        "family": type(forward.backbone.family).__qualname__,
        "parameters": sum(each.numel() for each in weights),
        "learning": sum(each.numel() for each in weights if each.requires_grad),
        "dtypes": sorted({str(each.dtype) for each in weights}),
        "passes": {name: value for name, value in own if isinstance(value, (str, int, float, type(None)))},
    }


def describe_device(device: torch.device) -> list[Any]:
    properties = torch.cuda.get_device_properties(device)
    return [properties.name, properties.total_memory, torch.version.cuda]


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that torch could still give to tensors."""
    total = torch.cuda.mem_get_info(device)[1]
    return total - bytes_outside_allocator(device) - torch.cuda.memory_allocated(device)


def slack_bytes(device: torch.device) -> int:
    """How far memory may be from what it was."""
    return int(SLACK * torch.cuda.mem_get_info(device)[1])


def library_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def to_plain(value: Any) -> Any:
    """A JSON value; sets are sorted, since their order differs between processes."""
    if isinstance(value, Needs):
        return sorted(value.names)
    if isinstance(value, Ranks):
        return value.size
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_plain(each) for name, each in value.items() if name not in NO_SIZES}
    if isinstance(value, (list, tuple)):
        return [to_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, type(None))) else str(value)
