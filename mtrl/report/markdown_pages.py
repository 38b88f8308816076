"""Markdown for people: tables, texts that cannot break out of their fence, and attention by layer segment."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from mtrl.algorithms.signals import aei, segment, vgr
from mtrl.report.escape import shorten
from mtrl.types import SEGMENTS
from mtrl.utils.terminal import sanitize

SHOWN_SEGMENTS = SEGMENTS[:-1]  # "weight" is for token weights, not for people
TEXT_CHARS = 4000  # characters shown of one prompt or response
BALANCE = "VGR 1 is balance, above 1 text dominates; AEI is the share of attention over the share of tokens."


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """
    >>> print(table(["part", "mean"], [["a|b", 0.5]]))
    | part | mean |
    |---|---|
    | a\\|b | 0.5 |
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("|" + "|".join(map(_cell, line)) + "|" for line in lines)


def _cell(value: object) -> str:
    text = sanitize(str(value)).replace("\n", "\\n").replace("|", "\\|")
    return text if text == "---" else f" {text} "


def fenced(text: str, language: str = "") -> str:
    """The text in a code block, as it is, whatever a model wrote: the fence is longer than any in it."""
    ticks = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}{language}\n{sanitize(shorten(text, TEXT_CHARS))}\n{fence}"


def number(value: float, digits: int = 4) -> str:
    """
    >>> number(1.23456), number(float("nan")), number(-0.0), number(0.1234, digits=2)
    ('1.235', 'n/a', '0', '0.12')
    """
    return "n/a" if value != value else f"{value + 0.0:.{digits}g}"  # adding 0.0 turns -0 into 0


def summary_cells(values: Tensor) -> list[str]:
    """Mean, standard deviation, minimum and maximum of what applies."""
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
    """VGR of one response by segment in a line, from its mass [len(SEGMENTS), 2] and pool sizes [2]."""
    values = [f"{name} {number(float(vgr(segment(mass, name), sizes)))}" for name in SHOWN_SEGMENTS]
    return "VGR " + ", ".join(values) if bool((sizes > 0).all()) else "VGR n/a (no image)"


def rows_over_range(values: Tensor, count: int) -> list[int]:
    """Up to `count` rows from the lowest value to the highest, evenly spaced in rank: the whole range in a few."""
    order = values.argsort(stable=True)
    places = torch.linspace(0, len(order) - 1, min(count, len(order))).round().long()
    return order[places].tolist()
