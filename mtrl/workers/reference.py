"""The policy as it was, to measure how far training has gone from it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from mtrl.algorithms.vocab import full_kl
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward, unpack
from mtrl.types import Needs, Rollouts, Signals


@dataclass(frozen=True)
class Reference:
    """Other weights behind the policy's own forward pass. The worker that holds the policy holds this view as well, so
    that a probe or an update can ask both about the same rows, whatever the weights are: a frozen copy here."""

    forward: Forward  # without gradients

    @classmethod
    def frozen(cls, policy: Forward) -> Reference:
        """A copy of the policy as it is now."""
        model = copy.deepcopy(policy.backbone.model).eval().requires_grad_(False)
        return cls(replace(policy, backbone=Backbone(model, policy.backbone.compute_dtype)))

    @torch.no_grad()
    def signals(self, rollouts: Rollouts, needs: Needs, policy: Forward) -> Signals:
        """What is needed of log-probs, and of the policy's divergence from them over the whole vocabulary."""
        found = Signals(reference=self.forward.signals(rollouts).old) if "reference" in needs else Signals()
        if "divergence" not in needs:
            return found
        ours, theirs = policy.response_hidden(rollouts), self.forward.response_hidden(rollouts)
        matrices = policy.backbone.output_matrix, self.forward.backbone.output_matrix
        kl = full_kl(ours, theirs, *matrices, **policy.distribution())
        return replace(found, divergence=unpack(kl, rollouts.mask).cpu())
