"""Which responses are decoded, which wait, and which have ended: the host's side of continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Poll:
    """The flags of ended rows, by slot, as they were at a step."""

    step: int
    flags: Tensor  # a copy on its way to the CPU
    wait: Callable[[], object] = lambda: None  # for the copy

    @cached_property
    def done(self) -> list[int]:
        self.wait()
        return self.flags.tolist()


class RowQueue:
    """Rows 0, 1, .. of a batch, `n` for each prompt and of at most so many tokens, in a limited number of slots. A row
    that ends leaves its slot to the next one. `now` counts steps; a row has its first token before a step."""

    def __init__(self, rows: int, slots: int, n: int, tokens: int) -> None:
        self.rows, self.n, self.tokens, self.now = rows, n, tokens, 0
        self.next_row = 0
        self.row_of = [-1] * slots  # -1: the slot is free
        self.began = [0] * slots

    @property
    def live(self) -> list[int]:
        """The slots in use."""
        return [slot for slot, row in enumerate(self.row_of) if row >= 0]

    @property
    def prompt_of(self) -> list[int]:
        """By slot."""
        return [row // self.n for row in self.row_of]

    def fill(self) -> tuple[list[int], list[int]]:
        """Put the next rows into the free slots; returns these slots and rows."""
        free = [slot for slot, row in enumerate(self.row_of) if row < 0]
        rows = list(range(self.next_row, min(self.rows, self.next_row + len(free))))
        slots = free[: len(rows)]
        for slot, row in zip(slots, rows, strict=True):
            self.row_of[slot], self.began[slot] = row, self.now
        self.next_row += len(rows)
        return slots, rows

    def find_ended(self, poll: Poll | None) -> list[int]:
        """The live slots whose rows have all their tokens, or had ended at a poll. The flag of a slot whose row began
        later is its predecessor's."""
        done = [0] * len(self.row_of) if poll is None else poll.done
        polled = -1 if poll is None else poll.step
        return [
            slot
            for slot in self.live
            if self.now - self.began[slot] >= self.tokens - 1 or (done[slot] and self.began[slot] < polled)
        ]

    def release(self, slots: Sequence[int]) -> list[int]:
        """Free these slots; returns their rows."""
        rows = [self.row_of[slot] for slot in slots]
        for slot in slots:
            self.row_of[slot] = -1
        return rows


class EndedRows:
    """Responses that have ended, on the device until all have."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.order: list[int] = []
        self.parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, rows: Sequence[int], part: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        """Tokens, log-probs, experts and lengths of these rows."""
        self.order += rows
        self.parts.append(part)

    def split(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Tokens, log-probs and experts of each row, on the CPU, in their order; no experts of a dense model."""
        tokens, logps, experts, lengths = (torch.cat(each).cpu() for each in zip(*self.parts, strict=True))
        assert sorted(self.order) == list(range(self.rows)), "every row ends once"
        place = {row: number for number, row in enumerate(self.order)}
        ends = [(place[row], int(lengths[place[row]])) for row in range(self.rows)]
        routed = [experts[i, :end] for i, end in ends] if experts.numel() else []
        return [tokens[i, :end].long() for i, end in ends], [logps[i, :end] for i, end in ends], routed
