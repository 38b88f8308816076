"""Where on the image each token of a response looks: its attention on every image token of the prompt, for the record.

The same shares as `MassReader`, before they are summed over the image, as the mean over the layers of `all`. Rows of
the attention matrix are made piece by piece, over the prompt and the response itself alone: what else stands in a
packed sequence costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtrl.models.device_copy import to_device
from mtrl.models.layout import Layout
from mtrl.models.masked_attention import AttentionLayer, AttentionReader
from mtrl.models.parallel.sequence import NO_SEQUENCE_PARALLEL, SequenceParallelGroup
from mtrl.types import VISION_POOL, AttentionMap, Rollouts

SCORES_AT_ONCE = 2**24  # of heads, tokens and keys, in float32
CELLS_OF_A_RESPONSE = 2**24  # tokens times image tokens: larger maps are not made
CELLS_OF_A_PASS = 2**27  # those of a pass together, in float32 half a GiB
TINY = torch.finfo(torch.float32).tiny


class SeveralReaders:
    """Readers that look at the same pass."""

    def __init__(self, readers: Sequence[AttentionReader]) -> None:
        self.readers = readers

    def observe(self, layer: AttentionLayer, value: Tensor) -> None:
        for reader in self.readers:
            reader.observe(layer, value)


@dataclass(frozen=True, eq=False)
class ImageReaders:
    """The n responses to a prompt with images, and where they stand."""

    rows: list[int]  # of the rollouts
    lengths: list[int]
    sequence: int
    prompt: slice  # its columns
    vision: Tensor  # [V] which of these are the image's
    places: Tensor  # [n, T] the columns that predict each token; after the first, those of the tokens themselves

    def pieces(self, heads: int) -> Iterator[tuple[slice, slice]]:
        """Rows and times whose scores fit into the bound."""
        count, longest = self.places.shape
        for_one = heads * (self.prompt.stop - self.prompt.start + longest)
        times = max(1, min(longest, SCORES_AT_ONCE // for_one))
        rows = max(1, SCORES_AT_ONCE // (for_one * longest))
        for first in range(0, count, rows):
            for begin in range(0, longest, times):
                yield slice(first, first + rows), slice(begin, min(begin + times, longest))


class PatchReader:
    """Attention of every response token on each image token, as the mean over `layers`."""

    def __init__(
        self, groups: Sequence[ImageReaders], layers: range, sharers: SequenceParallelGroup = NO_SEQUENCE_PARALLEL
    ) -> None:
        self.groups, self.layers, self.sharers = groups, layers, sharers
        self.totals = [torch.zeros(*each.places.shape, len(each.vision), device=each.places.device) for each in groups]

    def observe(self, layer: AttentionLayer, value: Tensor) -> None:
        if layer.module.layer_idx not in self.layers:
            return
        for group, total in zip(self.groups, self.totals, strict=True):
            for rows, times in group.pieces(layer.query.shape[1]):
                total[rows, times] += self._shares(layer, group, rows, times) / len(self.layers)

    def _shares(self, layer: AttentionLayer, group: ImageReaders, rows: slice, times: slice) -> Tensor:
        """[n, t, V]: mean of the heads over the prompt, then the share of the tokens that count, all but the sink."""
        query, key = layer.query[group.sequence], layer.key[group.sequence]
        places = group.places[rows, : times.stop]
        asking = query[:, places[:, times]].unflatten(0, (len(key), -1)).float()  # [key heads, sharing heads, n, t, D]
        before = torch.einsum("khntd,kpd->khntp", asking, key[:, group.prompt].float())
        own = torch.einsum("khntd,knsd->khnts", asking, key[:, places[:, 1:]].float())
        time = torch.arange(times.stop, device=places.device)
        own = own.masked_fill(time[None, :-1] >= time[times, None], -torch.inf)  # a token sees those before it
        weights = (torch.cat([before, own], -1) * layer.options["scaling"]).softmax(-1)
        seen = self.sharers.mean(weights[..., : before.shape[-1]].mean((0, 1)))
        return seen[..., group.vision] / seen[..., 1:].sum(-1, keepdim=True).clamp(min=TINY)

    def maps(self, count: int) -> tuple[AttentionMap | None, ...]:
        """One for each of `count` rows; None for those that have no image, or too large a map."""
        found: list[AttentionMap | None] = [None] * count
        for group, total in zip(self.groups, self.totals, strict=True):
            for number, (row, length) in enumerate(zip(group.rows, group.lengths, strict=True)):
                found[row] = quantize_levels(total[number, :length])
        return tuple(found)


def quantize_levels(shares: Tensor) -> AttentionMap:
    """In a byte each: roots, so that a faint patch beside a strong one is still told from nothing. The scale gives a
    token's levels the sum that its shares have."""
    roots = (shares / shares.amax(1, keepdim=True).clamp(min=TINY)).sqrt()
    levels = (255 * roots).round()
    scale = shares.sum(1) / (levels / 255).square().sum(1).clamp(min=TINY)
    return AttentionMap(levels.to(torch.uint8).cpu(), scale.cpu())


def onlookers(layout: Layout, rollouts: Rollouts, device: torch.device) -> list[ImageReaders]:
    """Those of the first view whose maps can be kept, prompt by prompt, up to the bound of a pass."""
    lengths = rollouts.mask.sum(1).tolist()
    sequences, places = (each.split(lengths) for each in layout.predicts[0])
    found, left = [], CELLS_OF_A_PASS
    for document in layout.documents:
        prompt = rollouts.prompts[document.prompt]
        vision = (prompt.token_pool == VISION_POOL).nonzero()[:, 0]
        rows = [row for row in document.rows if 0 < lengths[row] * len(vision) <= CELLS_OF_A_RESPONSE]
        cells = len(rows) * max((lengths[row] for row in rows), default=0) * len(vision)
        if document.view or not rows or cells > left:
            continue
        left -= cells
        end = int(places[rows[0]][0]) + 1  # the prompt's last position predicts every first token
        found.append(
            ImageReaders(
                rows,
                [lengths[row] for row in rows],
                int(sequences[rows[0]][0]),
                slice(end - len(prompt.ids), end),
                to_device(vision, device),
                to_device(pad_sequence([places[row] for row in rows], batch_first=True), device),
            )
        )
    return found
