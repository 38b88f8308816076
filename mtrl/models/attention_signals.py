"""The signals that need attention: the readers that a pass takes along, and what they have measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mtrl.algorithms.signals import ATTENTION, SHIFTS
from mtrl.models.attention_maps import PatchReader, make_image_readers, make_map_readers
from mtrl.models.attention_shifts import ShiftReader
from mtrl.models.backbone import Backbone
from mtrl.models.cascade_attention import CascadeMask
from mtrl.models.device_copy import to_device, unpack_rows
from mtrl.models.layout import Document, Layout
from mtrl.models.masked_attention import AttentionReader, MassReader
from mtrl.models.prompt_masses import PromptRows
from mtrl.types import SEGMENTS, Needs, Rollouts

Segments = list[list[int]]  # layers of each of SEGMENTS


class AttentionSignals:
    """Reads those of `needs` in one pass over `rollouts`, under the original view."""

    def __init__(
        self, needs: Needs, layout: Layout, rollouts: Rollouts, backbone: Backbone, segments: Segments
    ) -> None:  # fmt: skip
        if needs.names & {*ATTENTION}:
            check_attention(backbone)
        self.layout, self.rollouts, self.backbone, self.segments = layout, rollouts, backbone, segments
        self.mass = self._make_mass_reader() if "attention_mass" in needs else None
        self.maps = self._make_patch_reader() if "attention_maps" in needs else None
        self.shifts = self._make_shift_reader() if needs.names & {*SHIFTS} else None

    @property
    def readers(self) -> list[AttentionReader]:
        return [each for each in (self.mass, self.maps, self.shifts) if each is not None]

    def collect(self) -> dict[str, Any]:
        """The fields of `Signals`, on the CPU, after the pass."""
        found: dict[str, Any] = {}
        if self.mass is not None:
            found |= self._unpack_mass(self.mass)
        if self.maps is not None:
            found["attention_maps"] = self.maps.maps(len(self.rollouts))
        if self.shifts is not None:
            found |= self.shifts.signals(self.rollouts.mask)
        return found

    def _make_mass_reader(self) -> MassReader:
        """Reads the positions that predict the responses, then those of the prompts' tails."""
        layout, device = self.layout, self.backbone.device
        tails = (tail for tail, _ in self._tails())
        sequence, column = (torch.cat(each) for each in zip(layout.predictors[0], *tails, strict=True))
        corner = layout.corner((sequence, column))  # that of the first view, which comes first
        pool, sink = to_device(layout.pool[corner], device), to_device(layout.sink[corner], device)
        causal = layout.causal and self.backbone.is_causal
        masks = {} if causal else self.backbone.make_masks(layout.document_mask[corner], layout.packed)
        index = to_device(sequence, device), to_device(column, device)
        by_kernel = any(isinstance(mask, CascadeMask) for mask in masks.values())
        rows = PromptRows.of(layout.document_mask, column, device) if by_kernel else None
        return MassReader(pool, sink, index, self.segments, self.backbone.by_layer(masks), rows)

    def _make_patch_reader(self) -> PatchReader:
        groups = make_map_readers(self.layout, self.rollouts, self.backbone.device)
        return PatchReader(groups, self.segments[SEGMENTS.index("all")], self._windows())

    def _make_shift_reader(self) -> ShiftReader:
        groups = make_image_readers(self.layout, self.rollouts, self.backbone.device)
        last = self.backbone.attention_layers[-1]
        return ShiftReader(groups, last, self._windows()[last])

    def _windows(self) -> list[int | None]:
        """Of each layer the number of last tokens that it sees, None for all."""
        return self.backbone.by_layer({kind: rule.window for kind, rule in self.backbone.mask_rules.items()})

    def _tails(self) -> Iterator[tuple[tuple[Tensor, Tensor], Document]]:
        """The places of the prompt tokens after the images, of each document of the first view."""
        pairs = zip(self.layout.tails, self.layout.documents, strict=True)
        return ((tail, document) for tail, document in pairs if document.view == 0)

    def _unpack_mass(self, reader: MassReader) -> dict[str, Tensor]:
        clean, mask = list(self._tails()), self.rollouts.mask
        responses, *tails = reader.total.cpu().split([int(mask.sum()), *(len(tail[1]) for tail, _ in clean)])
        prompt_mass = torch.zeros(len(mask), *responses.shape[1:])
        for values, (_, document) in zip(tails, clean, strict=True):
            prompt_mass[list(document.rows)] = values.mean(0)
        return {"attention_mass": unpack_rows(responses, mask), "prompt_attention_mass": prompt_mass}


def check_attention(backbone: Backbone) -> None:
    if not backbone.uses_own_attention:
        raise ValueError("what reads or changes attention needs attn_implementation auto or sdpa")
