"""Activation checkpointing: recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

from functools import cache, partial
from types import MethodType
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

Checkpointing = bool | Literal["mlp", "attention"]

PARTS = {"mlp": ("mlp",), "attention": ("self_attn", "attn")}  # their names in a layer, of language or of vision


def enable_activation_checkpointing(model: Any, what: Checkpointing) -> None:
    """Checkpoint whole layers if `what` is True, otherwise the parts of that kind in every layer. Apply it after
    everything else that wraps the forward of a part, such as compiled code."""
    if what is True:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif what:
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        parts = [getattr(layer, name, None) for layer in layers for name in PARTS[what]]
        if not any(parts):
            raise ValueError(f"enable_gradient_checkpointing: no layer of this model has a part for {what}; set true")
        for part in filter(None, parts):
            part.forward = MethodType(checkpoint_forward(part.forward.__func__), part)  # a copied model gets its own


@cache
def checkpoint_forward(forward: Any) -> Any:
    """The same forward, which keeps only its inputs for a backward pass."""

    def run(module: Any, *arguments: Any, **named: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(module, *arguments, **named)
        return checkpoint(partial(forward, module, **named), *arguments, use_reentrant=False)

    return run
