"""The policy as it was, to measure how far training has gone from it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.algorithms.vocab import full_kl
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward, unpack
from mtrl.models.weights import exported_weights, load_weights
from mtrl.types import Needs, Rollouts, Signals
from mtrl.workers.snapshot import ModelSnapshot


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

    def take_over(self, policy: Forward) -> None:
        """Becomes the policy as it is now. Weights are copied in place: whoever holds this view sees the new ones. (A
        view of the policy without its adapters would copy those instead.)"""
        self.forward.backbone.model.load_state_dict(exported_weights(policy.backbone.model))

    @torch.no_grad()
    def signals(self, rollouts: Rollouts, needs: Needs, policy: Forward) -> Signals:
        """What is needed of log-probs, and of the policy's divergence from them over the whole vocabulary."""
        found = Signals(reference=self.forward.signals(rollouts).old) if "reference" in needs else Signals()
        if "divergence" not in needs:
            return found
        theirs = self.response_hidden(rollouts)
        kl = self.divergence(policy.response_hidden(rollouts), theirs, policy)
        return replace(found, divergence=unpack(kl, rollouts.mask).cpu())

    @torch.no_grad()
    def response_hidden(self, rollouts: Rollouts) -> Tensor:
        """[M, H]: the hidden states that predict the response tokens. Whoever holds activations for a gradient asks for
        these first: what this pass holds is gone when it ends."""
        return self.forward.response_hidden(rollouts)

    def divergence(self, ours: Tensor, theirs: Tensor, policy: Forward) -> Tensor:
        """[M]: KL(policy || reference) over the vocabulary, from the hidden states of both; gradients flow to ours and
        to the policy's output matrix. Logits of both exist chunk by chunk alone."""
        matrices = policy.backbone.output_matrix, self.forward.backbone.output_matrix
        return full_kl(ours, theirs, *matrices, **policy.distribution())


@dataclass(frozen=True)
class RefreshedReference:
    """A reference that becomes the policy every so often. Since it is no longer what the run was given, a checkpoint
    holds it."""

    reference: Reference
    policy: Forward

    def refresh(self) -> None:
        self.reference.take_over(self.policy)

    def snapshot(self) -> ModelSnapshot:
        return ModelSnapshot(self.model, exported_weights(self.model))

    def restore(self, directory: Path) -> None:
        load_weights(self.model, directory)

    @property
    def model(self) -> Any:
        return self.reference.forward.backbone.model
