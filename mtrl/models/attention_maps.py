"""The attention of each response token on every image token of the prompt, for the rollout record.

The same shares as `MassReader` before they are summed over the image, as the mean over the layers of `all`. Rows of the
attention matrix are computed piece by piece, over the prompt and the response only: other documents of a packed
sequence cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtrl.models.device_copy import to_device
from mtrl.models.layout import Layout
from mtrl.models.masked_attention import AttentionLayer
from mtrl.types import VISION_POOL, AttentionMap, Rollouts

SCORES_AT_ONCE = 2**24  # heads x tokens x keys, in float32
CELLS_PER_RESPONSE = 2**24  # tokens x image tokens: larger maps are not made
CELLS_PER_PASS = 2**27  # half a GiB in float32
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class ImageReaders:
    """The n responses to a prompt with images, and their positions in the pass."""

    rows: list[int]  # in the rollouts
    lengths: list[int]
    sequence: int
    prompt: slice  # its columns
    vision: Tensor  # [V] the image tokens among these
    span: tuple[int, int]  # the first and the last of these
    columns: Tensor  # [n, T] that predict each token; after the first, those of the tokens themselves

    def pieces(self, heads: int) -> Iterator[tuple[slice, slice]]:
        """Slices of rows and times whose scores stay within SCORES_AT_ONCE."""
        count, longest = self.columns.shape
        per_token = heads * (self.prompt.stop - self.prompt.start + longest)
        times = max(1, min(longest, SCORES_AT_ONCE // per_token))
        rows = max(1, SCORES_AT_ONCE // (per_token * longest))
        for first in range(0, count, rows):
            for begin in range(0, longest, times):
                yield slice(first, first + rows), slice(begin, min(begin + times, longest))


class PatchReader:
    """Attention of every response token on each image token, as the mean over `layers`. `windows`: of each layer the
    number of last tokens that it sees, None for all."""

    def __init__(self, groups: Sequence[ImageReaders], layers: Sequence[int], windows: Sequence[int | None]) -> None:
        self.groups, self.layers, self.windows = groups, layers, windows
        self.totals = [
            torch.zeros(*each.columns.shape, len(each.vision), device=each.columns.device) for each in groups
        ]

    def observe(self, layer: AttentionLayer, value: Tensor, lse: Tensor | None) -> None:
        if layer.module.layer_idx not in self.layers:
            return
        for group, total in zip(self.groups, self.totals, strict=True):
            for rows, times in group.pieces(layer.query.shape[1]):
                total[rows, times] += self._shares(layer, group, rows, times) / len(self.layers)

    def _shares(self, layer: AttentionLayer, group: ImageReaders, rows: slice, times: slice) -> Tensor:
        """[n, t, V]: the mean over heads on the prompt, then the share among its tokens without the sink."""
        window = self.windows[layer.module.layer_idx]
        seen = attention_rows(layer, group, rows, times, window)[..., : group.prompt.stop - group.prompt.start]
        return seen[..., group.vision] / seen[..., 1:].sum(-1, keepdim=True).clamp(min=TINY)

    def maps(self, count: int) -> tuple[AttentionMap | None, ...]:
        """One map per row; None for rows without an image or with too large a map."""
        maps: list[AttentionMap | None] = [None] * count
        for group, total in zip(self.groups, self.totals, strict=True):
            for number, (row, length) in enumerate(zip(group.rows, group.lengths, strict=True)):
                maps[row] = quantize_map(total[number, :length])
        return tuple(maps)


def attention_rows(layer: AttentionLayer, group: ImageReaders, rows: slice, times: slice, window: int | None) -> Tensor:
    """[n, t, keys]: the attention of these positions on the prompt, then on the response, as the mean over heads."""
    query, key = layer.query[group.sequence], layer.key[group.sequence]
    columns = group.columns[rows, : times.stop]
    chosen = query[:, columns[:, times]].unflatten(0, (len(key), -1)).float()  # [key heads, sharing heads, n, t, D]
    before = torch.einsum("khntd,kpd->khntp", chosen, key[:, group.prompt].float())
    own = torch.einsum("khntd,knsd->khnts", chosen, key[:, columns[:, 1:]].float())
    time = torch.arange(times.stop, device=columns.device)
    own = own.masked_fill(time[None, :-1] >= time[times, None], -torch.inf)  # causal
    scores = torch.cat([before, own], -1) * layer.options["scaling"]
    if window is not None:
        keys = torch.arange(scores.shape[-1], device=columns.device)
        last = before.shape[-1] - 1 + time[times, None]
        scores = scores.masked_fill(keys <= last - window, -torch.inf)
    return layer.sp_group.all_reduce_mean(scores.softmax(-1).mean((0, 1)))


def quantize_map(shares: Tensor) -> AttentionMap:
    """One byte per share: of the square root, so that a faint patch next to a strong one is not lost. The scale
    preserves the sum of a token's shares."""
    roots = (shares / shares.amax(1, keepdim=True).clamp(min=TINY)).sqrt()
    levels = (255 * roots).round()
    scale = shares.sum(1) / (levels / 255).square().sum(1).clamp(min=TINY)
    return AttentionMap(levels.to(torch.uint8).cpu(), scale.cpu())


def make_map_readers(layout: Layout, rollouts: Rollouts, device: torch.device) -> list[ImageReaders]:
    """The responses whose maps are not too large, prompt by prompt, up to CELLS_PER_PASS."""
    return make_image_readers(layout, rollouts, device, CELLS_PER_RESPONSE, CELLS_PER_PASS)


def make_image_readers(
    layout: Layout,
    rollouts: Rollouts,
    device: torch.device,
    cells_per_response: float = math.inf,
    cells_per_pass: float = math.inf,
) -> list[ImageReaders]:
    """The responses of the first view to prompts with images, prompt by prompt. A cell is a token with an image
    token."""
    lengths = rollouts.mask.sum(1).tolist()
    sequences, columns = (each.split(lengths) for each in layout.predictors[0])
    groups, left = [], cells_per_pass
    for document in layout.documents:
        prompt = rollouts.prompts[document.prompt]
        vision = (prompt.token_pool == VISION_POOL).nonzero()[:, 0]
        rows = [row for row in document.rows if 0 < lengths[row] * len(vision) <= cells_per_response]
        cells = len(rows) * max((lengths[row] for row in rows), default=0) * len(vision)
        if document.view or not rows or cells > left:
            continue
        left -= cells
        end = int(columns[rows[0]][0]) + 1  # the prompt's last position predicts every first token
        groups.append(
            ImageReaders(
                rows,
                [lengths[row] for row in rows],
                int(sequences[rows[0]][0]),
                slice(end - len(prompt.ids), end),
                to_device(vision, device),
                (int(vision[0]), int(vision[-1])),
                to_device(pad_sequence([columns[row] for row in rows], batch_first=True), device),
            )
        )
    return groups
