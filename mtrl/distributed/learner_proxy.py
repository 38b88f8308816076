"""Workers that several ranks hold together, as the training loop sees them: one actor, critic, reference, reward model.

Rows are distributed here, whole groups to a rank, so that a prompt is still read once for all its responses. The weight
of every row was decided before (`LossWeights`), so ranks only add: they sum gradients and metrics among themselves
(`workers/learner.py`) and return one number per metric, or one signal per row.
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
from mtrl.distributed.remote_proxy import RemoteProxy
from mtrl.protocols import Snapshot, Stateful, WorkerGroup
from mtrl.types import Needs, Rollouts, Signals, TrainBatch, Weights
from mtrl.utils.record_rows import join_rows, take_rows
from mtrl.workers.learner import zero_weighted
from mtrl.workers.micro_batches import NO_LIMIT


def partition_rows(rollouts: Rollouts, groups: int, share_prefix: bool = True) -> list[Tensor]:
    """The rows of each group of ranks: whole prompt groups, balanced by tokens. Some may get none."""
    prompt_tokens = [len(prompt.ids) for prompt in rollouts.prompts]
    pieces = cut_groups(rollouts.group, rollouts.read_tokens, prompt_tokens, NO_LIMIT, share_prefix)
    return [row_index(share) for share in balance(pieces, groups)]


def rows_or_dummy(rollouts: Rollouts, rows: Tensor) -> Rollouts:
    """These rows; the shortest one for ranks that have none, since they must make the same collective calls."""
    return rollouts.rows(rows if len(rows) else dummy_row(rollouts))


def dummy_row(rollouts: Rollouts) -> Tensor:
    return rollouts.read_tokens.argmin()[None]


class StatefulProxy(RemoteProxy[WorkerGroup]):
    """A worker of all ranks whose state goes into checkpoints."""

    def snapshot(self) -> Snapshot:
        taken = self.call_all("take_snapshot")
        return DistributedSnapshot(self, taken[0][0], sum(nbytes for _, nbytes in taken))

    def restore(self, directory: Path) -> None:
        self.call_all("restore", directory)


class DistributedLearner(StatefulProxy):
    """An actor or a critic. Each `sp_size` neighbouring ranks make every pass together and get the same rows."""

    def __init__(self, workers: WorkerGroup, role: str, share_prefix: bool = True, sp_size: int = 1) -> None:
        super().__init__(workers, role, sp_size)
        self.share_prefix = share_prefix

    def probe(self, rollouts: Rollouts, needs: Needs, step: int | None) -> Signals:
        shares = self._partition(rollouts)
        signals = self.call_groups("probe", [(rows_or_dummy(rollouts, rows), needs, step) for rows in shares])
        measured = [each for each, rows in zip(signals, shares, strict=True) if len(rows)]
        return take_rows(join_rows(measured), torch.argsort(torch.cat(shares)))

    def update(self, batches: Iterable[TrainBatch], loss: Any) -> dict[str, float]:
        """Every rank learns from its share of each optimizer step; all return the same metrics."""
        shares: list[list[TrainBatch]] = [[] for _ in range(self.groups)]
        for batch in batches:
            for share, rows in zip(shares, self._partition(batch.rollouts), strict=True):
                idle = zero_weighted(batch.rows(dummy_row(batch.rollouts)))
                share.append(batch.rows(rows) if len(rows) else idle)
        return self.call_groups("update", [(share, loss) for share in shares])[0]

    def _partition(self, rollouts: Rollouts) -> list[Tensor]:
        return partition_rows(rollouts, self.groups, self.share_prefix)

    def publish(self) -> Weights:
        """The version alone: weights go from the actors of the ranks to their engines, never through this process."""
        return Weights(self.workers.call_rank0(self.role, "version"), {})


class DistributedReference(StatefulProxy):
    """A reference that follows the policy."""

    def sync(self) -> None:
        self.call_all("sync")


class DistributedRewardModel(RemoteProxy[WorkerGroup]):
    """A reward model. Each rank reads whole groups, since their images are encoded once."""

    def score(self, rollouts: Rollouts) -> list[float | str]:
        shares = partition_rows(rollouts, self.groups, share_prefix=False)
        results = self.call_groups("score", [(rows_or_dummy(rollouts, rows),) for rows in shares])
        scores: dict[int, float | str] = {}
        for rows, scored in zip(shares, results, strict=True):
            scores |= dict(zip(rows.tolist(), scored, strict=False))  # the score of a dummy row belongs to nobody
        return [scores[row] for row in range(len(rollouts))]


@dataclass(frozen=True)
class DistributedSnapshot:
    """A snapshot of which each rank holds its part in CPU memory, as a copy from the beginning."""

    proxy: StatefulProxy
    number: int
    nbytes: int
    copied = True

    def detached(self) -> DistributedSnapshot:
        return self

    def write(self, directory: Path) -> None:
        self.proxy.workers.call_side_channel(self.proxy.role, "write_snapshot", self.number, directory)


@dataclass
class WorkerHandle:
    """A learner or reference of one rank, as the proxies call it. It holds a snapshot until it is written."""

    worker: Any
    returns_signals: bool = True  # False: the first rank of its sequence-parallel group returns the same
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    numbers: Iterable[int] = field(default_factory=count)

    def probe(self, rollouts: Rollouts, needs: Needs, step: int | None) -> Signals:
        signals = self.worker.probe(rollouts, needs, step)
        return signals if self.returns_signals else Signals()

    def update(self, batches: Sequence[TrainBatch], loss: Any) -> dict[str, float]:
        return self.worker.update(batches, loss)

    def version(self) -> int:
        return self.worker.learner.version

    def sync(self) -> None:
        self.worker.sync()

    def restore(self, directory: Path) -> None:
        self.worker.restore(directory)

    def take_snapshot(self) -> tuple[int, int]:
        """The snapshot's number, which is the same on all ranks, and the bytes of this rank's part."""
        stateful: Stateful = self.worker
        snapshot, number = stateful.snapshot(), next(iter(self.numbers))
        self.snapshots = {number: snapshot}  # an older one that was never written is obsolete
        return number, snapshot.nbytes

    def write_snapshot(self, number: int, directory: Path) -> None:
        self.snapshots.pop(number).write(directory)
