"""How a worker cuts rows into passes (micro-batches)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtrl.algorithms.packing import Piece, cut_groups, fill_micro_batches, row_index
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.types import Needs, Rollouts, Signals
from mtrl.utils.record_rows import join_rows, take_rows

NO_LIMIT = 1 << 62
Measure = Callable[[Rollouts], Callable[[], Signals]]  # queues the pass of some rows; then waits for its signals


@dataclass(frozen=True)
class MicroBatching:
    """The size of a pass: whole groups up to a token budget, or a number of rows. All `ranks` make as many passes as
    the one that has the most."""

    tokens: int | None = None  # budget of a pass; None: the size of the largest group
    at_least: int = 0  # the smallest budget if `tokens` is None
    rows: int | None = None  # rows of a pass, instead of a token budget
    share_prefix: bool = True
    views: int = 1  # how often every pass reads each prompt and response, unless a call says otherwise
    unshared: int = 0  # of these views, in which every response has its own copy of the prompt
    ranks: Ranks = SINGLE_PROCESS

    def passes(self, rollouts: Rollouts, views: int | None = None) -> list[tuple[Tensor, bool]]:
        """Row indices of each pass, and whether it counts: a rank that has fewer passes makes up with idle ones."""
        own = self.split(rollouts, views)
        shortest = rollouts.read_tokens.argmin()[None]
        return [(rows, True) for rows in own] + [(shortest, False)] * (self.ranks.all_reduce_max(len(own)) - len(own))

    def split(self, rollouts: Rollouts, views: int | None = None) -> list[Tensor]:
        """Row indices of each pass, which reads every prompt and response under this many views."""
        if self.rows is not None:
            return list(torch.arange(len(rollouts)).split(self.rows))
        return [row_index(batch) for batch in self._pack(rollouts, views)]

    def _pack(self, rollouts: Rollouts, views: int | None) -> list[list[Piece]]:
        views = views or self.views
        sizes = [len(prompt.ids) for prompt in rollouts.prompts]
        response_tokens = views * rollouts.read_tokens + self.unshared * torch.tensor(sizes)[rollouts.group]
        prompt_tokens = [(views - self.unshared) * size for size in sizes]
        budget = NO_LIMIT if self.tokens is None else self.tokens
        pieces = cut_groups(rollouts.group, response_tokens, prompt_tokens, budget, self.share_prefix)
        if self.tokens is None:
            budget = max(self.at_least, *(piece.tokens for piece in pieces))
        return fill_micro_batches(pieces, budget)

    def reading(self, needs: Needs) -> MicroBatching:
        """The same for passes under the views of these needs."""
        return replace(self, views=needs.views, unshared=len(needs.unshared_views))

    def over(self, ranks: Ranks) -> MicroBatching:
        """The same on ranks."""
        return replace(self.scaled(ranks.sp_group.size), ranks=ranks)

    def scaled(self, sp_size: int) -> MicroBatching:
        """Budgets count the tokens of one rank, and `sp_size` ranks make a pass together."""
        tokens = None if self.tokens is None else sp_size * self.tokens
        return replace(self, tokens=tokens, at_least=sp_size * self.at_least)

    def largest(self, rollouts: Rollouts, views: int | None = None) -> int:
        """The size of the largest pass over these rows, in tokens or rows."""
        if self.rows is not None:
            return min(self.rows, len(rollouts))
        return max(sum(piece.tokens for piece in batch) for batch in self._pack(rollouts, views))

    def first_half(self, rollouts: Rollouts, views: int | None = None) -> int | None:
        """Half the size of the largest pass over these rows, in tokens or rows, for `within`; None if that would not
        cut them any finer."""
        half = max(1, self.largest(rollouts, views) // 2)
        finer = len(self.within(half).split(rollouts, views)) > len(self.split(rollouts, views))
        return half if finer else None

    def smaller(self, rollouts: Rollouts) -> int | None:
        """Three quarters of the size of the largest pass over these rows; None if it cannot be smaller."""
        largest = self.largest(rollouts)
        size = max(1, largest * 3 // 4)
        return size if self.within(size).largest(rollouts) < largest else None

    def within(self, limit: int) -> MicroBatching:
        """The same with a budget of at most `limit`: rows if they are counted, else tokens."""
        if self.rows is not None:
            return replace(self, rows=min(self.rows, limit))
        return replace(self, tokens=limit if self.tokens is None else min(self.tokens, limit))

    def probe(self, rollouts: Rollouts, measure: Measure, views: int = 1) -> Signals:
        """Measures the rollouts pass by pass; returns signals in the order of the rows. All passes are queued before
        the first one is waited for, so that the device never waits."""
        started = [(index, measure(rollouts.rows(index)), counts) for index, counts in self.passes(rollouts, views)]
        parts = [(index, collect()) for index, collect, counts in started if counts]
        order = torch.argsort(torch.cat([index for index, _ in parts]))
        return take_rows(join_rows([part for _, part in parts]), order)
