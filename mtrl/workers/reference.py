"""The reference policy, from which the policy's divergence is measured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.algorithms.vocab import full_kl
from mtrl.checkpoint.learner_snapshot import ModelSnapshot, RankSnapshot, make_rank_snapshot
from mtrl.models.adapters import adapters_off
from mtrl.models.backbone import Backbone
from mtrl.models.device_copy import unpack
from mtrl.models.forward import Forward
from mtrl.models.parallel.fsdp import copy_model, is_sharded
from mtrl.models.state_dicts import exported_weights, load_weights
from mtrl.types import Needs, Rollouts, Signals


@dataclass(frozen=True)
class Reference:
    """Other weights behind the policy's forward pass: a frozen copy, or the base under the policy's adapters. The actor
    holds it, so that a probe or an update can pass the same rows through both."""

    forward: Forward  # without gradients
    active: Callable[[], AbstractContextManager[None]] = nullcontext  # entered for its passes

    @classmethod
    def frozen(cls, policy: Forward) -> Reference:
        """A copy of the policy as it is now."""
        return cls.from_model(copy.deepcopy(policy.backbone.model), policy)

    @classmethod
    def from_model(cls, model: Any, policy: Forward) -> Reference:
        """Another model behind the policy's passes, sharded like the policy."""
        model.eval().requires_grad_(False)
        own = policy.backbone
        backbone = Backbone(model, own.compute_dtype, compiled=own.compiled, ranks=own.ranks)
        return cls(replace(policy, backbone=backbone))

    @classmethod
    def under_adapters(cls, policy: Forward) -> Reference:
        """The policy's model without its adapters; nothing is copied."""
        return cls(policy, partial(adapters_off, policy.backbone.model))

    def sync(self, policy: Forward) -> None:
        """Copies the policy's current weights in place."""
        copy_model(self.forward.backbone.model, policy.backbone.model)

    @torch.no_grad()
    def start_signals(self, rollouts: Rollouts, needs: Needs, policy: Forward) -> Callable[[], Signals]:
        """Log-probs and users' signals, and the policy's divergence from the reference over the whole vocabulary, if
        needed; as `Forward.start_signals`."""
        measure: Callable[[], Signals] = Signals
        if needs.without("divergence"):
            with self.active():
                measure = self.forward.start_signals(rollouts, Needs("old_logprobs", custom=needs.custom))
        kl: Tensor | None = None
        if "divergence" in needs:
            theirs = self.response_hidden(rollouts)
            kl = self.divergence(policy.response_hidden(rollouts), theirs, policy, rollouts)

        def collect() -> Signals:
            measured, divergence = measure(), None if kl is None else unpack(kl, rollouts.mask).cpu()
            return Signals(ref_logprobs=measured.old_logprobs, extra=measured.extra, divergence=divergence)

        return collect

    @torch.no_grad()
    def response_hidden(self, rollouts: Rollouts) -> Tensor:
        """[M, H]: the hidden states that predict the response tokens. Call it before a pass with gradients: its own
        activations are freed at its end."""
        with self.active():
            return self.forward.response_hidden(rollouts)

    def divergence(self, ours: Tensor, theirs: Tensor, policy: Forward, rollouts: Rollouts) -> Tensor:
        """[M]: KL(policy || reference) over the vocabulary, from the hidden states of both; gradients flow to ours and
        to the policy's output matrix. The logits of both exist only chunk by chunk."""
        matrices = policy.backbone.output_matrix, self.forward.backbone.output_matrix
        return policy.gather_tokens(full_kl(ours, theirs, *matrices, **policy.distribution()), rollouts)


@dataclass(frozen=True)
class SyncedReference:
    """A reference that regularly becomes the policy. Checkpoints hold it, since it is no longer the initial model."""

    reference: Reference
    policy: Forward

    def sync(self) -> None:
        self.reference.sync(self.policy)

    def snapshot(self) -> ModelSnapshot | RankSnapshot:
        weights = exported_weights(self.model)
        if is_sharded(self.model):
            return make_rank_snapshot(self.model, self.policy.backbone.ranks, weights)
        return ModelSnapshot(self.model, weights)

    def restore(self, directory: Path) -> None:
        load_weights(self.model, directory, self.policy.backbone.ranks)

    @property
    def model(self) -> Any:
        return self.reference.forward.backbone.model
