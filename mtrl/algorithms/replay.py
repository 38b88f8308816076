"""Replay buffer: stored groups replace groups that teach nothing (SPEC 4).

The buffer orders entries by score; the caller decides what they hold (ids and token streams, no pixels). A replayed
group has the o, b, S and rewards of its own step: rho = exp(l - o) is the change of the policy since then, exp(o - b)
the sampler's mismatch of that time. Its advantages are computed again, and it enters every range over the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from mtrl.algorithms.groups import group_count, group_mean, group_std, group_sum, row_mean
from mtrl.algorithms.joining import join_groups
from mtrl.types import Experience

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class ReplayRule:
    """How many groups are stored, and which ones."""

    replay_buffer_size: int
    replay_var_epsilon: float  # reward standard deviation that a group must exceed
    filter_min_reward: float  # mean reward that a group must reach


@dataclass(frozen=True)
class ReplayEntry(Generic[Payload]):
    """A group of an earlier step. `key` identifies it (step and index)."""

    key: Hashable
    score: float
    payload: Payload


@dataclass(frozen=True)
class ReplayBuffer(Generic[Payload]):
    """The best `capacity` entries, best first. Immutable: `admit` returns the next buffer.

    >>> buffer = ReplayBuffer(2).admit([ReplayEntry("a", 1.0, None), ReplayEntry("b", 3.0, None)])
    >>> [entry.key for entry in buffer.admit([ReplayEntry("c", 2.0, None)]).entries]
    ['b', 'c']
    """

    capacity: int
    entries: tuple[ReplayEntry[Payload], ...] = ()

    def admit(self, candidates: Iterable[ReplayEntry[Payload]]) -> ReplayBuffer[Payload]:
        """Keep the best of old and new. Of two entries with one key the newer stays; of two equal scores the older."""
        newest = {entry.key: entry for entry in [*self.entries, *candidates]}
        ranked = sorted(newest.values(), key=lambda entry: -entry.score)
        return ReplayBuffer(self.capacity, tuple(ranked[: self.capacity]))

    def draw(self, count: int, random: np.random.Generator) -> list[ReplayEntry[Payload]]:
        """Up to `count` different entries, drawn in proportion to score."""
        drawable = [entry for entry in self.entries if entry.score > 0]
        scores = np.array([entry.score for entry in drawable])
        count = min(count, len(drawable))
        if not count:
            return []
        picked = random.choice(len(drawable), size=count, replace=False, p=scores / scores.sum())
        return [drawable[i] for i in picked]


def replay_scores(
    rewards: Tensor, advantage: Tensor, group: Tensor, mask: Tensor, var_epsilon: float, min_reward: float
) -> Tensor:
    """[P]: sum|A| * std for groups worth storing, 0 for the others.

    A response counts with its mean |A| over tokens, which for the group estimators is its |A|.
    """
    std = group_std(rewards, group)
    worthy = (std > var_epsilon) & (group_mean(rewards, group) >= min_reward)
    return (group_sum(row_mean(advantage.abs(), mask), group) * std).where(worthy, 0.0)


def flat_groups(rewards: Tensor, group: Tensor, var_epsilon: float) -> Tensor:
    """Indices of groups without reward variance, which replay may replace."""
    return torch.nonzero(group_std(rewards, group) <= var_epsilon).flatten()


def exchange_groups(experience: Experience, indices: Sequence[int], others: Sequence[Experience]) -> Experience:
    """Replace the groups at these indices by `others`, one group each; any further ones are appended."""
    group = experience.rollouts.group
    replacement = dict(zip(indices, others, strict=False))
    groups = [replacement[g] if g in replacement else experience.rows(group == g) for g in range(group_count(group))]
    return join_groups([*groups, *others[len(indices) :]])
