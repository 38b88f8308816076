"""The policy as it was, to measure how far training has gone from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from mtrl.algorithms.vocab import full_kl
from mtrl.models.adapters import adapters_off
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward, unpack
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
        model = copy.deepcopy(policy.backbone.model).eval().requires_grad_(False)
        return cls(replace(policy, backbone=Backbone(model, policy.backbone.compute_dtype)))

    @classmethod
    def under_adapters(cls, policy: Forward) -> Reference:
        """The policy's own model without its adapters: nothing is copied."""
        return cls(policy, partial(adapters_off, policy.backbone.model))

    @torch.no_grad()
    def signals(self, rollouts: Rollouts, needs: Needs, policy: Forward) -> Signals:
        """What is needed of log-probs, and of the policy's divergence from them over the whole vocabulary."""
        with self.asked():
            found = Signals(reference=self.forward.signals(rollouts).old) if "reference" in needs else Signals()
            theirs = self.forward.response_hidden(rollouts) if "divergence" in needs else None
        if theirs is None:
            return found
        ours = policy.response_hidden(rollouts)
        matrices = policy.backbone.output_matrix, self.forward.backbone.output_matrix
        kl = full_kl(ours, theirs, *matrices, **policy.distribution())
        return replace(found, divergence=unpack(kl, rollouts.mask).cpu())
