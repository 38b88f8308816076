"""Rollouts one step ahead (`worker.rollout.lag: 1`): what step k + 1 learns from is sampled before step k learns.

    sample k + 1 | measure k, learn k     rewards of k + 1 are worked out meanwhile, by the scorer's processes

    sample k + 1                          where engines have devices of their own; rewards of k + 1 then begin with the
    measure k, learn k                    end of both

So a step learns from responses of the weights before the last update. Their log-probs under those weights are kept
(`Rollouts.behaviour`), those of the policy of now are measured before the update, and the ratio of both corrects the
gradient (`losses.mismatch_correction`). No other file can bring the responses back, since their weights are gone when
the step is saved; a checkpoint holds them without pixels:

ahead/
  responses.safetensors   `rollouts/tokens`, `rollouts/behaviour`, .., and `greedy/..` where there are such
  responses.json          ids of the tasks, texts, and how the responses ended
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtrl.algorithms.metrics import Metrics
from mtrl.protocols import TaskSource
from mtrl.training.gather import Asked, Gathering, Sampled
from mtrl.training.refill import Gathered
from mtrl.training.replay import ReplayMemory, by_folder, tensors_of
from mtrl.types import Rollouts

RESPONSES, INDEX = "responses.safetensors", "responses.json"
OWN = ("replay", "ahead")  # parts of a checkpoint that hold what a run has seen: no other run goes on from them


class Ahead:
    """What steps learn from that was sampled before them, by their numbers. `done` tells how many steps are: within a
    step what it began with is still there, since a run that fails in it goes on from its beginning."""

    def __init__(self, done: Callable[[], int]) -> None:
        self.done = done
        self.asked: dict[int, Asked] = {}
        self.begun: tuple[int, Callable[[], Asked]] | None = None  # a step that an engine apart samples for
        self.directory: Path | None = None  # of the checkpoint that the run goes on from

    def run(self, way: Gathering, memory: ReplayMemory | None) -> Gathered:
        """Gathers a step, and before that samples the next one, whose prompts come after this one's."""
        step, places = way.step, way.recipe.prompts_per_step
        now = self.asked.get(step) or self._restored(way) or way.ask(places)
        self.asked = {step: now}
        if step + 1 < way.recipe.total_steps:
            self.begun = step + 1, replace(way, step=step + 1, asked=Counter()).begin(places)
            if not way.generator.apart:
                self.settle()
        gathered = way.run(memory, now)
        told = staleness_metrics(way.version, gathered.own.rollouts)
        return replace(gathered, metrics=gathered.metrics | told)

    def settle(self) -> None:
        """Waits for what was begun, which is to be sampled by the weights that engines hold until now."""
        if self.begun is not None:
            (step, arrived), self.begun = self.begun, None
            self.asked[step] = arrived()

    def _restored(self, way: Gathering) -> Asked | None:
        """What a checkpoint has for this step; its rewards are worked out anew."""
        directory, self.directory = self.directory, None
        sampled = None if directory is None else read_sampled(directory, way.source)
        return None if sampled is None else way.submitted(sampled)

    def snapshot(self) -> AheadSnapshot:
        asked = self.asked.get(self.done())
        return AheadSnapshot(None if asked is None else asked.sampled)

    def restore(self, directory: Path) -> None:
        self.directory = directory


def staleness_metrics(version: int, rollouts: Rollouts) -> Metrics:
    """How many updates the weights that learn are ahead of those that sampled."""
    age = (version - rollouts.version).double()
    return {"rollout/staleness_mean": float(age.mean()), "rollout/staleness_max": float(age.max())}


# -------------------------------------------------------------------------------------------------- to disk and back
@dataclass(frozen=True)
class AheadSnapshot:
    """Nobody changes what was sampled, so that it may be written at any time."""

    copied = True
    sampled: Sampled | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def detached(self) -> AheadSnapshot:
        return self

    def write(self, directory: Path) -> None:
        try:
            save_file(self._tensors(), directory / RESPONSES)
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(str(error)) from error
        rows = {name: row_of(rollouts) for name, rollouts in self._parts().items()}
        (directory / INDEX).write_text(json.dumps(rows, indent=1), encoding="utf-8")

    def _parts(self) -> dict[str, Rollouts]:
        return {} if self.sampled is None else self.sampled.parts()

    def _tensors(self) -> dict[str, Tensor]:
        parts = {name: tensors_of(rollouts) for name, rollouts in self._parts().items()}
        return {f"{name}/{field}": tensor for name, found in parts.items() for field, tensor in found.items()}


def row_of(rollouts: Rollouts) -> dict[str, Any]:
    """What of responses is no tensor."""
    tasks = [prompt.task.id for prompt in rollouts.prompts]
    return {"tasks": tasks, "text": rollouts.text, "finish": rollouts.finish}


def read_sampled(directory: Path, source: TaskSource) -> Sampled | None:
    tensors = by_folder(load_file(directory / RESPONSES))
    rows: Mapping[str, Mapping[str, Any]] = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    if not rows:
        return None
    prompts = tuple(source.get(rows["rollouts"]["tasks"]))
    parts = {
        name: Rollouts(prompts, text=tuple(row["text"]), finish=tuple(row["finish"]), **tensors[name])
        for name, row in rows.items()
    }
    return Sampled(**parts)
