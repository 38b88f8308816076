"""Lay out rollouts as sequences for one pass: a prompt once, then all its responses, for each view of its images."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mtrl.models.document_mask import BLOCK, DocumentMask, find_image_runs, whole_blocks
from mtrl.models.turns import content, interleave, rows_with_turns
from mtrl.types import VISION_POOL, Rollouts

NOT_PROMPT = -1  # the pool of other tokens, and the segment of padding
STREAMS = ("ids", "positions", "pool", "segment", "prompt", "path", "vision")
NO_VIEWS: Mapping[int, float] = MappingProxyType({})
NO_POSITIONS: Mapping[int, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Document:
    """A prompt under one view of its images, and the rows that respond to it. Documents do not attend to each other.
    One without its `images` has no image tokens; all other tokens are at the same positions as with them, which is the
    same as image tokens that nothing attends to. A `counterfactual` one has the original images and one row; the number
    is the argument of its view."""

    view: int
    prompt: int
    rows: tuple[int, ...]
    images: bool = True
    counterfactual: float | None = None

    @property
    def image_view(self) -> int:
        """The view whose image features it has."""
        return self.view if self.counterfactual is None else 0


@dataclass(frozen=True, eq=False)
class Layout:
    """Documents in sequences [B, S], right-padded. M counts the valid response tokens, row by row."""

    documents: list[Document]  # in the order of their positions
    ids: Tensor  # [B, S]
    positions: Tensor  # [3, B, S]
    pool: Tensor  # [B, S] the pool of each prompt token, NOT_PROMPT elsewhere
    is_vision: Tensor  # [B, S] bool: where image features go, also those of images that responses were shown
    document_mask: DocumentMask
    packed: bool  # all documents in one sequence
    causal: bool  # a causal mask is equal to `document_mask`
    predictors: list[tuple[Tensor, Tensor]]  # per view [M] sequence and column that predict each response token
    places: tuple[Tensor, Tensor]  # [M] sequence and column of each response token in the first view
    tails: list[tuple[Tensor, Tensor]]  # per document sequence and columns of its prompt after the last image

    @property
    def is_prompt_vision(self) -> Tensor:
        """[B, S] bool: the image tokens of the prompts alone."""
        return self.pool == VISION_POOL

    @property
    def sink(self) -> Tensor:
        """[B, S] bool: the first token of each prompt."""
        segment = self.document_mask.segment
        before = nn.functional.pad(segment[:, :-1], (1, 0), value=NOT_PROMPT - 1)
        return (self.pool != NOT_PROMPT) & (segment != before)

    def feature_keys(self, rollouts: Rollouts) -> list[tuple[int, int]]:
        """The view and the index in `encoded_prompts` of all image features, in the order of the sequences."""
        content = {row: len(rollouts.prompts) + number for number, row in enumerate(rows_with_turns(rollouts))}
        return [
            (document.image_view, index)
            for document in self.documents
            if document.images
            for index in (document.prompt, *(content[row] for row in document.rows if row in content))
        ]

    def vision_within(self, columns: slice, sizes: Sequence[int]) -> list[Tensor]:
        """For each document, with `sizes` image tokens, the indices of those in these columns."""
        within = torch.zeros_like(self.is_vision)
        within[:, columns] = True
        return [each.nonzero()[:, 0] for each in within[self.is_vision].split(list(sizes))]

    def corner(self, index: tuple[Tensor, Tensor]) -> tuple[slice, slice]:
        """The first sequences and columns that contain these positions and all that they attend to."""
        sequences, size = (int(each.max()) + 1 for each in index)
        return slice(sequences), slice(whole_blocks(size) if self.packed else size)


def lay_out(
    rollouts: Rollouts,
    positions: Sequence[Tensor],
    *,
    observed_positions: Mapping[int, Tensor] = NO_POSITIONS,
    share_prefix: bool = True,
    packed: bool = False,
    views: int = 1,
    without_images: Container[int] = (),
    counterfactual: Mapping[int, float] = NO_VIEWS,
    sp_size: int = 1,
) -> Layout:
    """`positions` of each prompt, and `observed_positions` [3, own and observed tokens] of each row with observations.

    Without `share_prefix` there is one document per row; unless `packed`, one sequence per document, padded to the
    longest. Sequences are padded so that `sp_size` ranks can split them evenly. Views `without_images` have no image
    tokens; `counterfactual` ones have a document per row.

    Prompts without images are the same under every view, so only the first view includes them.
    """
    documents = make_documents(rollouts, share_prefix, views, without_images, counterfactual)
    builder = _Builder(rollouts, positions, observed_positions)
    for number, document in enumerate(documents):
        builder.add(0 if packed else number, document)
    return builder.layout(documents, packed, views, sp_size)


def make_documents(
    rollouts: Rollouts,
    share_prefix: bool,
    views: int,
    without_images: Container[int] = (),
    counterfactual: Mapping[int, float] = NO_VIEWS,
) -> list[Document]:
    groups: dict[int, list[int]] = {}
    for row, g in enumerate(rollouts.group.tolist()):
        groups.setdefault(g if share_prefix else row, []).append(row)
    visual = rollouts.visual.tolist()
    clean = [Document(0, int(rollouts.group[rows[0]]), tuple(rows)) for rows in groups.values()]
    single = [replace(each, rows=(row,)) for each in clean for row in each.rows]
    return [
        replace(each, view=view, images=view not in without_images, counterfactual=counterfactual.get(view))
        for view in range(views)
        for each in (single if view in counterfactual else clean)
        if view == 0 or any(visual[row] for row in each.rows)
    ]


@dataclass(frozen=True, eq=False)
class _Response:
    """What follows the prompt in the sequence of a row: its own tokens, between them those that it was shown."""

    ids: Tensor
    is_own: Tensor  # bool
    is_vision: Tensor  # bool
    positions: Tensor | None  # [3, tokens]; None: they continue the prompt's

    @classmethod
    def of(cls, rollouts: Rollouts, row: int, positions: Tensor | None) -> _Response:
        ids, observed = rollouts.tokens[row][rollouts.mask[row]], rollouts.observed[row]
        yes, no = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        if observed is None or not observed.turns:
            return cls(ids, yes, no, None)
        told = content(observed)
        is_vision = told.token_pool == VISION_POOL
        return cls(
            interleave(observed, ids, told.ids),
            interleave(observed, yes, torch.zeros_like(is_vision)),
            interleave(observed, no, is_vision),
            positions,
        )


class _Builder:
    """Adds documents one after the other and records their positions."""

    def __init__(
        self, rollouts: Rollouts, positions: Sequence[Tensor], observed_positions: Mapping[int, Tensor]
    ) -> None:  # fmt: skip
        self.rollouts, self.prompt_positions = rollouts, positions
        self.responses = [_Response.of(rollouts, row, observed_positions.get(row)) for row in range(len(rollouts))]
        self.streams: list[dict[str, list[Tensor]]] = []  # per sequence its pieces of ids, positions, .. by name
        self.sizes: list[int] = []  # length of each sequence so far
        self.segments = 0
        self.predictors: dict[tuple[int, int], tuple[int, Tensor]] = {}  # (view, row) -> sequence, columns
        self.places: dict[tuple[int, int], tuple[int, Tensor]] = {}
        self.tails: list[tuple[Tensor, Tensor]] = []

    def add(self, sequence: int, document: Document) -> None:
        if sequence == len(self.streams):
            self.streams.append({name: [] for name in STREAMS})
            self.sizes.append(0)
        prompt, begin = self.rollouts.prompts[document.prompt], self.sizes[sequence]
        responses = [self.responses[row] for row in document.rows]
        spans = [len(each.ids) for each in responses]
        size = len(prompt.ids)
        is_vision = torch.cat([prompt.token_pool == VISION_POOL, *(each.is_vision for each in responses)])
        part = torch.arange(len(spans) + 1).repeat_interleave(torch.tensor([size, *spans]))  # 0: the prompt
        is_own = torch.cat([torch.zeros(size, dtype=torch.bool), *(each.is_own for each in responses)])
        positions = continue_positions(self.prompt_positions[document.prompt], spans, [e.positions for e in responses])
        kept: Any = slice(None) if document.images else ~is_vision
        for name, piece in {
            "ids": torch.cat([prompt.ids, *(each.ids for each in responses)]),
            "positions": positions.T,
            "pool": nn.functional.pad(prompt.token_pool, (0, sum(spans)), value=NOT_PROMPT),
            "segment": part + self.segments,
            "prompt": torch.full((size + sum(spans),), self.segments),
            "path": continue_positions(torch.arange(size).expand(3, -1), spans)[0],
            "vision": is_vision,
        }.items():
            self.streams[sequence][name].append(piece[kept])
        self._record(sequence, document, begin, part[kept], is_own[kept], is_vision[kept])
        self.segments += len(spans) + 1
        self.sizes[sequence] += len(part[kept])

    def _record(
        self, sequence: int, document: Document, begin: int, part: Tensor, is_own: Tensor, is_vision: Tensor
    ) -> None:
        """Where the responses' own tokens are, what predicts them, and the prompt's tail. `part` numbers the prompt (0)
        and the responses."""
        end = begin + int((part == 0).sum())
        for number, row in enumerate(document.rows, 1):
            places = begin + ((part == number) & is_own).nonzero()[:, 0]
            self.places[document.view, row] = (sequence, places)
            columns = places - 1
            columns[:1] = end - 1  # the prompt's last position predicts every first token
            self.predictors[document.view, row] = (sequence, columns)
        image = ((part == 0) & is_vision).nonzero()
        tail = torch.arange(begin + (int(image[-1]) + 1 if len(image) else 0), end)
        self.tails.append((torch.full_like(tail, sequence), tail))

    def layout(self, documents: list[Document], packed: bool, views: int, sp_size: int) -> Layout:
        longest = whole_blocks(max(self.sizes)) if packed else max(self.sizes)
        length = -(-longest // (step := math.lcm(BLOCK, sp_size) if packed else sp_size)) * step

        def stack(name: str, fill: int = 0) -> Tensor:
            padded = pad_sequence([torch.cat(s[name]) for s in self.streams], batch_first=True, padding_value=fill)
            missing = length - padded.shape[1]
            return nn.functional.pad(padded, (0, 0) * (padded.dim() - 2) + (0, missing), value=fill)

        def join(found: dict[tuple[int, int], tuple[int, Tensor]], view: int) -> tuple[Tensor, Tensor]:
            pairs = [found.get((view, row)) or found[0, row] for row in range(len(self.responses))]
            lengths = torch.tensor([len(columns) for _, columns in pairs])
            sequence = torch.tensor([number for number, _ in pairs]).repeat_interleave(lengths)
            return sequence, torch.cat([columns for _, columns in pairs])

        pool, segment, prompt = (stack(name, NOT_PROMPT) for name in ("pool", "segment", "prompt"))
        is_vision = stack("vision")
        return Layout(
            documents,
            stack("ids"),
            stack("positions").permute(2, 0, 1),
            pool,
            is_vision,
            DocumentMask(segment, prompt, stack("path"), find_image_runs(is_vision)),
            packed,
            causal=not packed and all(len(document.rows) == 1 for document in documents),
            predictors=[join(self.predictors, view) for view in range(views)],
            places=join(self.places, 0),
            tails=self.tails,
        )


def continue_positions(
    prompt: Tensor, lengths: Sequence[int], known: Sequence[Tensor | None] | None = None
) -> Tensor:  # fmt: skip
    """[3, L + sum of lengths]: each response continues from the prompt's highest position, in all three axes, unless
    its positions are `known`."""
    following = [(torch.arange(length) + prompt.max() + 1).expand(3, -1) for length in lengths]
    own = following if known is None else [a if b is None else b for a, b in zip(following, known, strict=True)]
    return torch.cat([prompt, *own], dim=1)
