"""How the attention of the last layer moves from token to token, within the image and within the text that follows it.

Rows of the attention matrix are computed piece by piece, as for the maps of `attention_maps.py`, and are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtrl.models.attention_maps import ImageReaders, attention_rows
from mtrl.models.masked_attention import AttentionLayer

LEAST_SUM, LEAST_SHARE = 1e-8, 1e-12


class ShiftReader:
    """Measures these signals of the last layer with attention, as the mean over its heads:

    image_share, text_share  the share of a token's attention on the image, from the first image token up to the last
                             one, and on all tokens from there on, those of the response among them
    image_shift, text_shift  the Fisher-Rao distance of the attention within each of these to that of the token before,
                             on the tokens that both see; 0 for the first token of a response

    All are 0 for responses without an image. `window`: the number of last tokens that the layer sees, None for all.
    """

    def __init__(self, groups: Sequence[ImageReaders], layer: int, window: int | None) -> None:
        self.groups, self.layer, self.window = groups, layer, window
        self.found = [torch.zeros(*each.columns.shape, 4, device=each.columns.device) for each in groups]

    def observe(self, layer: AttentionLayer, value: Tensor, lse: Tensor | None) -> None:
        if layer.module.layer_idx != self.layer:
            return
        for group, found in zip(self.groups, self.found, strict=True):
            for rows, times in group.pieces(layer.query.shape[1]):
                found[rows, times] = self._measure(layer, group, rows, times)

    def _measure(self, layer: AttentionLayer, group: ImageReaders, rows: slice, times: slice) -> Tensor:
        """[n, t, 4]"""
        first = max(times.start - 1, 0)  # each token is compared with the one before
        weights = attention_rows(layer, group, rows, slice(first, times.stop), self.window)
        begin, end = group.span
        image, text = weights[..., begin:end], weights[..., end:]
        shares = torch.stack([image.sum(-1), text.sum(-1)], -1)
        size = group.prompt.stop - group.prompt.start - end  # text that the first token sees
        time = torch.arange(first, times.stop - 1, device=weights.device)
        seen = torch.arange(text.shape[-1], device=weights.device) < size + time[:, None]
        shifts = torch.stack([fisher_rao(image), fisher_rao(text, seen)], -1)
        if not times.start:
            shifts = torch.cat([torch.zeros_like(shares[:, :1]), shifts], 1)
        return torch.cat([shares[:, -shifts.shape[1] :], shifts], -1)

    def signals(self, mask: Tensor) -> dict[str, Tensor]:
        """[N, T] each, on the CPU."""
        values = torch.zeros(*mask.shape, 4)
        for group, found in zip(self.groups, self.found, strict=True):
            values[group.rows, : found.shape[1]] = found.cpu()
        names = ("image_share", "text_share", "image_shift", "text_shift")
        return {name: each.where(mask, 0.0) for name, each in zip(names, values.unbind(-1), strict=True)}


def fisher_rao(weights: Tensor, seen: Tensor | float = 1.0) -> Tensor:
    """[n, t]: 2 arccos(sum of sqrt(p q)) of each row of `weights` [n, t + 1, keys] and the next one, over the keys that
    are `seen` [t, keys] by both; 0 without keys (an image of one token)."""
    if not weights.shape[-1]:
        return torch.zeros_like(weights[:, 1:]).sum(-1)
    shares = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    before, after = (each.clamp(min=LEAST_SHARE) * seen for each in (shares[:, :-1], shares[:, 1:]))
    before, after = (each / each.sum(-1, keepdim=True) for each in (before, after))
    return 2 * (before * after).sqrt().sum(-1).clamp(0, 1).arccos()
