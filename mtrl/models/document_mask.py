"""Which tokens attend to which, where responses share a prompt: as rules, as matrices, and as blocks for a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mtrl.models.device_copy import to_device

BLOCK = 128  # block size of flex_attention; packed sequences are a multiple of it


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
