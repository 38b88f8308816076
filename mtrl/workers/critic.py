"""The critic: estimates the value of states, in a single process or on one of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mtrl.algorithms.value_loss import ValueLoss, value_loss
from mtrl.models.device_copy import to_device, unpack
from mtrl.models.forward import Forward, PreparedPass
from mtrl.models.parallel.fsdp import run_forward
from mtrl.protocols import Snapshot
from mtrl.types import Needs, Rollouts, Signals, TrainBatch
from mtrl.utils.record_rows import map_tensors
from mtrl.workers.learner import Learner, OptimizerSettings, PassLoss
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import STAYING, StayingWeights

ADVICE = (
    "Lower worker.critic.optim.lr, look at the rewards for extreme values, or compute in fp32 "
    "(worker.actor.fsdp.mixed_precision_dtype)."
)


class LocalCritic:
    """Probes and updates the value model of `forward`, which makes the policy's passes with its own weights."""

    def __init__(
        self,
        forward: Forward,
        optimization: OptimizerSettings,
        *,
        update_batching: MicroBatching,
        probe_batching: MicroBatching,
        encoder_files: Mapping[str, bytes],
        offload_optimizer: bool = False,
        policy_weights: StayingWeights = STAYING,
    ) -> None:
        self.forward, self.probe_batching, self.policy_weights = forward, probe_batching, policy_weights
        self.model = forward.backbone.model
        self.learner = Learner(
            self.model,
            optimization,
            update_batching,
            name="critic",
            advice=ADVICE,
            offload=offload_optimizer,
            ranks=forward.backbone.ranks,
        )
        self.encoder_files = encoder_files  # go next to the weights of a checkpoint

    def probe(self, rollouts: Rollouts, needs: Needs, step: int | None) -> Signals:
        """The value at every token, before any update of this step."""
        if "values" not in needs:
            return Signals()
        self.policy_weights.offload()
        if step is not None:
            self.forward.kept.begin(self.forward.backbone, step)
        return self.learner.limit_passes(self.probe_batching).probe(rollouts, self._signals)

    @torch.no_grad()
    def _signals(self, rollouts: Rollouts) -> Callable[[], Signals]:
        values = run_forward(self.model, lambda: self.forward.values(rollouts))
        return lambda: Signals(values=unpack(values, rollouts.mask).cpu())

    def update(self, batches: Iterable[TrainBatch], loss: ValueLoss) -> dict[str, float]:
        self.policy_weights.offload()
        return self.learner.update(batches, partial(self._start_pass, loss=loss))

    def _start_pass(self, batch: TrainBatch, loss: ValueLoss) -> PassLoss:
        return partial(self._loss, batch, loss, self.forward.prepare(batch.rollouts))

    def _loss(
        self, batch: TrainBatch, loss: ValueLoss, prepared: PreparedPass
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        values = self.forward.values(batch.rollouts, prepared)
        streams = map_tensors(batch, lambda stream: to_device(stream, values.device))
        return value_loss(unpack(values, batch.rollouts.mask), streams, loss)

    def snapshot(self) -> Snapshot:
        return self.learner.snapshot(self.encoder_files)

    def restore(self, directory: Path) -> None:
        self.forward.kept.end()
        self.learner.restore(directory)
