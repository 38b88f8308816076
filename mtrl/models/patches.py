"""Changes to how upstream libraries behave, each with its reason and what would make it unnecessary."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# Transformers hands segment boundaries (`cu_seq_lens_q`) only to implementations with "flash" in their name.
SEGMENT_ATTENTION = "mtrl_flash_segments"


def use_segment_attention(vision_tower: Any) -> None:
    """Attention of the vision tower in one call for all windows of a length.

    Why: without flash-attn, transformers (seen in 5.17 and 5.19) loops in Python over every window of every image in
    every layer; a batch of 256 tiny images spends half a second a step there. Unnecessary once the sdpa path of the
    towers batches its segments.
    """
    vision_tower.config._attn_implementation = SEGMENT_ATTENTION


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, heads, S, D] with each position seeing its own segment; the boundaries are best kept on the CPU."""
    assert attention_mask is None, "segments are given by their boundaries"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [S, heads, D]
    sizes, order, back = _by_length(tuple(cu_seq_lens_q.diff().tolist()), query.device)
    if order is not None:
        q, k, v = q[order], k[order], v[order]
    attended = []
    for length, *of_length in zip(sizes, *(x.split(list(sizes.values())) for x in (q, k, v)), strict=True):
        q_s, k_s, v_s = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in of_length)
        attended.append(F.scaled_dot_product_attention(q_s, k_s, v_s, scale=scaling).transpose(1, 2).flatten(0, 1))
    output = torch.cat(attended) if back is None else torch.cat(attended)[back]
    return output[None], None


@lru_cache(maxsize=32)
def _by_length(lengths: tuple[int, ...], device: torch.device) -> tuple[dict[int, int], Tensor | None, Tensor | None]:
    """Segments sorted by length: how many positions each length has, the order of positions, and the way back.

    No order where all segments have one length.
    """
    sizes = {length: length * lengths.count(length) for length in sorted(set(lengths))}
    if len(sizes) == 1:
        return sizes, None, None
    of_position = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
    order = of_position.argsort(stable=True)
    return sizes, order.to(device), order.argsort().to(device)


AttentionInterface.register(SEGMENT_ATTENTION, segment_attention)

GROUPED_ATTENTION = "mtrl_sdpa_grouped"


def use_grouped_attention(language_model: Any) -> None:
    """The sdpa attention of a language model, without a copy of the keys for every head in a decoding step.

    Why: where there is a mask, transformers (seen in 5.17 and 5.19) repeats all keys and values for every head that
    shares them, at every step; a third of the decoding time of the embedded model. Unnecessary once it doesn't.
    """
    if language_model.config._attn_implementation == "sdpa":
        language_model.config._attn_implementation = GROUPED_ATTENTION


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As sdpa. A single query [B, heads, 1, D] stands as [B, key heads, heads that share them, D]."""
    if query.shape[2] > 1 or options.get("dropout"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    folded = query.reshape(*key.shape[:2], -1, query.shape[3])
    output = F.scaled_dot_product_attention(folded, key, value, attention_mask, scale=options["scaling"])
    return output.reshape(len(query), 1, -1, value.shape[3]), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
