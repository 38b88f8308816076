"""Rollouts one step ahead (`worker.rollout.off_policy_steps: 1`): what step k + 1 learns from is sampled before step k learns.

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

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtrl.algorithms.metrics import Metrics
from mtrl.checkpoint.records import RecordSnapshot, read_records, record_tensors
from mtrl.protocols import TaskSource
from mtrl.training.collect import PendingBatch, RolloutCollector, SampledBatch
from mtrl.training.dynamic_sampling import CollectedBatch
from mtrl.training.replay_memory import ReplayMemory
from mtrl.types import Rollouts

RESPONSES = "responses"
OWN = ("replay", "ahead")  # parts of a checkpoint that hold what a run has seen: no other run goes on from them


class OneStepAhead:
    """What steps learn from that was sampled before them, by their numbers. `done` tells how many steps are: within a
    step what it began with is still there, since a run that fails in it goes on from its beginning."""

    def __init__(self, done: Callable[[], int]) -> None:
        self.done = done
        self.asked: dict[int, PendingBatch] = {}
        self.begun: tuple[int, Callable[[], PendingBatch]] | None = None  # a step that an engine apart samples for
        self.directory: Path | None = None  # of the checkpoint that the run goes on from

    def run(self, way: RolloutCollector, memory: ReplayMemory | None) -> CollectedBatch:
        """Gathers a step, and before that samples the next one, whose prompts come after this one's."""
        step, places = way.step, way.algorithm_spec.prompts_per_step
        now = self.asked.get(step) or self._restored(way) or way.ask(places)
        self.asked = {step: now}
        if step + 1 < way.algorithm_spec.total_steps:
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

    def _restored(self, way: RolloutCollector) -> PendingBatch | None:
        """What a checkpoint has for this step; its rewards are worked out anew."""
        directory, self.directory = self.directory, None
        sampled = None if directory is None else read_sampled(directory, way.source)
        return None if sampled is None else way.submitted(sampled)

    def snapshot(self) -> RecordSnapshot:
        asked = self.asked.get(self.done())
        parts = {} if asked is None else asked.sampled.parts()
        return RecordSnapshot(
            RESPONSES, record_tensors(parts), {name: response_row(each) for name, each in parts.items()}
        )

    def restore(self, directory: Path) -> None:
        self.directory = directory


def staleness_metrics(version: int, rollouts: Rollouts) -> Metrics:
    """How many updates the weights that learn are ahead of those that sampled."""
    age = (version - rollouts.version).double()
    return {"rollout/staleness_mean": float(age.mean()), "rollout/staleness_max": float(age.max())}


# -------------------------------------------------------------------------------------------------- to disk and back
def response_row(rollouts: Rollouts) -> dict[str, Any]:
    """What of responses is no tensor."""
    tasks = [prompt.task.id for prompt in rollouts.prompts]
    return {"tasks": tasks, "text": rollouts.text, "finish": rollouts.finish_reason}


def read_sampled(directory: Path, source: TaskSource) -> SampledBatch | None:
    tensors, rows = read_records(directory, RESPONSES)
    if not rows:
        return None
    prompts = tuple(source.get(rows["rollouts"]["tasks"]))
    parts = {
        name: Rollouts(prompts, text=tuple(row["text"]), finish_reason=tuple(row["finish"]), **tensors[name])
        for name, row in rows.items()
    }
    return SampledBatch(**parts)
