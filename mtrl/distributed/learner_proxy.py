"""Learners that several ranks hold together, as the loop sees them: one actor, one critic, one reference.

Rows are dealt out here, whole groups to a rank, so that a prompt is still read once for its responses. What every row
weighs was decided before (`LossWeights`), so that ranks only add: their sums are made between them (`learner.py`), and
what comes back is a number a metric, or a signal a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.algorithms.packing import balance, cut_groups, row_index
from mtrl.protocols import Snapshot, Stateful, WorkerGroup
from mtrl.types import Needs, Rollouts, Signals, TrainBatch, Weights
from mtrl.utils.record_rows import join_rows, take_rows
from mtrl.workers.learner import zero_weighted
from mtrl.workers.micro_batches import NO_LIMIT


def partition_rows(rollouts: Rollouts, ranks: int, share_prefix: bool = True) -> list[Tensor]:
    """The rows of each rank: whole groups, as equal in tokens as they go. A rank may get none."""
    prompt_tokens = [len(prompt.ids) for prompt in rollouts.prompts]
    pieces = cut_groups(rollouts.group, rollouts.mask.sum(1), prompt_tokens, NO_LIMIT, share_prefix)
    return [row_index(share) for share in balance(pieces, ranks)]


def dummy_row(rollouts: Rollouts) -> Tensor:
    """For a rank that has no rows and must go along with the others."""
    return rollouts.mask.sum(1).argmin()[None]


@dataclass(frozen=True)
class DistributedLearner:
    """A worker of every rank, by its name `part`: an actor, or a critic. So many `sharers`, neighbours, make every pass
    together and get the same rows."""

    worker_group: WorkerGroup
    part: str
    share_prefix: bool = True
    sharers: int = 1

    def probe(self, rollouts: Rollouts, needs: Needs, step: int) -> Signals:
        dealt = self._dealt(rollouts)
        shares = [rollouts.rows(rows if len(rows) else dummy_row(rollouts)) for rows in dealt]
        found = self._call("probe", [(share, needs, step) for share in shares])
        parts = [signals for signals, rows in zip(found, dealt, strict=True) if len(rows)]
        return take_rows(join_rows(parts), torch.argsort(torch.cat(dealt)))

    def update(self, batches: Iterable[TrainBatch], loss: Any) -> dict[str, float]:
        """Every rank has its part of each optimizer step; all find the same metrics."""
        shares: list[list[TrainBatch]] = [[] for _ in range(self.worker_group.size // self.sharers)]
        for batch in batches:
            for share, rows in zip(shares, self._dealt(batch.rollouts), strict=True):
                idle = zero_weighted(batch.rows(dummy_row(batch.rollouts)))
                share.append(batch.rows(rows) if len(rows) else idle)
        return self._call("update", [(share, loss) for share in shares])[0]

    def _dealt(self, rollouts: Rollouts) -> list[Tensor]:
        return partition_rows(rollouts, self.worker_group.size // self.sharers, self.share_prefix)

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Each of the arguments to all who share it; what the first of them says."""
        given = [each for each in arguments for _ in range(self.sharers)]
        return self.worker_group.call(self.part, method, given)[:: self.sharers]

    def publish(self) -> Weights:
        """A handle alone: weights go from the ranks' actors to their own engines, and never through here."""
        return Weights(self.worker_group.call_rank0(self.part, "version"), {})

    def snapshot(self) -> Snapshot:
        return take_snapshot(self.worker_group, self.part)

    def restore(self, directory: Path) -> None:
        on_all(self.worker_group, self.part, "restore", directory)


@dataclass(frozen=True)
class DistributedRewardModel:
    """A reward model that all ranks hold together; each reads whole groups, since images are seen once for them."""

    worker_group: WorkerGroup
    part: str = "reward"

    def score(self, rollouts: Rollouts) -> list[float | str]:
        dealt = partition_rows(rollouts, self.worker_group.size, share_prefix=False)
        shares = [rollouts.rows(rows if len(rows) else dummy_row(rollouts)) for rows in dealt]
        told = self.worker_group.call(self.part, "score", [(share,) for share in shares])
        found: dict[int, float | str] = {}
        for rows, scores in zip(dealt, told, strict=True):
            found |= dict(zip(rows.tolist(), scores, strict=False))  # a rank without rows has scored one for nobody
        return [found[row] for row in range(len(rollouts))]


@dataclass(frozen=True)
class DistributedReference:
    """A reference that follows the policy, on every rank."""

    worker_group: WorkerGroup
    part: str = "reference"

    def refresh(self) -> None:
        on_all(self.worker_group, self.part, "refresh")

    def snapshot(self) -> Snapshot:
        return take_snapshot(self.worker_group, self.part)

    def restore(self, directory: Path) -> None:
        on_all(self.worker_group, self.part, "restore", directory)


@dataclass(frozen=True)
class DistributedSnapshot:
    """What lies gathered in the main memories of the ranks, each with its part: a copy from the beginning."""

    worker_group: WorkerGroup
    part: str
    number: int
    nbytes: int
    copied = True

    def detached(self) -> DistributedSnapshot:
        return self

    def write(self, directory: Path) -> None:
        self.worker_group.call_side_channel(self.part, "write_snapshot", self.number, directory)


def take_snapshot(worker_group: WorkerGroup, part: str) -> DistributedSnapshot:
    taken = on_all(worker_group, part, "take_snapshot")
    return DistributedSnapshot(worker_group, part, taken[0][0], sum(nbytes for _, nbytes in taken))


def on_all(worker_group: WorkerGroup, part: str, method: str, *arguments: Any) -> list[Any]:
    return worker_group.call(part, method, [arguments] * worker_group.size)


@dataclass
class WorkerHandle:
    """A learner of one rank, as `DistributedLearner` calls it. Snapshots wait here until they are written."""

    worker: Any
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    numbers: Iterable[int] = field(default_factory=count)
    counts: bool = True  # or another rank, with which it shares all passes, says the same

    def probe(self, rollouts: Rollouts, needs: Needs, step: int) -> Signals:
        found = self.worker.probe(rollouts, needs, step)
        return found if self.counts else Signals()

    def update(self, batches: Sequence[TrainBatch], loss: Any) -> dict[str, float]:
        return self.worker.update(batches, loss)

    def version(self) -> int:
        return self.worker.learner.version

    def refresh(self) -> None:
        self.worker.refresh()

    def restore(self, directory: Path) -> None:
        self.worker.restore(directory)

    def take_snapshot(self) -> tuple[int, int]:
        """Its number, which is the same on all ranks, and the bytes of this rank's part."""
        stateful: Stateful = self.worker
        snapshot, number = stateful.snapshot(), next(iter(self.numbers))
        self.snapshots = {number: snapshot}  # one that nobody has written is of no use any more
        return number, snapshot.nbytes

    def write_snapshot(self, number: int, directory: Path) -> None:
        self.snapshots.pop(number).write(directory)
