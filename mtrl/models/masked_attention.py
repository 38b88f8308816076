"""Attention of the language model: masks for responses that share a prompt, readers of attention masses, and editors.

`attention` replaces transformers' sdpa. Its kernel depends on its arguments:

a `CascadeMask`   flash kernels over one packed sequence (CUDA, 16 bits): `cascade_attention.py`
a `BlockMask`     flex_attention over one packed sequence (CUDA), which skips fully masked blocks
a single query    a decoding step, without a copy of the keys for every head that shares them
anything else     sdpa

In a sequence-parallel group (`parallel/sequence.py`) each rank attends with its share of the heads.

An `AttentionReader` sums up the attention. The attention matrix never exists: for the masses a kernel sums
probabilities (`prompt_masses.py`), or the layer's attention runs once more over values that are indicators of the
pools, and its output *is* the mass (section 2 of the spec); for maps over single tokens only the matrix rows of a few
positions are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mtrl.models.cascade_attention import CascadeMask, cascade_attention
from mtrl.models.parallel.sequence import NO_SEQUENCE_PARALLEL, SequenceParallelGroup
from mtrl.models.patches import compile_function
from mtrl.models.prompt_masses import PromptRows, prompt_masses
from mtrl.types import TEXT_POOL, VISION_POOL

ATTENTION = "mtrl_sdpa"
CAUSAL = torch.empty(0, 0, 0, 0)  # instead of None, for which transformers would make a mask of a part of a sequence
FLEX_COLUMNS = 16  # the narrowest head that flex_attention takes


def use_attention(language_model: Any) -> None:
    """Replace sdpa by `attention`. Other implementations, chosen by the user, stay."""
    if language_model.config._attn_implementation == "sdpa":
        language_model.config._attn_implementation = ATTENTION


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    readers: Sequence[AttentionReader] = (),
    editor: AttentionEditor | None = None,
    sp_group: SequenceParallelGroup = NO_SEQUENCE_PARALLEL,
    **options: Any,
) -> tuple[Tensor, None]:
    """[B, heads, S, D] -> [B, S, heads, D], as transformers calls it. In a sequence-parallel group S is this rank's
    part of the positions, and the mask is that of whole sequences."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves rotary embeddings in a wider dtype
    described: Any = module
    if sp_group.size > 1:
        query, key, value = sp_group.gather_seq_scatter_heads(query, key, value)
        described = OwnHeads(described.layer_idx, query.shape[1] // key.shape[1])
        if isinstance(attention_mask, Tensor) and not attention_mask.numel():  # CAUSAL, on any device
            attention_mask = None
    layer = AttentionLayer(described, query, key, attention_mask, options, sp_group)
    output, lse = layer.attend(value)
    if editor is not None:
        output = editor.edit(layer, value, output)
    for reader in readers:
        reader.observe(layer, value, lse)
    return (output if sp_group.size == 1 else sp_group.gather_heads_scatter_seq(output)), None


class OwnHeads(NamedTuple):
    """The attributes of an attention module that transformers' sdpa reads, for a rank with some of the heads."""

    layer_idx: int
    num_key_value_groups: int
    is_causal: bool = True


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """The arguments of a layer's attention except the values."""

    module: Any
    query: Tensor
    key: Tensor
    mask: Tensor | BlockMask | None
    options: dict[str, Any]
    sp_group: SequenceParallelGroup = NO_SEQUENCE_PARALLEL

    def attend(self, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, S, heads, D], and the lse [heads, S] where the kernel has one sequence and returns it."""
        query, key, mask, scaling = self.query, self.key, self.mask, self.options["scaling"]
        if isinstance(mask, CascadeMask):
            query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))  # [S, heads, D]
            output, lse = cascade_attention(query, key, value, mask, scaling)
            return output[None], lse
        if isinstance(mask, BlockMask):
            # Uncompiled, flex_attention makes the whole matrix.
            flex = compile_function(flex_attention) if query.is_cuda else flex_attention
            return flex(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True).transpose(1, 2), None
        if query.shape[2] == 1:
            folded = query.reshape(*key.shape[:2], -1, query.shape[3])  # [B, key heads, heads that share them, D]
            output = F.scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
            return output.reshape(len(query), 1, -1, value.shape[3]), None
        return sdpa_attention_forward(self.module, query, key, value, mask, **self.options)[0], None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class AttentionEditor(Protocol):
    def edit(self, layer: AttentionLayer, value: Tensor, output: Tensor) -> Tensor:
        """The `output` [B, S, heads, D] of a layer's attention to these values, changed for some documents."""


# ------------------------------------------------------------------------------------------------------------- readers
class AttentionReader(Protocol):
    def observe(self, layer: AttentionLayer, value: Tensor, lse: Tensor | None) -> None:
        """Read the attention of a layer to these values; `lse` [heads, S] is its own, if its kernel returned it."""


class MassReader:
    """Attention of chosen positions on the text and the vision pool, as the mean over the layers of each segment.

    `pool` [B, S] holds the pool of every prompt token and is negative elsewhere; the sink, a prompt's first token, does
    not count. `index` are the sequences and columns of the M positions to read. B and S may be smaller than the pass's:
    a corner with the positions and all that they attend to suffices. `masks` are those of the corner, by layer. A
    layer that returns its lse is read by `rows`, the same positions. A segment without layers (a model of one or two
    has no late third) stays NaN.
    """

    def __init__(
        self,
        pool: Tensor,
        sink: Tensor,
        index: tuple[Tensor, Tensor],
        segments: Sequence[Sequence[int]],
        masks: Sequence[Tensor | BlockMask | None],
        rows: PromptRows | None = None,
    ) -> None:
        counted = ~sink & (pool >= 0)
        columns = [(pool == TEXT_POOL) & counted, (pool == VISION_POOL) & counted, counted]
        self.indicator = torch.stack(columns, -1)  # [B, S, 3]
        self.index, self.segments, self.masks, self.rows = index, segments, masks, rows
        self.total = torch.zeros(len(index[0]), len(segments), 2, device=pool.device)
        for number in (number for number, layers in enumerate(segments) if not layers):
            self.total[:, number] = torch.nan

    def observe(self, layer: AttentionLayer, value: Tensor, lse: Tensor | None) -> None:
        if lse is not None:
            assert self.rows is not None, "made for masks whose kernel returns the lse"
            masses = prompt_masses(
                layer.query[0], layer.key[0], lse, self.indicator[0], self.rows, layer.options["scaling"]
            )
        else:
            masses = self.attend(layer, value)[self.index][..., :3].float().mean(1)
        text, vision, counted = layer.sp_group.all_reduce_mean(masses).unbind(-1)
        shares = torch.stack([text, vision], -1) / counted.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        add_to_segments(self.total, self.segments, layer, shares)

    def attend(self, layer: AttentionLayer, value: Tensor) -> Tensor:
        """[B, S, heads, columns]: the layer's attention over the indicators, then zeros, in place of `value`."""
        sequences, size, _ = self.indicator.shape
        query, key = (each[:sequences, :, :size] for each in (layer.query, layer.key))
        mask = self.masks[layer.module.layer_idx]
        # sdpa makes the matrix unless its values are as wide as the model's own.
        columns = FLEX_COLUMNS if isinstance(mask, BlockMask) else value.shape[3]
        padded = F.pad(self.indicator.to(value.dtype), (0, columns - self.indicator.shape[-1]))
        corner = replace(layer, query=query, key=key, mask=mask)
        return corner.attend(padded[:, None].expand(-1, value.shape[1], -1, -1))[0]


class MapReader:
    """Attention of a few chosen positions on every prompt token, as the mean over the layers of each segment.

    The same shares as `MassReader`, before they are summed over the pools: M positions cost M rows of S keys. `masks`
    are these rows, by layer.
    """

    def __init__(
        self,
        pool: Tensor,
        sink: Tensor,
        masks: Sequence[Tensor | None],
        index: tuple[Tensor, Tensor],
        segments: Sequence[Sequence[int]],
    ) -> None:
        self.counted = (~sink & (pool >= 0))[index[0]]  # [M, S]
        self.masks, self.index, self.segments = masks, index, segments
        self.total = torch.zeros(len(index[0]), len(segments), pool.shape[1], device=pool.device)

    def observe(self, layer: AttentionLayer, value: Tensor, lse: Tensor | None) -> None:
        rows, columns = self.index
        query = layer.query[rows, :, columns].unflatten(1, (layer.key.shape[1], -1))  # [M, key heads, sharing heads, D]
        scores = torch.einsum("mkhd,mksd->mkhs", query.float(), layer.key[rows].float()) * layer.options["scaling"]
        mask = self.masks[layer.module.layer_idx]
        assert mask is not None, "a layer with attention"
        weights = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1).mean((1, 2))
        counted = layer.sp_group.all_reduce_mean(weights).where(self.counted, 0.0)
        shares = counted / counted.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        add_to_segments(self.total, self.segments, layer, shares)


def add_to_segments(total: Tensor, segments: Sequence[Sequence[int]], layer: AttentionLayer, shares: Tensor) -> None:
    for number, layers in enumerate(segments):
        if layer.module.layer_idx in layers:
            total[:, number] += shares / len(layers)
