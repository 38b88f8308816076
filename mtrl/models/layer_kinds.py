"""The kinds of layers that a language model has, by the names of transformers, and what their attention sees."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mtrl.models.document_mask import MaskRule

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"  # in `layer_types` of a config


def layer_kinds(config: Any) -> list[str]:
    """The kind of each layer, from a language model's config. Without `layer_types` all layers are alike."""
    alike = SLIDING if getattr(config, "sliding_window", None) else FULL
    return getattr(config, "layer_types", None) or [alike] * config.num_hidden_layers


def attention_layers(config: Any) -> list[int]:
    """The layers that have attention, from a language model's config."""
    return [layer for layer, kind in enumerate(layer_kinds(config)) if kind != RECURRENT]


def make_mask_rules(config: Any, image_blocks: Collection[str]) -> dict[str, MaskRule]:
    """The rule of each kind of layers that have attention; in those of `image_blocks` an image sees all of itself."""
    windows = {FULL: None, SLIDING: getattr(config, "sliding_window", None)}
    return {kind: MaskRule(windows[kind], kind in image_blocks) for kind in windows if kind in layer_kinds(config)}
