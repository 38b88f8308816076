"""Attention by layer segment in Markdown tables."""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl.algorithms.signals import aei, segment, vgr
from mtrl.report.markdown_text import number, table
from mtrl.types import SEGMENTS

SHOWN_SEGMENTS = SEGMENTS[:-1]  # "weight" only serves the token weights
BALANCE = "VGR 1 is balance, above 1 text dominates; AEI is the share of attention over the share of tokens."


def summary_cells(values: Tensor) -> list[str]:
    """Mean, standard deviation, minimum and maximum of the values that are not NaN."""
    known = values[~values.isnan()].double()
    if not len(known):
        return ["n/a"] * 4
    deviation = float(known.std(correction=0))
    return [number(x) for x in (float(known.mean()), deviation, float(known.min()), float(known.max()))]


def attention_table(mass: Tensor, sizes: Tensor) -> str:
    """VGR and AEI of responses by segment, from mass [N, len(SEGMENTS), 2] and pool sizes [N, 2]."""
    rows = []
    for name in SHOWN_SEGMENTS:
        chosen = segment(mass, name)
        text, vision = aei(chosen, sizes).unbind(-1)
        rows.append([name, *summary_cells(vgr(chosen, sizes)), summary_cells(text)[0], summary_cells(vision)[0]])
    return table(["layers", "VGR mean", "std", "min", "max", "AEI text", "AEI vision"], rows)


def row_attention(mass: Tensor, sizes: Tensor) -> str:
    """One line with the VGR of a response by segment, from its mass [len(SEGMENTS), 2] and pool sizes [2]."""
    values = [f"{name} {number(float(vgr(segment(mass, name), sizes)))}" for name in SHOWN_SEGMENTS]
    return "VGR " + ", ".join(values) if bool((sizes > 0).all()) else "VGR n/a (no image)"


def rows_over_range(values: Tensor, count: int) -> list[int]:
    """Up to `count` row indices from the lowest value to the highest, evenly spaced in rank."""
    order = values.argsort(stable=True)
    ranks = torch.linspace(0, len(order) - 1, min(count, len(order))).round().long()
    return order[ranks].tolist()
