"""What a learner has learnt, at one moment, on its way to a disk and back. No pickle: safetensors and JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtrl.checkpoint import sharded_files as parts
from mtrl.checkpoint.sharded_files import FilePlan
from mtrl.models.checkpoint_files import WEIGHTS
from mtrl.models.device_copy import to_main_memory
from mtrl.models.parallel.fsdp import fill, gathered, is_part, is_split, own_part
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.state_dicts import WholeWeights, names_in_files, save_model, save_settings, saved_weights

# They have a folder of their own: inference servers read every *.safetensors beside a model's config as its weights.
OPTIMIZER_STATE = "trainer/optimizer.safetensors"  # tensors by parameter and kind: `<parameter>/exp_avg`, ..
COUNTERS = "trainer/optimizer.json"
SUFFIX = ".safetensors"

Tensors = Mapping[str, Tensor]
Names = Mapping[Any, str]  # the name of each parameter


@dataclass(frozen=True, eq=False)
class ModelSnapshot:
    """The weights of a model. It reads the live ones, so it must be written before the next update, or be `detached`
    first."""

    copied = False
    model: Any  # the model, whose settings go beside the weights
    weights: Tensors  # by the names that they have in the checkpoint (`saved_weights`)

    @property
    def nbytes(self) -> int:
        return _tensor_bytes(self.weights)

    def detached(self) -> Self:
        """A copy in main memory, which later updates leave alone."""
        return replace(self, weights=_copied(self.weights))

    def write(self, directory: Path) -> None:
        with _full_disk_told():
            save_model(self.model, self.weights, directory)


@dataclass(frozen=True, eq=False)
class LearnerSnapshot(ModelSnapshot):
    """The state of a learner: its weights, and what its next update depends on."""

    optimizer_state: Tensors
    counters: Mapping[str, int]
    files: Mapping[str, bytes]  # files of the tokenizer and the processors, by name

    @property
    def nbytes(self) -> int:
        return _tensor_bytes(self.weights, self.optimizer_state) + sum(map(len, self.files.values()))

    def detached(self) -> Self:
        return replace(super().detached(), optimizer_state=_copied(self.optimizer_state))

    def write(self, directory: Path) -> None:
        (directory / OPTIMIZER_STATE).parent.mkdir()
        super().write(directory)
        with _full_disk_told():
            state = {name: tensor.contiguous() for name, tensor in self.optimizer_state.items()}
            save_file(state, directory / OPTIMIZER_STATE)
        (directory / COUNTERS).write_text(json.dumps(self.counters))
        for name, content in self.files.items():
            (directory / name).write_bytes(content)


def make_snapshot(
    model: Any,
    optimizer: torch.optim.Optimizer,
    names: Names,
    counters: Mapping[str, int],
    files: Mapping[str, bytes],
    ranks: Ranks = SINGLE_PROCESS,
) -> LearnerSnapshot | PartSnapshot:
    """The state of a learner. Of one that is split over ranks it is a copy at once: each rank gathers in its main
    memory what it is to write."""
    state = read_optimizer_state(optimizer, names)
    if is_split(model):
        return shard_files(model, ranks, saved_weights(model), state, counters, files)
    return LearnerSnapshot(model, saved_weights(model), state, counters, files)


# ---------------------------------------------------------------------------------------------- one of several ranks
@dataclass(frozen=True, eq=False)
class PartSnapshot:
    """What one rank writes of a learner that ranks hold together (`parts.py`), a copy in its main memory. The first
    writes what is no tensor as well."""

    copied = True
    model: Any
    number: int
    ranks: int
    plan: FilePlan
    weights: Tensors  # of this rank's files, by the names that they have there
    state_plan: FilePlan | None = None  # none of a model that does not learn
    optimizer_state: Tensors = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        files = sum(map(len, self.files.values())) if self.number == 0 else 0
        return _tensor_bytes(self.weights, self.optimizer_state) + files

    def detached(self) -> Self:
        return self

    def write(self, directory: Path) -> None:
        first = self.number == 0
        with _full_disk_told():
            if self.plan.single and first:
                save_model(self.model, self.weights, directory)
            elif not self.plan.single:
                self.plan.write(self.weights, directory, self.number, self.ranks)
            if self.state_plan is not None:
                (directory / OPTIMIZER_STATE).parent.mkdir(exist_ok=True)
                self.state_plan.write(self.optimizer_state, directory, self.number, self.ranks)
        if first and not self.plan.single:
            save_settings(self.model, directory)
            self.plan.write_index(directory)
        if first and self.state_plan is not None:
            (directory / COUNTERS).write_text(json.dumps(self.counters))
            for name, content in self.files.items():
                (directory / name).write_bytes(content)


def shard_files(
    model: Any,
    ranks: Ranks,
    weights: Tensors,
    state: Tensors | None = None,
    counters: Mapping[str, int] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> PartSnapshot:
    """This rank's part; all ranks make theirs together. `state`: of the optimizer, where the model learns."""
    plan, own = weights_to_write(model, weights, ranks)
    if state is None:
        return PartSnapshot(model, ranks.rank, ranks.size, plan, own)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in state.items()}
    state_plan = FilePlan.of(OPTIMIZER_STATE.removesuffix(SUFFIX), sizes, parts.FILE_BYTES)
    own_state = gathered(state, state, state_plan.own(ranks.rank, ranks.size))
    return PartSnapshot(model, ranks.rank, ranks.size, plan, own, state_plan, own_state, counters or {}, files or {})


def weights_to_write(model: Any, weights: Tensors, ranks: Ranks) -> tuple[FilePlan, Tensors]:
    """The files of the weights, and this rank's. Adapters, weights that a checkpoint holds in other shapes, and what
    one file holds, are the first rank's, by the names of the model: `save_model` knows how to write them."""
    if isinstance(weights, WholeWeights):
        names = ranks.broadcast_object(ranks.rank0_only(partial(names_in_files, model, weights)))
        if names is not None:
            sizes = {names[name]: weights.bytes_of(name) for name in names}
            plan = FilePlan.of(WEIGHTS.removesuffix(SUFFIX), sizes, parts.FILE_BYTES)
            if not plan.single:
                kept = plan.own(ranks.rank, ranks.size)
                found = gathered(weights, names, {name for name in names if names[name] in kept})
                return plan, {names[name]: tensor for name, tensor in found.items()}
    plan = FilePlan(WEIGHTS.removesuffix(SUFFIX), (tuple(weights),), 0)
    return plan, gathered_weights(model, weights, plan.own(ranks.rank, ranks.size))


def gathered_weights(model: Any, weights: Tensors, kept: Collection[str]) -> dict[str, Tensor]:
    """Whole weights of a model that is split; tied ones share memory as they did."""
    found, tied = gathered(weights, weights, kept), dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = tied.setdefault(id(parameter), name)
        if first != name and first in found and name in found:
            found[name] = found[first]
    return found


def read_optimizer_state(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Tensor]:
    """The optimizer's state by the names of its parameters."""
    return {
        f"{names[parameter]}/{kind}": tensor
        for parameter, state in optimizer.state.items()
        for kind, tensor in state.items()
    }


def restore_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Names, directory: Path, stays: bool = False, ranks: Ranks = SINGLE_PROCESS
) -> None:
    """The optimizer as `read_optimizer_state` found it. A parameter that has had no gradient yet has no state. It goes to
    the device of its parameter, unless it `stays` in main memory, but for the counts of steps. Of ranks the first reads
    one file after the other, and never holds more of it."""
    file = directory / OPTIMIZER_STATE
    read: dict[str, Tensor] = {}
    for part in ranks.broadcast_object(state_files(directory)):
        read |= _split_like(names, ranks.rank0_only(partial(load_file, part)), ranks, stays)
    saved: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read.items():
        name, _, kind = key.rpartition("/")
        saved.setdefault(name, {})[kind] = tensor
    if unknown := saved.keys() - set(names.values()):
        raise ValueError(f"{file} is of other parameters than this run trains: {sorted(unknown)[:3]}")
    now = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {number: saved[names[each]] for number, each in enumerate(parameters) if names[each] in saved}
    optimizer.load_state_dict({**now, "state": {number: {"step": each["step"]} for number, each in state.items()}})
    for number, each in state.items():  # as they are: torch would make the dtype of the parameter of them
        place = parameters[number]
        others = {kind: tensor for kind, tensor in each.items() if kind != "step"}
        optimizer.state[place].update(others if stays else {kind: t.to(place.device) for kind, t in others.items()})


def state_files(directory: Path) -> list[Path]:
    """Where an optimizer's state lies: in one file, or in several that ranks have written."""
    file = directory / OPTIMIZER_STATE
    return sorted(file.parent.glob(f"{file.stem}-*-of-*{SUFFIX}")) or [file]


def _split_like(names: Names, read: Tensors | None, ranks: Ranks, stays: bool) -> Tensors:
    """States as the first rank has read them, split as the parameters of their names are; those that `stay` in main
    memory are there from the beginning."""
    parameters = {name: parameter for parameter, name in names.items()}
    if not any(map(is_part, parameters.values())):
        return read or {}
    kinds = ranks.broadcast_object(
        {} if read is None else {key: (each.shape, each.dtype) for key, each in read.items()}
    )
    states = {}
    for key, (shape, dtype) in kinds.items():
        like = parameters.get(key.rpartition("/")[0])
        fits = like is not None and like.shape == shape
        states[key] = torch.zeros_like(like, dtype=dtype) if fits else torch.zeros(shape, dtype=dtype)  # type: ignore
        if stays:  # the numbers alone: a part of the optimizer's state must say that it is where its parameter is
            own = own_part(states[key])
            own.data = own.cpu()
    fill(states, read, ranks)
    return states


def read_counters(directory: Path) -> dict[str, int]:
    return json.loads((directory / COUNTERS).read_text())


def _copied(tensors: Tensors) -> dict[str, Tensor]:
    """Copies in main memory; those that share memory (tied weights) share it afterwards too."""
    distinct = _by_memory(tensors)
    copies = dict(zip(distinct, to_main_memory(list(distinct.values())), strict=True))
    return {name: copies[_memory(tensor)] for name, tensor in tensors.items()}


@contextmanager
def _full_disk_told() -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:  # how it reports a full disk
        raise OSError(str(error)) from error


def _tensor_bytes(*parts: Tensors) -> int:
    """Bytes of tensors, of which those that share memory are one."""
    distinct = {key: tensor for part in parts for key, tensor in _by_memory(part).items()}
    return sum(tensor.nbytes for tensor in distinct.values())


def _by_memory(tensors: Tensors) -> dict[tuple[int, torch.Size], Tensor]:
    return {_memory(tensor): tensor for tensor in tensors.values()}


def _memory(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
