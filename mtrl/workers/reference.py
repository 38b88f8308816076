"""The policy as it was, to measure how far training has gone from it."""

from __future__ import annotations

import torch

from mtrl.algorithms.vocab import full_kl
from mtrl.models.forward import Forward, spread
from mtrl.types import Needs, Rollouts, Signals
from mtrl.workers.actor import in_order
from mtrl.workers.micro_batches import MicroBatching


class Reference:
    """A frozen copy. With `policy`, the divergence over the whole vocabulary is measured as well: of the policy at the
    time of the probe, so in the same process."""

    def __init__(self, forward: Forward, batching: MicroBatching, policy: Forward | None = None) -> None:
        self.forward, self.batching, self.policy = forward, batching, policy
        forward.backbone.model.requires_grad_(False)

    @torch.no_grad()
    def probe(self, rollouts: Rollouts, needs: Needs, step: int) -> Signals:
        if not ("reference" in needs or "divergence" in needs):
            return Signals()
        rows = self.batching.split(rollouts)
        return in_order([self._probe(rollouts.rows(index)) for index in rows], torch.cat(rows))

    def _probe(self, rollouts: Rollouts) -> Signals:
        if self.policy is None:
            return Signals(reference=self.forward.signals(rollouts).old)
        ours, theirs = self.policy.response_hidden(rollouts), self.forward.response_hidden(rollouts)
        matrices = self.policy.backbone.output_matrix, self.forward.backbone.output_matrix
        kl = full_kl(ours, theirs, *matrices, **self.policy.distribution())
        return Signals(divergence=spread(kl, rollouts.mask).cpu())
