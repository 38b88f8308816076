"""Attention of the language model: masks for responses that share a prompt, and readers of attention masses.

`attention` replaces transformers' sdpa. Its kernel depends on its arguments:

a `BlockMask`     flex_attention over packed sequences (CUDA), which skips fully masked blocks
a single query    a decoding step, without a copy of the keys for every head that shares them
anything else     sdpa

In a sequence-parallel group (`parallel/sequence.py`) each rank attends with its share of the heads.

An `AttentionReader` sums up the attention. The attention matrix never exists: for the masses the layer's attention runs
once more over values that are indicators of the pools, and its output *is* the mass (section 2 of the spec); for maps
over single tokens only the matrix rows of a few positions are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mtrl.models.device_copy import to_device
from mtrl.models.parallel.sequence import NO_SEQUENCE_PARALLEL, SequenceParallelGroup
from mtrl.models.patches import compile_function
from mtrl.types import TEXT_POOL, VISION_POOL

ATTENTION = "mtrl_sdpa"
BLOCK = 128  # block size of flex_attention; packed sequences are a multiple of it
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
    for reader in readers:
        reader.observe(layer, value)
    output = layer.attend(value)
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

    def attend(self, value: Tensor) -> Tensor:
        query, key, mask, scaling = self.query, self.key, self.mask, self.options["scaling"]
        if isinstance(mask, BlockMask):
            # Uncompiled, flex_attention makes the whole matrix.
            flex = compile_function(flex_attention) if query.is_cuda else flex_attention
            return flex(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True).transpose(1, 2)
        if query.shape[2] == 1:
            folded = query.reshape(*key.shape[:2], -1, query.shape[3])  # [B, key heads, heads that share them, D]
            output = F.scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
            return output.reshape(len(query), 1, -1, value.shape[3])
        return sdpa_attention_forward(self.module, query, key, value, mask, **self.options)[0]


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# --------------------------------------------------------------------------------------------------------------- masks
@dataclass(frozen=True)
class MaskRule:
    """What the attention of a layer sees of a prompt and a response, beyond the order of tokens.

    `window`: only this many of the last tokens, the token itself among them, as transformers counts. `image_blocks`:
    consecutive image tokens see one another, the later ones too; a window still hides those that are too far back.
    """

    window: int | None = None
    image_blocks: bool = False

    def attends(self, before: Tensor, query: DocumentMask, key: DocumentMask) -> Tensor:
        """Whether queries see keys. All tensors broadcast; `before`: the key is not in a later column."""
        own = query.segment == key.segment
        seen = before & (own | (query.prompt == key.segment))
        if self.image_blocks:
            seen = seen | (own & (query.image == key.image) & (query.image >= 0))
        if self.window is not None:
            seen = seen & (key.path > query.path - self.window)
        return seen

    def within(self, documents: DocumentMask) -> MaskRule:
        """The rule without what changes nothing in these sequences."""
        reached = self.window is not None and int(documents.path.max()) >= self.window
        has_images = self.image_blocks and bool((documents.image >= 0).any())
        return MaskRule(self.window if reached else None, has_images)


CAUSAL_RULE = MaskRule()


@dataclass(frozen=True, eq=False)
class DocumentMask:
    """The attention mask of sequences of prompts and responses. A sequence has segments: a prompt, or one response.

    A position attends to earlier positions of its own segment and of its prompt. Two prompts, the first with an image
    and two responses, and padding:

    segment  [0  0 0 1 1 2 2   3  3  4  4  -1]
    prompt   [0  0 0 0 0 0 0   3  3  3  3  -1]
    path     [0  1 2 3 4 3 4   0  1  2  3   0]
    image    [-1 1 1 -1 ..                 -1]
    """

    segment: Tensor  # [B, S]
    prompt: Tensor  # [B, S] the segment of each position's prompt
    path: Any = None  # [B, S] how many tokens of its own sequence, prompt and response, are before it; for windows
    image: Any = None  # [B, S] the column where its run of image tokens begins, -1 elsewhere; for image blocks

    @classmethod
    def from_rows(cls, is_vision: Tensor, is_real: Tensor | None = None) -> DocumentMask:
        """Rows [B, S] without responses. Each token of padding sees itself: a softmax over no keys is NaN."""
        columns = torch.arange(is_vision.shape[1], device=is_vision.device).expand(is_vision.shape)
        segment = torch.zeros_like(columns) if is_real is None else torch.where(is_real, 0, -1 - columns)
        return cls(segment, segment, columns, find_image_runs(is_vision))

    def map(self, function: Callable[[Tensor], Tensor]) -> DocumentMask:
        path, image = (None if each is None else function(each) for each in (self.path, self.image))
        return DocumentMask(function(self.segment), function(self.prompt), path, image)

    def __getitem__(self, corner: tuple[slice, slice]) -> DocumentMask:
        return self.map(lambda each: each[corner])

    def to(self, device: torch.device) -> DocumentMask:
        return self.map(lambda each: to_device(each, device))

    def rows(self, index: tuple[Tensor, Tensor], rule: MaskRule = CAUSAL_RULE) -> Tensor:
        """[M, S] bool: the mask's rows of M positions (their sequences and columns)."""
        sequences, columns = index
        before = torch.arange(self.segment.shape[1], device=columns.device) <= columns[:, None]
        return rule.attends(before, self.map(lambda each: each[index][:, None]), self.map(lambda each: each[sequences]))

    def dense(self, rule: MaskRule = CAUSAL_RULE) -> Tensor:
        """[B, 1, S, S] bool: the mask as a matrix of positions."""
        size = self.segment.shape[1]
        before = torch.ones(size, size, dtype=torch.bool, device=self.segment.device).tril()
        query, key = self.map(lambda each: each[:, :, None]), self.map(lambda each: each[:, None, :])
        return rule.attends(before, query, key)[:, None]

    def blocks(self, device: torch.device, rule: MaskRule = CAUSAL_RULE) -> BlockMask:
        """The mask of one packed sequence as blocks, computed from segments: no matrix of positions is ever made."""
        assert len(self.segment) == 1 and self.segment.shape[1] % BLOCK == 0, "one sequence of whole blocks"
        sequence = self.map(lambda each: each[0])
        some, whole = visible_blocks(sequence, rule)
        path, image = sequence.path if rule.window else None, sequence.image if rule.image_blocks else None
        sequence = replace(sequence, path=path, image=image).to(device)  # what the rule reads

        def attends(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return rule.attends(q >= k, sequence.map(lambda each: each[q]), sequence.map(lambda each: each[k]))

        partial, full = (list_blocks(blocks, device) for blocks in (some & ~whole, whole))
        return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=attends)


def find_image_runs(is_vision: Tensor) -> Tensor:
    """[.., S]: the column where each run of image tokens begins, -1 at other tokens."""
    columns = torch.arange(is_vision.shape[-1], device=is_vision.device)
    begins = is_vision & ~F.pad(is_vision[..., :-1], (1, 0))
    return columns.where(begins, 0).cummax(-1).values.where(is_vision, -1)


def whole_blocks(size: int) -> int:
    """The size rounded up to whole blocks, at least two: torch would compile a separate graph for a single one."""
    return max(2, -(-size // BLOCK)) * BLOCK


def visible_blocks(sequence: DocumentMask, rule: MaskRule = CAUSAL_RULE) -> tuple[Tensor, Tensor]:
    """Two [blocks, blocks] bools: where some position of a block attends to one of another, and where all do to all.

    Windows and image blocks make them a bound: some more in the first, some less in the second. The kernel then looks
    at single positions.
    """
    some, whole = visible_segments(sequence.segment, sequence.prompt)
    if rule.image_blocks:
        runs, index = sequence.image.unique(return_inverse=True)
        holds = hold_names(index, len(runs))[:, runs >= 0]
        some = some | (holds @ holds.T > 0)
    if rule.window is not None:
        first, last = sequence.path.view(-1, BLOCK).aminmax(dim=1)
        some = some & (last[None, :] > first[:, None] - rule.window)
        whole = whole & (first[None, :] > last[:, None] - rule.window)
    return some, whole


def hold_names(index: Tensor, names: int) -> Tensor:
    """[blocks, names]: 1 where a block has a position of this name."""
    holds = torch.zeros(len(index) // BLOCK, names)
    holds[torch.arange(len(index)) // BLOCK, index] = 1
    return holds


def visible_segments(segment: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """`visible_blocks` by segments alone, exactly."""
    names, index = segment.unique_consecutive(return_inverse=True)
    holds = hold_names(index, len(names))
    size = len(holds)
    prompt_of = torch.empty_like(names).scatter_(0, index, prompt)
    to_own = torch.eye(len(names))
    to_prompt = ((prompt_of[:, None] == names[None, :]) & (names[:, None] != names[None, :])).float()
    before = torch.ones(size, size, dtype=torch.bool).tril(-1)
    some = holds @ (to_own + to_prompt) @ holds.T > 0
    all_pairs = holds.sum(1)[:, None] * holds.sum(1)[None, :]
    whole = (holds @ (to_own + to_prompt) @ holds.T == all_pairs) & before
    return some & (before | torch.eye(size, dtype=torch.bool)), whole


def list_blocks(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The number of visible blocks per row and their indices, for flex_attention: [1, 1, n] and [1, 1, n, n]."""
    number = blocks.sum(1, dtype=torch.int32)
    which = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return to_device(number[None, None], device), to_device(which[None, None], device)


# ------------------------------------------------------------------------------------------------------------- readers
class AttentionReader(Protocol):
    def observe(self, layer: AttentionLayer, value: Tensor) -> None:
        """Read the attention of a layer, before it attends to these values."""


class MassReader:
    """Attention of chosen positions on the text and the vision pool, as the mean over the layers of each segment.

    `pool` [B, S] holds the pool of every prompt token and is negative elsewhere; the sink, a prompt's first token, does
    not count. `index` are the sequences and columns of the M positions to read. B and S may be smaller than the pass's:
    a corner with the positions and all that they attend to suffices. `masks` are those of the corner, by layer. A
    segment without layers (a model of one or two has no late third) stays NaN.
    """

    def __init__(
        self,
        pool: Tensor,
        sink: Tensor,
        index: tuple[Tensor, Tensor],
        segments: Sequence[Sequence[int]],
        masks: Sequence[Tensor | BlockMask | None],
    ) -> None:
        counted = ~sink & (pool >= 0)
        columns = [(pool == TEXT_POOL) & counted, (pool == VISION_POOL) & counted, counted]
        self.indicator = torch.stack(columns, -1)  # [B, S, 3]
        self.index, self.segments, self.masks = index, segments, masks
        self.total = torch.zeros(len(index[0]), len(segments), 2, device=pool.device)
        for number in (number for number, layers in enumerate(segments) if not layers):
            self.total[:, number] = torch.nan

    def observe(self, layer: AttentionLayer, value: Tensor) -> None:
        sequences, size, _ = self.indicator.shape
        query, key = (each[:sequences, :, :size] for each in (layer.query, layer.key))
        mask = self.masks[layer.module.layer_idx]
        # sdpa makes the matrix unless its values are as wide as the model's own.
        columns = FLEX_COLUMNS if isinstance(mask, BlockMask) else value.shape[3]
        corner = replace(layer, query=query, key=key, mask=mask)
        self.add(layer, corner.attend(self.values(columns, like=value)))

    def values(self, columns: int, like: Tensor) -> Tensor:
        """[B, heads, S, columns]: the indicators, then zeros, in place of values `like` these."""
        padded = F.pad(self.indicator.to(like.dtype), (0, columns - self.indicator.shape[-1]))
        return padded[:, None].expand(-1, like.shape[1], -1, -1)

    def add(self, layer: AttentionLayer, output: Tensor) -> None:
        """`output` [B, S, heads, columns] of a layer: mean of the heads, then the share of the counted keys."""
        text, vision, counted = layer.sp_group.all_reduce_mean(output[self.index][..., :3].float().mean(1)).unbind(-1)
        shares = torch.stack([text, vision], -1) / counted.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        add_to_segments(self.total, self.segments, layer, shares)


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

    def observe(self, layer: AttentionLayer, value: Tensor) -> None:
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
