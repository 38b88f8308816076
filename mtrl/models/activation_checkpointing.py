"""Gradient checkpointing: activations that are computed again on the way back, in place of being kept."""

from __future__ import annotations

from functools import cache, partial
from types import MethodType
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

Recomputed = bool | Literal["mlp", "attention"]

PARTS = {"mlp": ("mlp",), "attention": ("self_attn", "attn")}  # by their names in a layer, of language or of vision


def recompute(model: Any, what: Recomputed) -> None:
    """Whole layers where `what` is True, else the parts of that kind in every layer. Whatever else wraps the forward of
    a part, compiled code for one, must be there already."""
    if what is True:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif what:
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        parts = [getattr(layer, name, None) for layer in layers for name in PARTS[what]]
        if not any(parts):
            raise ValueError(f"enable_gradient_checkpointing: no layer of this model has a part for {what}; set true")
        for part in filter(None, parts):
            part.forward = MethodType(recomputed(part.forward.__func__), part)  # a copy of the model has its own


@cache
def recomputed(forward: Any) -> Any:
    """The same forward, which keeps its inputs alone where there will be a way back."""

    def run(module: Any, *arguments: Any, **named: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(module, *arguments, **named)
        return checkpoint(partial(forward, module, **named), *arguments, use_reentrant=False)

    return run
