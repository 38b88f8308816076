"""How a step comes by what it learns from.

    prompts -> responses -> rewards   (user code, in its sandbox, meanwhile)
                         -> signals   (what each token depends on: the image, its own certainty, the reference)

A filter changes the order: rewards first, fresh prompts in place of those that teach nothing (refill.py), and signals
of what stayed. Rewards that read signals come after them in any case. Last, groups of earlier steps stand in for those
that teach nothing still (replay.py).
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
    """Responses to the prompts of a step, and the greedy ones where advantages compare with them."""

    rollouts: Rollouts
    greedy: Rollouts | None = None

    def parts(self) -> dict[str, Rollouts]:
        return {"rollouts": self.rollouts} | ({} if self.greedy is None else {"greedy": self.greedy})


@dataclass(frozen=True, eq=False)
class PendingBatch:
    """Responses whose rewards are being worked out."""

    sampled: SampledBatch
    pending: PendingRewards
    baseline: PendingRewards | None = None


@dataclass
class RolloutCollector:
    """One step's way from prompts to experience, with the weights of one version."""

    source: TaskSource
    generator: Generator
    scorer: Scorer
    probers: Sequence[Prober]
    algorithm_spec: AlgorithmSpec
    step: int
    version: int
    clock: Clock
    asked: Counter[str] = field(default_factory=Counter)  # how often each task was: again, it gets other responses

    def run(self, memory: ReplayMemory | None = None, ahead: PendingBatch | None = None) -> CollectedBatch:
        """`ahead`: responses to the first prompts of this step that were sampled before it."""
        algorithm_spec, ready = self.algorithm_spec, iter([] if ahead is None else [ahead])
        respond = lambda count: self.answered(next(ready, None) or self.ask(count))  # noqa: E731
        gathered = sample_until_full(respond, algorithm_spec.prompts_per_step, algorithm_spec.filtering)
        if algorithm_spec.scores_first:
            gathered = gathered.measured(self.probe(gathered.experience.rollouts, algorithm_spec.needs_at(self.step)))
        if memory is not None:
            gathered = memory.exchange(gathered, algorithm_spec.prompts_per_step, self.step, self.source)
        check_full_batch(gathered, algorithm_spec.prompts_per_step, algorithm_spec.filtering)
        return gathered

    def ask(self, count: int) -> PendingBatch:
        """Responses to the next prompts; their rewards are worked out from here on."""
        return self.begin(count)()

    def begin(self, count: int) -> Callable[[], PendingBatch]:
        """The same in two: an engine apart samples until what this gives is called."""
        algorithm_spec = self.algorithm_spec
        with self.clock("generate"):
            prompts = self.source.take(count)
            with self.generator.resident():
                rollouts = self.sample(prompts, replace(algorithm_spec.sampling, times_sampled=dict(self.asked)))
                greedy = (
                    self.sample(prompts, algorithm_spec.sampling.greedy) if algorithm_spec.greedy_baseline else None
                )

        def arrived() -> PendingBatch:
            with self.clock("generate"):
                sampled = SampledBatch(rollouts(), None if greedy is None else greedy())
            return self.submitted(sampled)

        return arrived

    def submitted(self, sampled: SampledBatch) -> PendingBatch:
        pending = self.scorer.submit(sampled.rollouts, self.step)
        greedy = sampled.greedy
        return PendingBatch(sampled, pending, None if greedy is None else self.scorer.submit(greedy, self.step))

    def answered(self, asked: PendingBatch) -> Experience:
        """Responses with their rewards. They are measured meanwhile, or later if scored first."""
        algorithm_spec, rollouts, greedy = self.algorithm_spec, asked.sampled.rollouts, asked.sampled.greedy
        self.asked.update(prompt.task.id for prompt in rollouts.prompts)
        signals = Signals() if algorithm_spec.scores_first else self.probe(rollouts, algorithm_spec.needs_at(self.step))
        of_greedy = Signals() if greedy is None else self.probe(greedy, algorithm_spec.reward_needs)
        with self.clock("reward"):
            rewards = asked.pending.result(signals)
            if asked.baseline is not None:
                rewards = replace(rewards, baseline=asked.baseline.result(of_greedy).total[rollouts.group])
        return Experience(rollouts, rewards, signals)

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Callable[[], Rollouts]:
        return self.generator.begin(prompts, replace(sampling, step=self.step, version=self.version))

    def probe(self, rollouts: Rollouts, needs: Needs) -> Signals:
        """What each token depends on, by all who measure; with nothing needed, nobody is asked."""
        if not needs:
            return Signals()
        with self.clock("probe"):
            return reduce(Signals.merge, [prober.probe(rollouts, needs, self.step) for prober in self.probers])


def with_maps(experience: Experience, actor: Prober, count: int, step: int, clock: Clock) -> Experience:
    """For those who look on: where the tokens of the first responses look. The step itself never reads it."""
    if not count:
        return experience
    first = first_rows(experience.rollouts, count)
    with clock("probe"):
        maps = actor.probe(first, Needs("attention_maps"), step).attention_maps
    nothing = (None,) * (len(experience) - len(first))
    return replace(
        experience, signals=replace(experience.signals, attention_maps=None if maps is None else maps + nothing)
    )
