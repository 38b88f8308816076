"""Activation checkpointing: recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import MethodType
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from mtrl.models.families import find_family

Checkpointing = bool | Literal["auto", "mlp", "attention"]

PARTS = {"mlp": ("mlp",), "attention": ("self_attn", "attn")}  # their names in a layer, of language or of vision


def enable_activation_checkpointing(model: Any, what: Checkpointing) -> None:
    """Checkpoint whole layers if `what` is True or auto (`keep_activations` may exempt some later), otherwise the parts
    of that kind in every layer. Apply it after everything else that wraps the forward of a part, such as compiled
    code."""
    if what is True or what == "auto":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        # transformers lets embeddings, also those of patches, require gradients for checkpoints that are reentrant. A
        # frozen vision tower would get a backward pass, on ranks only where images are encoded: the others hang.
        model.disable_input_require_grads()
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


# ------------------------------------------------------------------------------------------------------- layer by layer
def keepable_layers(model: Any) -> list[Any]:
    """The layers that are recomputed in a backward pass, in the order in which they should rather keep their
    activations: the language model from its last layer to its first, then the vision tower. The last layers are freed
    first in the backward pass; the narrower tower saves less time per byte."""
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    layers = [layer for layer in reversed(layers) if any(weight.requires_grad for weight in layer.parameters())]
    vision = set(vision_layers(model, layers))
    return sorted(layers, key=lambda layer: layer in vision)


def vision_layers(model: Any, layers: Iterable[Any]) -> list[Any]:
    """Those of the layers that are outside of the language model."""
    language = set(find_family(model.config).find_language_model(model).modules())
    return [layer for layer in layers if layer not in language]


def keep_activations(layers: Iterable[Any], keep: bool = True) -> None:
    """Let layers of a checkpointed model keep their activations from the next pass on, or recompute them again."""
    for layer in layers:
        layer.gradient_checkpointing = not keep


@contextmanager
def measure_recomputed(layers: Sequence[Any], allocated: Callable[[], int]) -> Iterator[list[int]]:
    """Yield a list with the bytes that each layer would keep, measured in the backward passes within the context:
    `allocated` (the bytes in use) grows by as much while a layer is recomputed. This takes no memory and no pass of its
    own."""
    grown = [0] * len(layers)

    def measured(index: int, forward: Callable[..., Any], *inputs: Any) -> Any:
        def run(*inputs: Any) -> Any:
            before = allocated()
            try:
                return forward(*inputs)
            finally:  # recomputation ends by an exception of torch's
                grown[index] = max(grown[index], allocated() - before)

        return functions[index](run, *inputs)

    functions = [layer._gradient_checkpointing_func for layer in layers]
    for index, layer in enumerate(layers):
        layer._gradient_checkpointing_func = partial(measured, index)
    try:
        yield grown
    finally:
        for layer, function in zip(layers, functions, strict=True):
            layer._gradient_checkpointing_func = function
