"""The policy as it was, to measure how far training has gone from it."""

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
from mtrl.checkpoint.learner_snapshot import ModelSnapshot, PartSnapshot, shard_files
from mtrl.models.adapters import adapters_off
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward, unpack
from mtrl.models.parallel.fsdp import is_split, own_part
from mtrl.models.state_dicts import exported_weights, load_weights
from mtrl.types import Needs, Rollouts, Signals


@dataclass(frozen=True)
class Reference:
    """Other weights behind the policy's own forward pass. The worker that holds the policy holds this view as well, so
    that a probe or an update can ask both about the same rows, whatever the weights are: a frozen copy, or the base
    under the policy's adapters."""

    forward: Forward  # without gradients
    asked: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while it is

    @classmethod
    def frozen(cls, policy: Forward) -> Reference:
        """A copy of the policy as it is now."""
        return cls.of(copy.deepcopy(policy.backbone.model), policy)

    @classmethod
    def of(cls, model: Any, policy: Forward) -> Reference:
        """Another model behind the policy's passes; one that is split is made by whoever splits the policy."""
        model.eval().requires_grad_(False)
        own = policy.backbone
        return cls(replace(policy, backbone=Backbone(model, own.compute_dtype, ranks=own.ranks)))

    @classmethod
    def under_adapters(cls, policy: Forward) -> Reference:
        """The policy's own model without its adapters: nothing is copied, and it stays what it is."""
        return cls(policy, partial(adapters_off, policy.backbone.model))

    def take_over(self, policy: Forward) -> None:
        """Becomes the policy as it is now. Weights are copied in place: whoever holds this view sees the new ones. Of
        models that are split alike, each rank copies its own part."""
        theirs = policy.backbone.model.state_dict()
        with torch.no_grad():
            for name, tensor in self.forward.backbone.model.state_dict().items():
                own_part(tensor).copy_(own_part(theirs[name]))

    @torch.no_grad()
    def signals(self, rollouts: Rollouts, needs: Needs, policy: Forward) -> Signals:
        """What is needed of log-probs, and of the policy's divergence from them over the whole vocabulary."""
        found = Signals()
        if "ref_logprobs" in needs:
            with self.asked():
                found = Signals(ref_logprobs=self.forward.signals(rollouts).old_logprobs)
        if "divergence" not in needs:
            return found
        theirs = self.response_hidden(rollouts)
        kl = self.divergence(policy.response_hidden(rollouts), theirs, policy, rollouts)
        return replace(found, divergence=unpack(kl, rollouts.mask).cpu())

    @torch.no_grad()
    def response_hidden(self, rollouts: Rollouts) -> Tensor:
        """[M, H]: the hidden states that predict the response tokens. Whoever holds activations for a gradient asks for
        these first: what this pass holds is gone when it ends."""
        with self.asked():
            return self.forward.response_hidden(rollouts)

    def divergence(self, ours: Tensor, theirs: Tensor, policy: Forward, rollouts: Rollouts) -> Tensor:
        """[M]: KL(policy || reference) over the vocabulary, from the hidden states of both; gradients flow to ours and
        to the policy's output matrix. Logits of both exist chunk by chunk alone."""
        matrices = policy.backbone.output_matrix, self.forward.backbone.output_matrix
        return policy.of_all(full_kl(ours, theirs, *matrices, **policy.distribution()), rollouts)


@dataclass(frozen=True)
class SyncedReference:
    """A reference that becomes the policy every so often. Since it is no longer what the run was given, a checkpoint
    holds it."""

    reference: Reference
    policy: Forward

    def refresh(self) -> None:
        self.reference.take_over(self.policy)

    def snapshot(self) -> ModelSnapshot | PartSnapshot:
        weights = exported_weights(self.model)
        if is_split(self.model):
            return shard_files(self.model, self.policy.backbone.ranks, weights)
        return ModelSnapshot(self.model, weights)

    def restore(self, directory: Path) -> None:
        load_weights(self.model, directory, self.policy.backbone.ranks)

    @property
    def model(self) -> Any:
        return self.reference.forward.backbone.model
