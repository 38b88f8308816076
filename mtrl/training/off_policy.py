"""One-step off-policy rollouts (`worker.rollout.off_policy_steps: 1`): step k + 1 is sampled before step k learns.

    sample k + 1 | probe k, learn k       rewards of k + 1 are computed meanwhile, by the scorer's processes

    sample k + 1                          with dedicated engines; the rewards of k + 1 start when both are done
    probe k, learn k

So a step learns from responses of the weights before the last update. Their log-probs under those weights are kept
(`Rollouts.rollout_logprobs`), those of the current policy are measured before the update, and the ratio corrects the
gradient (`losses.mismatch_correction`). When a step is saved, the weights that sampled the next step are gone, so the
checkpoint holds its responses, without pixels:

ahead/
  responses.safetensors   `rollouts/tokens`, `rollouts/rollout_logprobs`, .., and `greedy/..` if there are any
  responses.json          task ids, texts and finish reasons
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
RUN_STATE = ("replay", "ahead")  # parts of a checkpoint that belong to one run: another run does not start from them


class OneStepAhead:
    """Responses by the step that learns from them. `done` returns the number of finished steps: the responses of the
    current step are kept, since a run that fails in it resumes at its beginning."""

    def __init__(self, done: Callable[[], int]) -> None:
        self.done = done
        self.pending: dict[int, PendingBatch] = {}
        self.started: tuple[int, Callable[[], PendingBatch]] | None = None  # the step that is being sampled
        self.directory: Path | None = None  # the checkpoint that the run resumes from

    def run(self, collector: RolloutCollector, memory: ReplayMemory | None) -> CollectedBatch:
        """Sample the next step, whose prompts follow those of this one, then collect this step."""
        step, prompts = collector.step, collector.spec.prompts_per_step
        first = self.pending.get(step) or self._restored(collector) or collector.begin_sampling(prompts)()
        self.pending = {step: first}
        if step + 1 < collector.spec.total_steps:
            self.started = step + 1, replace(collector, step=step + 1, times_sampled=Counter()).begin_sampling(prompts)
            if collector.generator.colocated:
                self.wait()
        batch = collector.run(memory, first)
        return replace(batch, metrics=batch.metrics | staleness_metrics(collector.version, batch.own.rollouts))

    def wait(self) -> None:
        """Wait for the step that is being sampled. It must end before the engines load new weights."""
        if self.started is not None:
            (step, wait), self.started = self.started, None
            self.pending[step] = wait()

    def _restored(self, collector: RolloutCollector) -> PendingBatch | None:
        """The responses that the checkpoint holds for this step; their rewards are computed again."""
        directory, self.directory = self.directory, None
        sampled = None if directory is None else read_sampled(directory, collector.source)
        return None if sampled is None else collector.submit(sampled)

    def snapshot(self) -> RecordSnapshot:
        pending = self.pending.get(self.done())
        named = {} if pending is None else pending.sampled.named()
        return RecordSnapshot(
            RESPONSES, record_tensors(named), {name: response_row(rollouts) for name, rollouts in named.items()}
        )

    def restore(self, directory: Path) -> None:
        self.directory = directory


def staleness_metrics(version: int, rollouts: Rollouts) -> Metrics:
    """How many updates the current weights are ahead of those that sampled."""
    age = (version - rollouts.version).double()
    return {"rollout/staleness_mean": float(age.mean()), "rollout/staleness_max": float(age.max())}


# -------------------------------------------------------------------------------------------------- checkpoint files
def response_row(rollouts: Rollouts) -> dict[str, Any]:
    """The fields that are no tensors."""
    tasks = [prompt.task.id for prompt in rollouts.prompts]
    return {"tasks": tasks, "text": rollouts.text, "finish": rollouts.finish_reason}


def read_sampled(directory: Path, source: TaskSource) -> SampledBatch | None:
    tensors, rows = read_records(directory, RESPONSES)
    if not rows:
        return None
    prompts = tuple(source.get(rows["rollouts"]["tasks"]))
    named: dict[str, Rollouts] = {}
    for name, row in rows.items():
        columns: dict[str, Any] = dict(tensors[name])
        named[name] = Rollouts(prompts, text=tuple(row["text"]), finish_reason=tuple(row["finish"]), **columns)
    return SampledBatch(**named)
