"""The report of `mtrl attention`: where a model looks while it answers, in numbers and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.algorithms.signals import segment, vgr
from mtrl.report.heat_map import ImageAttention, draw_heat_maps
from mtrl.report.markdown_pages import BALANCE, SHOWN_SEGMENTS, attention_table, fenced, number, row_attention, table
from mtrl.types import VISION_POOL

LISTED = 8  # tokens listed as those that look most, and as those that look least


@dataclass(frozen=True, eq=False)
class DrawnAttention:
    """A token whose attention is drawn."""

    token: int  # its place in the response
    why: str
    images: tuple[ImageAttention, ...]


@dataclass(frozen=True, eq=False)
class Answered:
    """A response and where its tokens looked."""

    id: str
    prompt: str
    response: str
    answer: Any
    tokens: tuple[str, ...]  # the texts of n tokens
    mass: Tensor  # [n, len(SEGMENTS), 2]
    prompt_mass: Tensor  # [len(SEGMENTS), 2]
    sizes: Tensor  # [2] tokens of the text and the vision pool
    drawn: tuple[DrawnAttention, ...] = ()

    @property
    def mean_mass(self) -> Tensor:
        """The mean mass of the response [len(SEGMENTS), 2], as section 2 of the spec takes it."""
        return self.mass.mean(0)

    def token_vgr(self, name: str = "all") -> Tensor:
        """VGR of each token, [n]; NaN without an image."""
        return vgr(segment(self.mass, name), self.sizes)


def write_report(directory: Path, title: str, answers: Sequence[Answered]) -> Path:
    """Writes `report.md`, and its pictures beside it."""
    pictures = directory / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    parts = [f"# {title}", BALANCE, overview(answers)]
    for place, answer in enumerate(answers, 1):
        parts.append(sample_section(place, answer, pictures))
    report = directory / "report.md"
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return report


def overview(answers: Sequence[Answered]) -> str:
    """VGR and AEI over all responses, while reading the prompt and while answering."""
    sizes = torch.stack([answer.sizes for answer in answers])
    phases = {
        "while answering (mean over the response's tokens)": [answer.mean_mass for answer in answers],
        "while reading (mean over the prompt's tokens after the image)": [answer.prompt_mass for answer in answers],
    }
    visual = int((sizes > 0).all(1).sum())
    parts = [f"{len(answers)} responses, {visual} of them to an image."]
    for name, masses in phases.items():
        parts += [f"## Attention {name}", attention_table(torch.stack(masses), sizes)]
    return "\n\n".join(parts)


def sample_section(place: int, answer: Answered, pictures: Path) -> str:
    text, vision = answer.sizes.tolist()
    truth = "" if answer.answer is None else f" Truth: {answer.answer}."
    parts = [
        f"## Sample {place}: {answer.id}",
        fenced(answer.prompt),
        fenced(answer.response),
        f"{row_attention(answer.mean_mass, answer.sizes)}. Pools: {text} text, {vision} image tokens.{truth}",
    ]
    if vision and text:
        parts.append(token_table(answer))
    for drawn in answer.drawn:
        file = pictures / f"sample{place}_token{drawn.token}.png"
        word = answer.tokens[drawn.token]
        draw_heat_maps(
            file, f"token {drawn.token} {word!r}: {drawn.why}", list(drawn.images), attention_notes(answer, drawn)
        )
        parts.append(f"Token {drawn.token} ({drawn.why}):\n\n![attention](pictures/{file.name})")
    return "\n\n".join(parts)


def token_table(answer: Answered) -> str:
    """The tokens that look most, then those that look least; all of a short response."""
    ratio = answer.token_vgr()
    order = ratio.argsort(stable=True).tolist()
    shown = order if len(order) <= 2 * LISTED else [*order[:LISTED], *order[-LISTED:]]
    rows = [
        [token, repr(answer.tokens[token]), *(number(float(answer.token_vgr(name)[token])) for name in SHOWN_SEGMENTS)]
        for token in shown
    ]
    return table(["place", "token", *(f"VGR {name}" for name in SHOWN_SEGMENTS)], rows)


def attention_notes(answer: Answered, drawn: DrawnAttention) -> dict[str, str]:
    """For each segment: the mass on all images, and the VGR."""
    notes = {}
    for name in SHOWN_SEGMENTS:
        mass = segment(answer.mass[drawn.token], name)
        ratio = number(float(vgr(mass, answer.sizes)), digits=2)  # there is no room for more above a panel
        notes[name] = f"{float(mass[VISION_POOL - 1]):.0%} on images, VGR {ratio}"
    return notes
