"""Ulysses sequence parallelism: the ranks of a group share every sequence of a pass.

Each rank holds an equal part of the positions, and all that looks at one position at a time (embeddings, norms, MLPs,
adapters, deepstack) works on that part alone. Attention looks at all positions, one head at a time: there ranks trade
positions for heads, attend with their share of the heads over whole sequences, and trade back. Hidden states that
predict response tokens are dealt out once more, as many to each rank, for the vocabulary; what comes of a token, one
number, goes to all.

So every rank of a group has the same log-probs and finds the same loss, of which it takes back the part of its own
tokens: summed over ranks, gradients are those of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrl.models.device_copy import to_device


@dataclass(frozen=True, eq=False)
class SequenceParallelGroup:
    """This rank among those that share its sequences; by default it has them to itself. `group` is a process group of
    the device that computes."""

    group: Any = None
    number: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.number == 0

    # ------------------------------------------------------------------------------------------------------ positions
    def columns(self, length: int) -> slice:
        """The positions of this rank in sequences of a length that divides."""
        assert length % self.size == 0, "sequences are padded to equal parts"
        return slice(self.number * length // self.size, (self.number + 1) * length // self.size)

    def part(self, tensor: Tensor) -> Tensor:
        """[.., S] -> [.., S / size]"""
        return tensor if self.size == 1 else tensor[..., self.columns(tensor.shape[-1])]

    # ---------------------------------------------------------------------------------------------- heads in attention
    def by_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, heads, S / size, D] of all heads -> [B, heads / size, S, D] of all positions, in one exchange. Keys and
        values of fewer heads than ranks go to all ranks whose queries look at them."""
        copies = max(1, self.size // key.shape[1])
        key, value = (each.repeat_interleave(copies, 1) if copies > 1 else each for each in (key, value))
        dealt = [each.unflatten(1, (self.size, -1)).movedim(1, 0) for each in (query, key, value)]
        met = self._exchanged(torch.cat(dealt, 2))  # [parts, B, heads of all three, S / size, D]
        found = met.movedim(0, 2).flatten(2, 3).split([each.shape[2] for each in dealt], 1)
        return found[0], found[1], found[2]

    def by_positions(self, output: Tensor) -> Tensor:
        """[B, S, heads / size, D] -> [B, S / size, heads, D]: what `by_heads` has done, undone."""
        dealt = output.unflatten(1, (self.size, -1)).movedim(1, 0)  # [parts, B, S / size, heads / size, D]
        return self._exchanged(dealt).movedim(0, 2).flatten(2, 3)

    def mean(self, values: Tensor) -> Tensor:
        """Of what each rank has found for its heads; without gradients."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
            values /= self.size
        return values

    # ---------------------------------------------------------------------------------------- tokens of the vocabulary
    def tokens(self, count: int) -> slice:
        """Which of so many response tokens this rank takes to the vocabulary."""
        each = -(-count // self.size)
        return slice(min(count, self.number * each), min(count, (self.number + 1) * each))

    def local_hidden(self, hidden: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        """[own tokens, H]: of hidden states [B, S / size, H] of this rank's positions and those of the others, those at
        the `places` (sequence and position of each token) of its own tokens."""
        sequence, place = places
        if self.size == 1:
            return hidden[to_device(sequence, hidden.device), to_device(place, hidden.device)]
        width, each = hidden.shape[1], -(-len(place) // self.size)
        held_by, goes_to = place // width, torch.arange(len(place)) // max(1, each)
        held = (held_by == self.number).nonzero()[:, 0]  # in the order of where they go
        from_ranks = held_by[self.tokens(len(place))]
        sent = hidden[to_device(sequence[held], hidden.device), to_device(place[held] % width, hidden.device)]
        counts = [self._counted(from_ranks), self._counted(goes_to[held])]
        met: Tensor = _Exchange.apply(sent, self.group, *counts)
        order = from_ranks.argsort(stable=True)  # as they came: by rank
        return met[to_device(order.argsort(), hidden.device)]

    def of_all(self, values: Tensor, count: int) -> Tensor:
        """[count]: one number for each response token, from those of this rank's own. Each rank takes gradients for its
        own alone: the others find the same loss, and take theirs."""
        if self.size == 1:
            return values
        found: Tensor = _Gather.apply(values, self, count)
        return found

    def _counted(self, ranks: Tensor) -> list[int]:
        return torch.bincount(ranks, minlength=self.size).tolist()

    def _exchanged(self, dealt: Tensor) -> Tensor:
        """[size, ..]: a piece for each rank -> a piece of each rank."""
        met: Tensor = _Exchange.apply(dealt, self.group, None, None)
        return met


NO_SEQUENCE_PARALLEL = SequenceParallelGroup()


def share_sequences(size: int) -> SequenceParallelGroup:
    """So many neighbours of all ranks share their sequences; all ranks must call it."""
    if size == 1:
        return NO_SEQUENCE_PARALLEL
    group, _ = dist.new_subgroups(size)
    return SequenceParallelGroup(group, dist.get_rank() % size, size)


def unshareable_heads(heads: int, key_heads: int, size: int) -> str | None:
    """Why so many ranks cannot share the heads of a model."""
    if heads % size:
        return f"its {heads} attention heads cannot be dealt out to {size} ranks; take a divisor of {heads}"
    if key_heads % size and size % key_heads:
        return (
            f"its {key_heads} heads of keys and values cannot be dealt out to {size} ranks; take a divisor of "
            f"{key_heads}, or a multiple of it that divides the {heads} attention heads"
        )
    return None


class _Exchange(torch.autograd.Function):
    """Rows for each rank out, rows of each rank in; gradients go the same way back. `received` and `sent` count rows by
    rank, where they are not all alike."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: Any, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> Tensor:
        ctx.group, ctx.counts = group, (sent, received)
        return _exchange(rows, group, received, sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.group, *ctx.counts), None, None, None


def _exchange(rows: Tensor, group: Any, received: Sequence[int] | None, sent: Sequence[int] | None) -> Tensor:
    number = len(rows) if received is None else sum(received)
    found = rows.new_empty(number, *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sharers: SequenceParallelGroup, count: int) -> Tensor:
        ctx.own = sharers.tokens(count)
        each = -(-count // sharers.size)
        padded = torch.nn.functional.pad(values, (0, each - len(values)))
        found = [torch.empty_like(padded) for _ in range(sharers.size)]
        dist.all_gather(found, padded, group=sharers.group)
        return torch.cat(found)[:count]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.own], None, None
