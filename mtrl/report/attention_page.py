"""The report of `mtrl attention`: where a model looks while it answers, as tables and heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.algorithms.signals import segment, vgr
from mtrl.report.attention_tables import BALANCE, SHOWN_SEGMENTS, attention_table, row_attention
from mtrl.report.heat_map import ImageAttention, draw_heat_maps
from mtrl.report.markdown_text import fenced, number, table
from mtrl.types import VISION_POOL

LISTED = 8  # tokens listed with the lowest VGR, and as many with the highest


@dataclass(frozen=True, eq=False)
class DrawnAttention:
    """A token whose attention is drawn."""

    token: int  # its index in the response
    why: str
    images: tuple[ImageAttention, ...]


@dataclass(frozen=True, eq=False)
class AttentionSample:
    """A response with the attention of its tokens."""

    id: str
    prompt: str
    response: str
    answer: Any
    tokens: tuple[str, ...]  # the texts of n tokens
    mass: Tensor  # [n, len(SEGMENTS), 2]
    prompt_mass: Tensor  # [len(SEGMENTS), 2]
    sizes: Tensor  # [2] tokens of the text and the vision pool
    kinds: frozenset[str] = frozenset()  # of the prompt's media: image, video
    drawn: tuple[DrawnAttention, ...] = ()

    @property
    def mean_mass(self) -> Tensor:
        """The mean mass of the response [len(SEGMENTS), 2], as in section 2 of the spec."""
        return self.mass.mean(0)

    def token_vgr(self, name: str = "all") -> Tensor:
        """The VGR of each token, [n]; NaN without an image."""
        return vgr(segment(self.mass, name), self.sizes)


def write_report(directory: Path, title: str, samples: Sequence[AttentionSample]) -> Path:
    """Write `report.md` and its pictures to the directory."""
    pictures = directory / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    sections = [make_section(index, sample, pictures) for index, sample in enumerate(samples, 1)]
    parts = [f"# {title}", BALANCE, make_overview(samples), *sections]
    report = directory / "report.md"
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return report


def make_overview(samples: Sequence[AttentionSample]) -> str:
    """VGR and AEI over all responses, while answering and while reading the prompt."""
    sizes = torch.stack([sample.sizes for sample in samples])
    phases = {
        "while answering (mean over the response's tokens)": [sample.mean_mass for sample in samples],
        "while reading (mean over the prompt's tokens after the image)": [sample.prompt_mass for sample in samples],
    }
    counts = {name: sum(name in sample.kinds for sample in samples) for name in ("image", "video")}
    parts = [", ".join([f"{len(samples)} responses", *(f"{n} with {name}s" for name, n in counts.items() if n)]) + "."]
    for name, masses in phases.items():
        parts += [f"## Attention {name}", attention_table(torch.stack(masses), sizes)]
    return "\n\n".join(parts)


def make_section(index: int, sample: AttentionSample, pictures: Path) -> str:
    text, vision = sample.sizes.tolist()
    truth = "" if sample.answer is None else f" Truth: {sample.answer}."
    parts = [
        f"## Sample {index}: {sample.id}",
        fenced(sample.prompt),
        fenced(sample.response),
        f"{row_attention(sample.mean_mass, sample.sizes)}. Pools: {text} text, {vision} vision tokens.{truth}",
    ]
    if vision and text:
        parts.append(token_table(sample))
    for drawn in sample.drawn:
        file = pictures / f"sample{index}_token{drawn.token}.png"
        title = f"token {drawn.token} {sample.tokens[drawn.token]!r}: {drawn.why}"
        draw_heat_maps(file, title, drawn.images, panel_notes(sample, drawn))
        parts.append(f"Token {drawn.token} ({drawn.why}):\n\n![attention](pictures/{file.name})")
    return "\n\n".join(parts)


def token_table(sample: AttentionSample) -> str:
    """The tokens with the lowest and the highest VGR; all tokens of a short response."""
    order = sample.token_vgr().argsort(stable=True).tolist()
    listed = order if len(order) <= 2 * LISTED else [*order[:LISTED], *order[-LISTED:]]
    rows = [
        [token, repr(sample.tokens[token]), *(number(float(sample.token_vgr(name)[token])) for name in SHOWN_SEGMENTS)]
        for token in listed
    ]
    return table(["index", "token", *(f"VGR {name}" for name in SHOWN_SEGMENTS)], rows)


def panel_notes(sample: AttentionSample, drawn: DrawnAttention) -> dict[str, str]:
    """For each segment the attention mass on all images and the VGR."""
    notes = {}
    for name in SHOWN_SEGMENTS:
        mass = segment(sample.mass[drawn.token], name)
        ratio = number(float(vgr(mass, sample.sizes)), digits=2)  # there is no room for more above a panel
        notes[name] = f"{float(mass[VISION_POOL - 1]):.0%} on images, VGR {ratio}"
    return notes
