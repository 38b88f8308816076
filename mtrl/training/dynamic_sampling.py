"""Filtering with refill: fresh prompts are asked in place of those whose responses teach nothing.

Each prompt that is asked is used or dropped: used + dropped = the prompts of a step + refilled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

from mtrl.algorithms.filtering import OVERALL, GroupFilter
from mtrl.algorithms.joining import join_groups
from mtrl.algorithms.metrics import Metrics, length_metrics, reward_metrics
from mtrl.types import Experience, Rewards, Signals
from mtrl.utils.errors import RunError

Ask = Callable[[int], Experience]
"""The responses to so many fresh prompts, with their rewards."""


@dataclass(frozen=True)
class Filtering:
    """Which groups stay, how often a step asks for others, and what becomes of a step that stays short of prompts."""

    rule: GroupFilter
    max_refills: int = 4
    on_short_batch: Literal["continue", "stop"] = "continue"


@dataclass(frozen=True)
class PromptCounts:
    """What became of prompts. Of 4 prompts 3 were dropped, of the 3 in their place 1: used 3, dropped 4, refilled 3."""

    used: int = 0
    dropped: int = 0
    refilled: int = 0  # asked in place of dropped ones

    def __add__(self, other: PromptCounts) -> PromptCounts:
        return PromptCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self, when: str = "_so_far") -> Metrics:
        return {f"filtering/prompts_{name}{when}": float(count) for name, count in asdict(self).items()}


@dataclass(frozen=True)
class CollectedBatch:
    """What a step learns from, and what is to be said of how it came about."""

    experience: Experience
    counts: PromptCounts
    metrics: Metrics = field(default_factory=dict)
    replaced: Experience | None = None  # the step's own responses, where groups of earlier steps stand in for some
    replayed: tuple[int, ...] = ()  # those groups, by their numbers

    @property
    def own(self) -> Experience:
        """The responses of the newest weights alone, which is what metrics tell of."""
        return self.experience if self.replaced is None else self.replaced

    def measured(self, signals: Signals) -> CollectedBatch:
        return replace(self, experience=replace(self.experience, signals=signals))


def sample_until_full(ask: Ask, places: int, filtering: Filtering | None) -> CollectedBatch:
    """Asks for as many prompts as there are places, then for as many as are missing, until none is or the rounds are
    up. Groups stand in the order in which they came."""
    if filtering is None:
        return CollectedBatch(ask(places), PromptCounts(used=places))
    rounds = [SamplingRound.of(ask(places), filtering.rule)]
    while (used := sum(each.used for each in rounds)) < places and len(rounds) <= filtering.max_refills:
        rounds.append(SamplingRound.of(ask(places - used), filtering.rule))
    asked = sum(each.asked for each in rounds)
    counts = PromptCounts(used=used, dropped=asked - used, refilled=asked - places)
    sampled = join_groups([each.sampled for each in rounds])
    if not used:
        raise nothing_kept(filtering, asked, sampled.rewards)
    told = sampled_metrics(sampled) | counts.metrics("") | {"filtering/rounds": float(len(rounds))}
    return CollectedBatch(join_groups([each.kept for each in rounds if each.used]), counts, told)


@dataclass(frozen=True)
class SamplingRound:
    """What the filter made of some answers. Rewards and lengths of all of them are for metrics: whatever was dropped
    has been sampled as well. Its pixels are not kept."""

    sampled: Experience
    kept: Experience

    @classmethod
    def of(cls, answers: Experience, rule: GroupFilter) -> SamplingRound:
        rollouts = answers.rollouts
        lean = replace(rollouts, prompts=tuple(replace(prompt, media=()) for prompt in rollouts.prompts))
        keeps = rule.keeps(answers.rewards, rollouts.group)
        return cls(Experience(lean, answers.rewards, Signals()), answers.rows(keeps[rollouts.group]))

    @property
    def asked(self) -> int:
        return len(self.sampled.rollouts.prompts)

    @property
    def used(self) -> int:
        return len(self.kept.rollouts.prompts)


def check_full_batch(gathered: CollectedBatch, places: int, filtering: Filtering | None) -> None:
    """Ends a run that would rather stop than learn from fewer prompts than it was told."""
    prompts = len(gathered.experience.rollouts.prompts)
    if filtering is None or filtering.on_short_batch == "continue" or prompts == places:
        return
    raise RunError(
        f"optimization.on_short_batch: stop: after {filtering.max_refills} refills {prompts} of the {places} prompts "
        f"of a step have {filtering.rule.told()}. Set optimization.on_short_batch=continue to go on with the "
        "prompts that there are, or start a new run from the last checkpoint (training.load_checkpoint_path) with more "
        "optimization.max_refills, a wider filter or other data"
    )


def nothing_kept(filtering: Filtering, asked: int, rewards: Rewards) -> RunError:
    parts = ", ".join(dict.fromkeys([OVERALL, *rewards.parts]))
    return RunError(
        f"optimization.online_filtering: none of {asked} prompts has {filtering.rule.told()} (the rewards have "
        f"{parts}), so there is nothing to learn from. Start a new run from the last checkpoint "
        "(training.load_checkpoint_path) with another optimization.filter_key, a wider filter or other data"
    )


def sampled_metrics(sampled: Experience) -> Metrics:
    rollouts = sampled.rollouts
    return reward_metrics(sampled.rewards, rollouts.group) | length_metrics(rollouts.mask, rollouts.truncated)
