"""The view `counterfactual(z)` of one row by its definition: a plain forward of transformers with another attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tiny_models import get_encoder, plain_inputs
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from mtrl.models.families import find_family
from mtrl.types import VISION_POOL, Prompt

HOOK = "counterfactual_by_definition"
IMAGES: list[tuple[int, int, float]] = []  # of the row that is computed: first and last column of each, and z


def by_definition(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Head by head, with the whole matrix."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    weights = (query @ key.transpose(2, 3) * scaling + attention_mask).softmax(-1)
    output = weights @ value
    columns = [column for first, last, _ in IMAGES for column in range(first, last + 1)]
    for first, last, z in IMAGES:
        image = weights[0, :, last + 1 :, first : last + 1]
        valid = image.detach()[image.detach() > 1e-8]
        limit = valid.mean() + z * valid.std()
        for head in range(query.shape[1]):
            chosen = image[head].where(image[head].detach() > limit, 0.0)
            change = chosen @ (value[0, head, columns].mean() - value[0, head, first : last + 1])
            placed = torch.zeros_like(output)
            placed[0, head, last + 1 :] = change
            output = output + placed
    return output.transpose(1, 2), weights


AttentionInterface.register(HOOK, by_definition)
AttentionMaskInterface.register(HOOK, eager_mask)


@contextmanager
def counterfactual_attention(model: Any, prompt: Prompt, z: float) -> Iterator[None]:
    config = find_family(model.config).find_language_model(model).config
    before, config._attn_implementation = config._attn_implementation, HOOK
    IMAGES[:] = [(*ends, z) for ends in image_runs(prompt.token_pool == VISION_POOL)]
    try:
        yield
    finally:
        config._attn_implementation = before


def image_runs(vision: Tensor) -> list[tuple[int, int]]:
    """First and last of each run."""
    marked = [False, *vision.tolist(), False]
    begins = [i for i in range(len(vision)) if marked[i + 1] and not marked[i]]
    return [(begin, begin + marked[begin + 1 :].index(False) - 1) for begin in begins]


def counterfactual_log_probs(
    family: str, prompt: Prompt, response: Tensor, z: float, *, temperature: float, model: Any
) -> Tensor:
    """[length, V], with gradients where they are on."""
    encoder = get_encoder(family)
    with counterfactual_attention(model, prompt, z):
        logits = model(**plain_inputs(encoder, prompt, response)).logits[0, len(prompt.ids) - 1 : -1] / temperature
    forbidden = torch.zeros(logits.shape[-1], dtype=torch.bool)
    forbidden[list(encoder.forbidden_ids)] = True
    return logits.masked_fill(forbidden, -torch.inf).log_softmax(-1)
