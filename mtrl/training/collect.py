"""Collects what a step learns from.

    prompts -> responses -> rewards   (user code in its sandbox, while the probes run)
                         -> signals   (per token: dependency on the image, entropy, reference log-prob, ...)

With a filter the order changes: rewards first, fresh prompts instead of groups that teach nothing
(dynamic_sampling.py), then the signals of the groups that stay. Rewards that read signals always run after the probes.
Last, stored groups of earlier steps replace groups that still teach nothing (replay_memory.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from mtrl.protocols import Generator, PendingRewards, Prober, Scorer, TaskSource
from mtrl.training.algorithm_spec import AlgorithmSpec
from mtrl.training.clock import Clock
from mtrl.training.dynamic_sampling import CollectedBatch, check_full_batch, sample_until_full
from mtrl.training.replay_memory import ReplayMemory
from mtrl.types import Experience, Needs, Prompt, Rollouts, Sampling, Signals
from mtrl.utils.record_rows import first_rows


@dataclass(frozen=True, eq=False)
class SampledBatch:
    """Responses to the prompts of a step, and the greedy ones if advantages compare with them."""

    rollouts: Rollouts
    greedy: Rollouts | None = None

    def named(self) -> dict[str, Rollouts]:
        return {"rollouts": self.rollouts} | ({} if self.greedy is None else {"greedy": self.greedy})


@dataclass(frozen=True, eq=False)
class PendingBatch:
    """Responses whose rewards are being computed."""

    sampled: SampledBatch
    rewards: PendingRewards
    baseline: PendingRewards | None = None


@dataclass
class RolloutCollector:
    """Collects one step, with one version of the weights."""

    source: TaskSource
    generator: Generator
    scorer: Scorer
    probers: Sequence[Prober]
    spec: AlgorithmSpec
    step: int
    version: int
    clock: Clock
    times_sampled: Counter[str] = field(default_factory=Counter)  # per task: sampled again, it gets other responses

    def run(self, memory: ReplayMemory | None = None, first: PendingBatch | None = None) -> CollectedBatch:
        """Collect the step. `first`: responses to its first prompts, if they were sampled before."""
        spec, ready = self.spec, iter([] if first is None else [first])
        respond = lambda count: self.score(next(ready, None) or self.begin_sampling(count)())  # noqa: E731
        batch = sample_until_full(respond, spec.prompts_per_step, spec.filtering)
        if spec.noise is not None:
            batch = replace(batch, metrics=batch.metrics | spec.noise.metrics(self.step))
        if spec.scores_first:
            signals = self.probe(batch.experience.rollouts, spec.needs_at(self.step))
            batch = replace(batch, experience=replace(batch.experience, signals=signals))
        if memory is not None:
            batch = memory.exchange(batch, spec.prompts_per_step, self.step, self.source)
        check_full_batch(batch, spec.prompts_per_step, spec.filtering)
        return batch

    def begin_sampling(self, count: int) -> Callable[[], PendingBatch]:
        """Start sampling responses to the next prompts; the returned callable waits for them and starts computing their
        rewards. A dedicated engine samples in between."""
        spec = self.spec
        with self.clock("generate"):
            prompts = self.source.take(count)
            with self.generator.resident():
                rollouts = self._begin_groups(prompts)
                greedy = self._begin(prompts, spec.sampling.greedy) if spec.greedy_baseline else None

        def wait() -> PendingBatch:
            with self.clock("generate"):
                sampled = SampledBatch(rollouts(), None if greedy is None else greedy())
            return self.submit(sampled)

        return wait

    def _begin_groups(self, prompts: Sequence[Prompt]) -> Callable[[], Rollouts]:
        sampling, noise = replace(self.spec.sampling, times_sampled=dict(self.times_sampled)), self.spec.noise
        if noise is None:
            return self._begin(prompts, sampling)
        wait = self._begin(noise.prompts(prompts, self.step), noise.sampling(sampling))
        return lambda: noise.join(prompts, wait())

    def _begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Callable[[], Rollouts]:
        return self.generator.begin(prompts, replace(sampling, step=self.step, version=self.version))

    def submit(self, sampled: SampledBatch) -> PendingBatch:
        """Start computing the rewards."""
        rewards, greedy = self.scorer.submit(sampled.rollouts, self.step), sampled.greedy
        return PendingBatch(sampled, rewards, None if greedy is None else self.scorer.submit(greedy, self.step))

    def score(self, pending: PendingBatch) -> Experience:
        """Wait for the rewards, and probe the responses meanwhile unless a filter scores them first."""
        spec, rollouts, greedy = self.spec, pending.sampled.rollouts, pending.sampled.greedy
        self.times_sampled.update(prompt.task.id for prompt in rollouts.prompts)
        signals = Signals() if spec.scores_first else self.probe(rollouts, spec.needs_at(self.step))
        greedy_signals = Signals() if greedy is None else self.probe(greedy, spec.reward_needs)
        with self.clock("reward"):
            rewards = pending.rewards.result(signals)
            if pending.baseline is not None:
                rewards = replace(rewards, baseline=pending.baseline.result(greedy_signals).total[rollouts.group])
        return Experience(rollouts, rewards, signals)

    def probe(self, rollouts: Rollouts, needs: Needs) -> Signals:
        """Measure the signals that are needed, if any."""
        if not needs:
            return Signals()
        with self.clock("probe"):
            return reduce(Signals.merge, [prober.probe(rollouts, needs, self.step) for prober in self.probers])


def with_maps(experience: Experience, actor: Prober, count: int, step: int, clock: Clock) -> Experience:
    """Add the attention maps of the first responses, for the record; the step itself never reads them."""
    if not count:
        return experience
    first = first_rows(experience.rollouts, count)
    with clock("probe"):
        maps = actor.probe(first, Needs("attention_maps"), step).attention_maps
    if maps is not None:
        maps += (None,) * (len(experience) - len(first))
    return replace(experience, signals=replace(experience.signals, attention_maps=maps))
