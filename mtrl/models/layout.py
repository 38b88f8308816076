"""Rollouts as sequences for one pass: a prompt once, then all its responses, under each view of its images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtrl.models.masked_attention import BLOCK, DocumentMask, whole_blocks
from mtrl.types import VISION_POOL, Rollouts

NOT_PROMPT = -1  # the pool of what is no prompt token, and the segment of padding


@dataclass(frozen=True)
class Document:
    """A prompt under one view of its images, and the rows that read it. Documents know nothing of each other."""

    view: int
    prompt: int
    rows: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """Documents in sequences [B, S], right-padded. M counts the valid response tokens, row by row."""

    documents: list[Document]  # in the order of their places
    ids: Tensor  # [B, S]
    positions: Tensor  # [3, B, S]
    pool: Tensor  # [B, S] the pool of each prompt token, NOT_PROMPT elsewhere
    sight: DocumentMask
    packed: bool  # all documents in one sequence
    causal: bool  # `sight` says no more than a causal mask
    predicts: list[tuple[Tensor, Tensor]]  # for each view [M] sequence and place of what predicts each response token
    tails: list[tuple[Tensor, Tensor]]  # for each document the places of its prompt after the last image

    @property
    def is_vision(self) -> Tensor:
        return self.pool == VISION_POOL

    @property
    def sink(self) -> Tensor:
        """[B, S] bool: the first token of each prompt."""
        before = torch.nn.functional.pad(self.sight.segment[:, :-1], (1, 0), value=NOT_PROMPT - 1)
        return (self.pool != NOT_PROMPT) & (self.sight.segment != before)

    def vision_within(self, columns: slice, sizes: Sequence[int]) -> list[Tensor]:
        """For each document the numbers of those of its image tokens, so many in all, that stand in these columns."""
        within = torch.zeros_like(self.is_vision)
        within[:, columns] = True
        return [each.nonzero()[:, 0] for each in within[self.is_vision].split(list(sizes))]

    def corner(self, places: tuple[Tensor, Tensor]) -> tuple[slice, slice]:
        """The first sequences and positions that hold these places and all that they see."""
        sequences, size = (int(each.max()) + 1 for each in places)
        return slice(sequences), slice(whole_blocks(size) if self.packed else size)


def lay_out(
    rollouts: Rollouts,
    positions: Sequence[Tensor],
    *,
    share_prefix: bool = True,
    packed: bool = False,
    views: int = 1,
    parts: int = 1,
) -> Layout:
    """`share_prefix` off: a document a row. `packed` off: a sequence a document, padded to the longest. Sequences can
    be cut into so many equal `parts`.

    Prompts without images look the same under every view, so they are read under the first alone.
    """
    lengths = rollouts.mask.sum(1).tolist()
    documents = document_ids(rollouts, share_prefix, views)
    builder = _Builder(rollouts, positions, lengths)
    for number, document in enumerate(documents):
        builder.add(0 if packed else number, document)
    return builder.layout(documents, packed, views, parts)


def document_ids(rollouts: Rollouts, share_prefix: bool, views: int) -> list[Document]:
    readers: dict[int, list[int]] = {}
    for row, g in enumerate(rollouts.group.tolist()):
        readers.setdefault(g if share_prefix else row, []).append(row)
    clean = [Document(0, int(rollouts.group[rows[0]]), tuple(rows)) for rows in readers.values()]
    return [
        Document(view, each.prompt, each.rows)
        for view in range(views)
        for each in clean
        if view == 0 or rollouts.prompts[each.prompt].task.visual
    ]


class _Builder:
    """Takes documents one after the other and notes where everything came to stand."""

    def __init__(self, rollouts: Rollouts, positions: Sequence[Tensor], lengths: Sequence[int]) -> None:
        self.rollouts, self.prompt_positions, self.lengths = rollouts, positions, lengths
        self.streams: list[dict[str, list[Tensor]]] = []  # for each sequence its pieces of ids, positions, .. by name
        self.sizes: list[int] = []  # positions in each sequence so far
        self.segments = 0
        self.predicts: dict[tuple[int, int], tuple[int, Tensor]] = {}  # (view, row) -> sequence, places
        self.tails: list[tuple[Tensor, Tensor]] = []

    def add(self, sequence: int, document: Document) -> None:
        if sequence == len(self.streams):
            self.streams.append({name: [] for name in ("ids", "positions", "pool", "segment", "prompt")})
            self.sizes.append(0)
        prompt, begin = self.rollouts.prompts[document.prompt], self.sizes[sequence]
        spans = [self.lengths[row] for row in document.rows]
        size, total = len(prompt.ids), len(prompt.ids) + sum(spans)
        responses = [self.rollouts.tokens[row, :length] for row, length in zip(document.rows, spans, strict=True)]
        names = torch.arange(len(spans) + 1) + self.segments
        for name, piece in {
            "ids": torch.cat([prompt.ids, *responses]),
            "positions": continue_positions(self.prompt_positions[document.prompt], spans).T,
            "pool": torch.cat([prompt.token_pool, torch.full((total - size,), NOT_PROMPT)]),
            "segment": names.repeat_interleave(torch.tensor([size, *spans])),
            "prompt": torch.full((total,), self.segments),
        }.items():
            self.streams[sequence][name].append(piece)
        self._note_places(sequence, document, begin, size)
        self.segments += len(names)
        self.sizes[sequence] += total

    def _note_places(self, sequence: int, document: Document, begin: int, size: int) -> None:
        end = begin + size
        for row in document.rows:
            places = torch.arange(end, end + self.lengths[row]) - 1
            places[:1] = begin + size - 1  # the prompt's last position predicts every first token
            self.predicts[document.view, row] = (sequence, places)
            end += self.lengths[row]
        seen = (self.rollouts.prompts[document.prompt].token_pool == VISION_POOL).nonzero()
        tail = torch.arange(begin + (int(seen[-1]) + 1 if len(seen) else 0), begin + size)
        self.tails.append((torch.full_like(tail, sequence), tail))

    def layout(self, documents: list[Document], packed: bool, views: int, parts: int) -> Layout:
        longest = whole_blocks(max(self.sizes)) if packed else max(self.sizes)
        length = -(-longest // (step := math.lcm(BLOCK, parts) if packed else parts)) * step

        def joined(name: str, fill: int = 0) -> Tensor:
            whole = pad_sequence([torch.cat(s[name]) for s in self.streams], batch_first=True, padding_value=fill)
            spare = length - whole.shape[1]
            return torch.nn.functional.pad(whole, (0, 0) * (whole.dim() - 2) + (0, spare), value=fill)

        def places(view: int) -> tuple[Tensor, Tensor]:
            rows = range(len(self.lengths))
            found = [self.predicts.get((view, row)) or self.predicts[0, row] for row in rows]
            sequence = torch.tensor([number for number, _ in found]).repeat_interleave(torch.tensor(self.lengths))
            return sequence, torch.cat([place for _, place in found])

        return Layout(
            documents,
            joined("ids"),
            joined("positions").permute(2, 0, 1),
            joined("pool", NOT_PROMPT),
            DocumentMask(joined("segment", NOT_PROMPT), joined("prompt", NOT_PROMPT)),
            packed,
            causal=not packed and all(len(document.rows) == 1 for document in documents),
            predicts=[places(view) for view in range(views)],
            tails=self.tails,
        )


def continue_positions(prompt: Tensor, lengths: Sequence[int]) -> Tensor:
    """[3, L + sum of lengths]: each response counts on from the prompt's highest position, in all three axes."""
    responses = [torch.arange(length) + prompt.max() + 1 for length in lengths]
    return torch.cat([prompt, torch.cat(responses).expand(3, -1)], dim=1)
