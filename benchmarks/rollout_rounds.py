"""Rounds of generation and update in a run of `mtrl train`: does memory grow, and is it freed for the update?

Part of `python -m benchmarks.rollout --memory`. The code of `mtrl train` configures, builds, preflights and steps the
run, over pictures of several sizes and with responses whose lengths, and whose maximum length, are drawn anew at every
step (`drawn_lengths`). Each round reports the memory held on the device, the CUDA graphs captured and the graphs
compiled so far, and the peak of each phase. At the end the update with the highest peak is repeated without an engine:
if the engine frees its memory, a step holds no more than that update or than generation.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.drawn_lengths import drawn_lengths
from benchmarks.measure import compiled_graphs, free_memory, held_gb, peak_gb, wait
from mtrl.bench.random_run import PATHS, step_settings, write_run
from mtrl.bench.shapes import SHAPES
from mtrl.compose.run import build, configure
from mtrl.config import read_overrides
from mtrl.protocols import Tracker
from mtrl.rollout.local import LocalGenerator
from mtrl.training.loop import Loop
from mtrl.training.resumable_run import Run
from mtrl.types import Experience, Prompt, Rollouts, Sampling

ROUNDS = 50
SETTLED = 3  # rounds after which memory and graphs may not grow
PHASES = ("generate", "probe", "update")


@dataclass(frozen=True)
class Sizes:
    prompts: int
    n: int
    new: int
    shortest: int  # tokens of a response
    sides: tuple[int, ...]  # sides of the pictures in pixels
    text_tokens: int
    rows: int  # rows of data; the run repeats them


SIZES = {  # with 96 responses, enough rows end early for a smaller decode step
    "3b": Sizes(prompts=12, n=8, new=64, shortest=8, sides=(336, 448, 672), text_tokens=66, rows=72),
    "tiny": Sizes(prompts=2, n=2, new=8, shortest=2, sides=(56, 112, 168), text_tokens=40, rows=7),
}


def make_settings(sizes: Sizes, rounds: int) -> dict[str, Any]:
    longest = sizes.text_tokens + SHAPES["3b"].image_tokens(max(sizes.sides))
    return step_settings(sizes.prompts, sizes.n, sizes.new, rounds + 1, sizes.sides, longest)


def measure_rounds(a: argparse.Namespace, precision: dict[str, Any]) -> dict[str, Any]:
    sizes = SIZES[a.size]
    settings = make_settings(sizes, a.memory) | precision
    with tempfile.TemporaryDirectory(prefix="mtrl-rollout-") as folder:
        file = write_run(
            Path(folder), a.size, a.device, sizes.rows, sizes.sides, sizes.text_tokens, a.seed, settings
        )  # fmt: skip
        free_memory()  # the checkpoint was made on the device
        config, _ = configure(file, a.overrides)
        watch = StepSizes()
        training = build(config, trackers=[watch])
        assert training.loaded is not None
        with training.closing, drawn_lengths(training.loaded.encoder, sizes.shortest, varying=True):
            training.preflight()
            found = run_rounds(training, watch, a.memory)
    overrides = settings | read_overrides(a.overrides)
    return {
        "bench": "rollout_rounds",
        "args": {name: value for name, value in vars(a).items() if name not in ("out", "profile", "only", "rounds")},
        "settings": {key: value for key, value in overrides.items() if key not in PATHS},
        "sizes": asdict(sizes),
        **found,
    }


class StepSizes(Tracker):
    """Token counts of the last step."""

    last: dict[str, int]

    def rollouts(self, step: int, experience: Experience) -> None:
        lengths = experience.rollouts.mask.sum(1)
        prompts = [len(prompt.ids) for prompt in experience.rollouts.prompts]
        self.last = {
            "prompt_tokens": sum(prompts), "longest_prompt": max(prompts), "response_tokens": int(lengths.sum()),
            "longest_response": int(lengths.max()),
        }  # fmt: skip


def run_rounds(training: Run, watch: StepSizes, rounds: int) -> dict[str, Any]:
    loop = training.loop
    generator = loop.components.generator
    name, resident, largest = type(generator).__name__, record_when_awake(generator), LargestUpdate(loop)
    rows = []
    for step in range(rounds):
        values = loop.step(step)
        loop.components.tracker.metrics(step + 1, values)
        largest.keep(values["perf/peak_gb_update"])
        row = {"round": step + 1, **watch.last, "captures": getattr(generator, "captures", 0)}
        row |= {"compiled_graphs": compiled_graphs(), **held_gb(), "awake": dict(resident)}
        row |= {f"seconds_{phase}": round(values[f"perf/seconds_{phase}"], 3) for phase in (*PHASES, "step")}
        row |= {f"peak_gb_{phase}": round(values[f"perf/peak_gb_{phase}"], 3) for phase in PHASES}
        row["peak_gb_generate"] += resident["engine_gb"]  # torch's allocator does not count it
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    del generator
    summary = summarize(rows) | largest.without_engine(training)
    if alone := summary.get("peak_gb_update_without_engine"):
        summary["step_over_its_parts"] = round(summary["peak_gb_step"] / max(summary["peak_gb_generate"], alone), 3)
    return {"engine": name, "summary": summary, "rounds": rows}


def record_when_awake(generator: Any) -> dict[str, float]:
    """Device memory held right after the last generation, while its engine is still awake."""
    held: dict[str, float] = {}
    generate = generator.generate

    def generate_and_record(prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        rollouts: Rollouts = generate(prompts, sampling)
        held.update(held_gb(), engine_gb=engine_gb(generator))
        return rollouts

    generator.generate = generate_and_record
    return held


def engine_gb(generator: Any) -> float:
    """Memory of the engine's own arenas."""
    held = [each for each in (getattr(generator, name, None) for name in ("weights", "buffers")) if each is not None]
    return round(sum(each.arena.bytes for each in held) / 2**30, 3)


class LargestUpdate:
    """Keeps the arguments of the update with the highest peak, to repeat it."""

    def __init__(self, loop: Loop) -> None:
        actor: Any = loop.components.actor
        self.update, self.peak = actor.update, -1.0
        self.last: Any = None  # arguments of the latest update
        self.largest: Any = None  # arguments of the update with the highest peak
        actor.update = self._update

    def _update(self, *arguments: Any) -> dict[str, float]:
        self.last = arguments
        return self.update(*arguments)

    def keep(self, peak: float) -> None:
        if peak > self.peak:
            self.peak, self.largest = peak, self.last
        self.last = None

    def without_engine(self, training: Run) -> dict[str, float]:
        """The update's peak without the engine; the local generator that replaces it holds no memory."""
        assert training.loaded is not None and self.largest is not None
        policy = training.loaded.policy
        training.loop.components.generator = LocalGenerator(policy.backbone, training.loaded.encoder)
        free_memory()
        found: dict[str, float] = {}
        with peak_gb(found, "peak_gb_update_without_engine"):
            self.update(*self.largest)
            wait()
        return found


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Growth after the first SETTLED rounds, and the highest peaks."""
    settled, later = rows[min(SETTLED, len(rows)) - 1], rows[min(SETTLED, len(rows)) - 1 :]
    counts = ("captures", "compiled_graphs")
    found = {f"{name}_after_round_{SETTLED}": rows[-1][name] - settled[name] for name in counts}
    for name in held_gb():
        found[f"{name}_growth_after_round_{SETTLED}"] = round(max(row[name] for row in later) - settled[name], 3)
    if held_gb():
        found |= {f"peak_gb_{phase}": max(row[f"peak_gb_{phase}"] for row in rows) for phase in PHASES}
        found["peak_gb_step"] = max(found[f"peak_gb_{phase}"] for phase in PHASES)
        found["device_used_gb_at_most"] = max(each["device_used_gb"] for row in rows for each in (row, row["awake"]))
    return found
