"""Builds the run of a workload by the code of `mtrl train`, and times its steps."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtrl.bench.environment import hardware
from mtrl.bench.peak_flops import find_peak, measure_mfu
from mtrl.bench.workload import Workload, count_tokens
from mtrl.compose.policy import LoadedModel, base_dtype, build_encoder, build_policy, model_path
from mtrl.compose.run import build, configure
from mtrl.config import Config
from mtrl.distributed.generator_proxy import ENGINE, DistributedGenerator
from mtrl.distributed.learner_proxy import DistributedLearner
from mtrl.models.families import find_family
from mtrl.models.parallel.fsdp import is_sharded
from mtrl.models.random_model import draw_model
from mtrl.protocols import Tracker
from mtrl.rollout.decode.arena import CudaArena
from mtrl.rollout.local import ROWS_AT_ONCE
from mtrl.training.loop import Components
from mtrl.training.resumable_run import Run
from mtrl.types import Experience

PHASES = {  # TRL's name of a phase: our phases
    "generation": ("generate",), "scoring_and_other_prep": ("probe", "reward", "credit"), "training": ("update",),
    "unaccounted": ("publish",),
}  # fmt: skip
PEAKS = ("peak_gb_generation", "peak_gb_buffers", "peak_gb_probe", "peak_gb_update", "peak_gb_training")
MFU_KEYS = ("mfu_training_prompts_once", "mfu_training_prompts_per_response")
GAP = "rollout/logprob_gap_"  # of the engine and the trainer
BESIDE_SETTINGS = {"stop_ids": "none: no token ends a response"}  # facts without a configuration key
Row = dict[str, Any]


class PromptLengths(Tracker):
    """Length of the longest prompt of the run, in tokens."""

    longest = 0

    def rollouts(self, step: int, experience: Experience) -> None:
        self.longest = max(self.longest, *(len(prompt.ids) for prompt in experience.rollouts.prompts))


@dataclass
class MeasuredRun:
    """A run that is ready for its first step."""

    workload: Workload
    training: Run
    lengths: PromptLengths
    start: dict[str, float]  # seconds before the first step

    @property
    def components(self) -> Components:
        return self.training.loop.components

    @property
    def actor(self) -> Any:
        """The actor of this process."""
        actor = self.components.actor
        workers: Any = actor.workers if isinstance(actor, DistributedLearner) else None
        return actor if workers is None else workers.roles["actor"].worker

    def step(self, number: int) -> Row:
        """Seconds and peaks of one step; those of a phase that it does not have are 0."""
        values = self.training.loop.step(number)
        self.components.tracker.metrics(number + 1, values)
        row: Row = {"step": number + 1, "wall": values["perf/seconds_step"]}
        seconds = {phase: values.get(f"perf/seconds_{phase}", 0.0) for phases in PHASES.values() for phase in phases}
        for name, phases in PHASES.items():
            row[name] = sum(seconds[phase] for phase in phases)
        row["detail"] = seconds
        peaks = {phase: round(values.get(f"perf/peak_gb_{phase}", 0.0), 2) for phase in ("generate", "probe", "update")}
        row["peak_gb_generation"] = peaks["generate"]
        row["peak_gb_buffers"] = round(bytes_outside_allocator(self.components.generator) / 2**30, 2)
        row["peak_gb_probe"], row["peak_gb_update"] = peaks["probe"], peaks["update"]
        row["peak_gb_training"] = max(peaks["probe"], peaks["update"])
        row |= {"grad_norm": values["actor/grad_norm"], "loss": values["actor/pg_loss"]}
        row |= {name.rpartition("/")[2]: value for name, value in values.items() if name.startswith(GAP)}
        row["completion_tokens"] = round(values["response_length/mean"] * self.workload.responses)
        return row

    def halved(self) -> dict[str, int] | None:
        """Responses sampled at once and tokens per pass of the update, if fewer than configured fitted; otherwise
        None."""
        rows, tokens = getattr(self.components.generator, "rows_at_once", ROWS_AT_ONCE), self.actor.learner.cut_to
        limits = {"responses_at_once": rows if rows < ROWS_AT_ONCE else 0, "tokens_of_an_update": tokens}
        return {name: value for name, value in limits.items() if value} or None


@contextmanager
def open_run(workload: Workload) -> Iterator[MeasuredRun]:
    """The run of a workload in a temporary folder, after its preflight."""
    with tempfile.TemporaryDirectory(prefix="mtrl-bench-") as folder:
        config, _ = configure(workload.write(Path(folder)), workload.overrides)
        lengths, begin = PromptLengths(), time.perf_counter()
        training = build_run(config, workload, lengths)
        with training.closing:
            built = time.perf_counter()
            phases = training.preflight()
            start = {"build": built - begin, "rehearsal": time.perf_counter() - built}
            start |= {f"rehearsal_{name}": seconds for name, seconds in phases.items()}
            yield MeasuredRun(workload, training, lengths, start)


def build_run(config: Config, workload: Workload, lengths: PromptLengths) -> Run:
    """The run of `mtrl train`, on a model of random weights that is made here; there is no stop token."""
    if workload.stored:
        training = build(config, trackers=[lengths])
        generator = training.loop.components.generator
        engine: Any = (
            generator.workers.roles[ENGINE].generator if isinstance(generator, DistributedGenerator) else generator
        )
        engine.encoder.stop_ids = ()
        return training
    encoder, path = build_encoder(config), model_path(config)
    base = draw_model(Path(path), workload.device, base_dtype(config), workload.seed).eval()
    base.name_or_path = path
    loaded = LoadedModel(*build_policy(config, encoder, base))
    loaded.encoder.stop_ids = ()
    return build(config, trackers=[lengths], loaded=loaded)


def bytes_outside_allocator(generator: Any) -> int:
    """Bytes of generation outside torch's allocator, held until the engine sleeps."""
    holders = [getattr(generator, name, None) for name in ("weights", "buffers")]
    return sum(holder.arena.bytes for holder in holders if holder is not None and isinstance(holder.arena, CudaArena))


# -------------------------------------------------------------------------------------------------------------- result
def make_result(run: MeasuredRun, rows: Sequence[Row], saving: dict[str, float] | None = None) -> dict[str, Any]:
    workload, prompt_len, model = run.workload, run.lengths.longest, run.actor.model
    sizes, is_vision = {name: weight.numel() for name, weight in model.named_parameters()}, find_vision(model)
    summary = summarize(workload, rows, prompt_len)
    return {
        "bench": "mtrl_grpo_step",
        "args": {**asdict(workload), "overrides": list(workload.overrides)},
        "settings": workload.reported_settings(),
        "beside_settings": BESIDE_SETTINGS,
        "params_m": round(sum(sizes.values()) / 1e6, 1),
        "vision_params_m": round(sum(size for name, size in sizes.items() if is_vision(name)) / 1e6, 1),
        "ranks": 1 if is_sharded(model) else None,
        "completions_per_step": workload.responses,
        "image_tokens": workload.image_tokens,
        "prompt_len": prompt_len,
        "median_of_measured_steps": summary | measure_training_mfu(workload, model, prompt_len, summary["training"]),
        "peak_gb": max(
            max(row["peak_gb_generation"] + row["peak_gb_buffers"], row["peak_gb_training"]) for row in rows
        ),
        **{name: max(row[name] for row in rows) for name in PEAKS},
        "halved": run.halved(),
        "seconds_before_the_first_step": {
            **run.start,
            "more_in_the_first_step": rows[0]["wall"] - summary["wall"],  # compilation and capture
        },
        "saving": saving,
        "steps": list(rows),
    }


def summarize(workload: Workload, rows: Sequence[Row], prompt_len: int) -> dict[str, float]:
    """Medians of the steps after the first, which is the warm-up, and rates."""
    later = rows[1:] or rows
    summary = {name: round(statistics.median(row[name] for row in later), 4) for name in ("wall", *PHASES)}
    _, per_response = count_tokens(workload.prompts, workload.generations, prompt_len, workload.completion)
    summary["completion_tokens_per_s_generation"] = round(later[-1]["completion_tokens"] / summary["generation"], 1)
    summary["train_tokens_per_s"] = round(per_response / summary["training"], 1)
    summary["completions_per_s_step"] = round(workload.responses / summary["wall"], 3)
    return summary


def measure_training_mfu(workload: Workload, model: Any, prompt_len: int, seconds: float) -> dict[str, float]:
    """MFU of the update, without the vision tower, for both ways of counting prompts. There is none on a CPU, on an
    unknown GPU, and under adapters, where frozen weights need no gradients."""
    peak = find_peak(hardware().get("gpu")) if workload.device == "cuda" else None
    is_vision = find_vision(model)
    weights = [weight for name, weight in model.named_parameters() if not is_vision(name)]
    if peak is None or not all(weight.requires_grad for weight in weights):
        return {}
    count = sum(weight.numel() for weight in weights)
    tokens = count_tokens(workload.prompts, workload.generations, prompt_len, workload.completion)
    return {key: measure_mfu(count, number, seconds, peak) for key, number in zip(MFU_KEYS, tokens, strict=True)}


def find_vision(model: Any) -> Callable[[str], bool]:
    """Whether a weight of that name belongs to the vision tower or its projector."""
    family = find_family(model.config)
    paths = [f"{path}." for path in (family.vision_tower, family.projector) if path is not None]
    return lambda name: any(path in name for path in paths)
