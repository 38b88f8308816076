"""Dynamic sampling: fresh prompts replace those whose groups a filter drops, as in DAPO and EasyR1.

Each sampled prompt is used or dropped: used + dropped = the prompts of a step + refilled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

from mtrl.algorithms.filtering import OVERALL, GroupFilter
from mtrl.algorithms.joining import join_groups
from mtrl.algorithms.metrics import Metrics, length_metrics, noised_metrics, reward_metrics
from mtrl.types import Experience, Rewards, Signals
from mtrl.utils.errors import RunError

Sample = Callable[[int], Experience]  # number of fresh prompts -> their responses with rewards


@dataclass(frozen=True)
class Filtering:
    """Which groups stay, how often a step samples more, and what happens if prompts are still missing."""

    rule: GroupFilter
    max_refills: int = 4
    on_short_batch: Literal["continue", "stop"] = "continue"


@dataclass(frozen=True)
class PromptCounts:
    """Example: 3 of 4 prompts were dropped, and 1 of their 3 replacements: used 3, dropped 4, refilled 3."""

    used: int = 0
    dropped: int = 0
    refilled: int = 0  # sampled to replace dropped ones

    def __add__(self, other: PromptCounts) -> PromptCounts:
        return PromptCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self, suffix: str = "_so_far") -> Metrics:
        return {f"filtering/prompts_{name}{suffix}": float(count) for name, count in asdict(self).items()}


@dataclass(frozen=True)
class CollectedBatch:
    """What a step learns from, and the metrics of how it was collected."""

    experience: Experience
    counts: PromptCounts
    metrics: Metrics = field(default_factory=dict)
    replaced: Experience | None = None  # the step's own responses, if replayed groups replaced some of them
    replayed: tuple[int, ...] = ()  # indices of the replayed groups

    @property
    def own(self) -> Experience:
        """The responses sampled for this step, which metrics describe."""
        return self.experience if self.replaced is None else self.replaced


def sample_until_full(sample: Sample, prompts: int, filtering: Filtering | None) -> CollectedBatch:
    """Sample `prompts` prompts, then as many as the filter dropped, until none is missing or the refills are used up.
    Groups stay in the order in which they were sampled."""
    if filtering is None:
        return CollectedBatch(sample(prompts), PromptCounts(used=prompts))
    rounds = [SamplingRound.filtered(sample(prompts), filtering.rule)]
    while (used := sum(each.used for each in rounds)) < prompts and len(rounds) <= filtering.max_refills:
        rounds.append(SamplingRound.filtered(sample(prompts - used), filtering.rule))
    sampled = sum(each.sampled_prompts for each in rounds)
    counts = PromptCounts(used=used, dropped=sampled - used, refilled=sampled - prompts)
    everything = join_groups([each.sampled for each in rounds])
    if not used:
        raise nothing_kept(filtering, sampled, everything.rewards)
    metrics = reward_metrics(everything.rewards, everything.rollouts.group)
    metrics |= noised_metrics(everything.rewards, everything.rollouts)
    metrics |= length_metrics(everything.rollouts.mask, everything.rollouts.truncated)
    metrics |= counts.metrics("") | {"filtering/rounds": float(len(rounds))}
    return CollectedBatch(join_groups([each.kept for each in rounds if each.used]), counts, metrics)


@dataclass(frozen=True)
class SamplingRound:
    """The result of filtering some responses. Metrics cover all of them, dropped or not; their pixels are not kept."""

    sampled: Experience
    kept: Experience

    @classmethod
    def filtered(cls, responses: Experience, rule: GroupFilter) -> SamplingRound:
        rollouts = responses.rollouts
        lean = replace(rollouts, prompts=tuple(replace(prompt, media=()) for prompt in rollouts.prompts))
        keeps = rule.keeps(responses.rewards, rollouts.group)
        return cls(Experience(lean, responses.rewards, Signals()), responses.rows(keeps[rollouts.group]))

    @property
    def sampled_prompts(self) -> int:
        return len(self.sampled.rollouts.prompts)

    @property
    def used(self) -> int:
        return len(self.kept.rollouts.prompts)


def check_full_batch(batch: CollectedBatch, prompts: int, filtering: Filtering | None) -> None:
    """End the run if prompts are missing and `on_short_batch` is `stop`."""
    there = len(batch.experience.rollouts.prompts)
    if filtering is None or filtering.on_short_batch == "continue" or there == prompts:
        return
    raise RunError(
        f"optimization.on_short_batch: stop: after {filtering.max_refills} refills {there} of the {prompts} prompts "
        f"of a step have {filtering.rule.describe()}. Set optimization.on_short_batch=continue to train on those "
        "prompts, or start a new run from the last checkpoint (training.load_checkpoint_path) with more "
        "optimization.max_refills, a wider filter or other data"
    )


def nothing_kept(filtering: Filtering, sampled: int, rewards: Rewards) -> RunError:
    parts = ", ".join(dict.fromkeys([OVERALL, *rewards.parts]))
    return RunError(
        f"optimization.online_filtering: none of {sampled} prompts has {filtering.rule.describe()} (the rewards have "
        f"{parts}), so there is nothing to learn from. Start a new run from the last checkpoint "
        "(training.load_checkpoint_path) with another optimization.filter_key, a wider filter or other data"
    )
