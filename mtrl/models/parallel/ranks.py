"""The processes (ranks) that hold one model together, and what they agree on before they make collective calls.

A rank hangs forever in a collective call that the others do not make. All ranks therefore decide together how many
passes there are, whether a pass sees images, and whether a step counts, in messages of a few bytes over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mtrl.models.parallel.sequence import NO_SEQUENCE_PARALLEL, SequenceParallelGroup

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process among all ranks of a model; a single process by default. `group` is a gloo process group.

    `sp_group` are the ranks that make every pass of the model together with this one, each with a part of every
    sequence. They compute the same numbers, so only the first of them counts in a sum over ranks.
    """

    group: Any = None
    rank: int = 0
    size: int = 1
    sp_group: SequenceParallelGroup = NO_SEQUENCE_PARALLEL

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.all_reduce_max(int(flag)))

    def all_reduce_max(self, number: int) -> int:
        return int(self._all_reduce(torch.tensor(number), dist.ReduceOp.MAX))

    def all_reduce_sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sum of each value over all ranks, once per sequence-parallel group; all ranks have the same names."""
        if self.group is None:
            return dict(values)
        names = sorted(values)
        own = torch.tensor([values[name] if self.sp_group.is_first else 0.0 for name in names], dtype=torch.float64)
        sums = dict(zip(names, self._all_reduce(own, dist.ReduceOp.SUM).tolist(), strict=True))
        return {name: sums[name] for name in values}

    def rank0_only(self, make: Callable[[], Value]) -> Value | None:
        """Calls `make` on the first rank alone; the others get None. If it fails, all ranks raise its error."""
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
        """The first rank's value, on all ranks."""
        received = [value]
        if self.group is not None:
            dist.broadcast_object_list(received, src=0, group=self.group)
        return received[0]

    def _all_reduce(self, values: Tensor, operation: Any) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, operation, group=self.group)
        return values


SINGLE_PROCESS = Ranks()


def all_ranks(timeout: timedelta | None = None) -> Ranks:
    """All processes of `torch.distributed`, which must be initialized, in a gloo group with this timeout."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(group, dist.get_rank(), dist.get_world_size())
