"""The processes that hold one model together: what they must agree on so that all make the same collective calls.

A rank that waits for a call that the others do not make waits for ever. So how many passes there are, whether a pass
sees images, and whether a step counts is decided by all of them, in messages of a few bytes between main memories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Ranks:
    """By default a process that is alone, whose own word is everybody's. `group` is a process group of gloo."""

    group: Any = None
    rank: int = 0
    size: int = 1
    counts: bool = True  # of ranks that share sequences, and find the same, the first

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def any_rank(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.all_reduce_max(int(flag)))

    def all_reduce_max(self, number: int) -> int:
        """The largest number of any rank."""
        return int(self._reduced(torch.tensor(number), dist.ReduceOp.MAX))

    def all_reduce_sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sum of each value over the ranks that count; all ranks have the same names."""
        if self.group is None:
            return dict(values)
        names = sorted(values)
        own = torch.tensor([values[name] if self.counts else 0.0 for name in names], dtype=torch.float64)
        added = self._reduced(own, dist.ReduceOp.SUM)
        found = dict(zip(names, added.tolist(), strict=True))
        return {name: found[name] for name in values}

    def rank0_only(self, make: Callable[[], Value]) -> Value | None:
        """What the first rank makes, there alone. Where it cannot, nobody goes on: all raise its error."""
        if self.group is None:
            return make()
        made, failure = None, None
        if self.is_first:
            try:
                made = make()
            except Exception as error:
                failure = error
        failure = self.broadcast_object(failure)
        if failure is not None:
            raise failure
        return made

    def broadcast_object(self, value: Value) -> Value:
        """The first rank's value, on all of them."""
        told = [value]
        if self.group is not None:
            dist.broadcast_object_list(told, src=0, group=self.group)
        return told[0]

    def _reduced(self, values: Tensor, operation: Any) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, operation, group=self.group)
        return values


SINGLE_PROCESS = Ranks()


def all_ranks(patience: timedelta | None = None) -> Ranks:
    """All processes of `torch.distributed`, which has been set up; messages wait for so long."""
    group = dist.new_group(backend="gloo", timeout=patience)
    return Ranks(group, dist.get_rank(), dist.get_world_size())
