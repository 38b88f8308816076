"""The third embedded task: details that are too small for the first look, and a tool that shows them.

    question = make_question("test", 0)
    question.image, question.prompt, question.answer   # 112 x 112 pixels, "What pattern has the circle?" .., "C"

Each quarter of a picture has a shape with a pattern of single pixels. The model sees the picture at half its size. That
leaves the shapes, their colours and places, and takes away the patterns: each repeats a block of 2 x 2 pixels that is
as dark as it is bright along one side, so that bicubic halving leaves nothing of it. A zoom into a quarter
(`look_again_tools.py`) shows exactly the pixels of the original.

Everything follows from (split, index), and a layout belongs to one split. The pattern in question is drawn uniformly
from four, which are the options: an answer without a second look has accuracy 1/4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from mtrl.embedded.draw import Draw
from mtrl.embedded.pictures import CELL, COLOURS, DrawnShape, render, stencil
from mtrl.embedded.task import LETTERS, PLACES, SHAPES, Split, split_of
from mtrl.utils.seeding import rng_for

Kind = Literal["shape", "colour"]

NAME = "lookagain"
VERSION = 1  # raise it when the same index gives another question
KINDS: tuple[Kind, ...] = ("shape", "colour")  # how a question names what it is about
PATTERNS = ("plain", "rows", "columns", "checks")
CONTRASTS = {1: 40, 2: 32, 3: 24}  # by level: how much brighter and darker than the shape a pattern is
HALF = 2 * CELL  # side of the picture as the model sees it, and of a quarter of the original, in pixels
SIDE = 2 * HALF
MARGIN = 44  # no pixel is darker, or brighter than 255 - MARGIN, before the pattern: none is clipped after it
EDGE = 2  # pixels at the first look between the edge of a shape and its pattern: an abrupt end could be seen there
TEST_QUESTIONS = 1000
SIGNS = np.array([1.0, -1.0])
WAVES = {
    "plain": np.zeros((2, 2)),
    "rows": np.repeat(SIGNS[:, None], 2, axis=1),
    "columns": np.repeat(SIGNS[None], 2, axis=0),
    "checks": np.outer(SIGNS, SIGNS),
}
"""A block of 2 x 2 pixels of each pattern."""


class Thing(NamedTuple):
    drawn: DrawnShape
    pattern: str

    @property
    def place(self) -> str:
        return PLACES[self.drawn.cell]


@dataclass(frozen=True)
class LookAgainQuestion:
    """One question about one picture. `value` is the correct option in words, `answer` its letter."""

    split: Split
    index: int
    kind: Kind
    level: int
    things: tuple[Thing, ...]  # by quarter, row by row
    asked: Thing
    options: tuple[str, ...]

    @property
    def value(self) -> str:
        return self.asked.pattern

    @property
    def answer(self) -> str:
        return LETTERS[self.options.index(self.value)]

    @property
    def subject(self) -> str:
        return f"the {self.asked.drawn.shape}" if self.kind == "shape" else f"the {self.asked.drawn.colour} one"

    @property
    def prompt(self) -> str:
        options = (f"{letter} {option}" for letter, option in zip(LETTERS, self.options, strict=True))
        return "\n".join([f"What pattern has {self.subject}?", *options])

    @cached_property
    def image(self) -> Image.Image:
        """[112, 112] pixels."""
        noise = rng_for(NAME, VERSION, "picture", self.split, self.index)
        half = render((thing.drawn for thing in self.things), noise, cells_per_side=2, brightness=(200, 35))
        return Image.fromarray(add_patterns(half, self.things, CONTRASTS[self.level]))

    @property
    def columns(self) -> dict[str, Any]:
        return {"options": list(self.options), "kind": self.kind, "level": self.level}


def make_question(split: Split, index: int) -> LookAgainQuestion:
    """The question at an index of a split; kinds and levels alternate."""
    draw = Draw(NAME, VERSION, "question", split, index)
    while True:
        things = arrange(draw)
        if split_of([(each.place, each.drawn.colour, each.drawn.shape, each.pattern) for each in things]) == split:
            break
    kind, level = KINDS[index % 2], 1 + index // 2 % len(CONTRASTS)
    asked, options = draw.one(things), draw.some(PATTERNS, len(PATTERNS))
    return LookAgainQuestion(split, index, kind, level, things, asked, tuple(options))


def arrange(draw: Draw) -> tuple[Thing, ...]:
    """All shapes in four colours, each once, with patterns that may be equal."""
    shapes, colours = draw.some(SHAPES, len(PLACES)), draw.some(tuple(COLOURS), len(PLACES))
    things = []
    for cell, (shape, colour) in enumerate(zip(shapes, colours, strict=True)):
        radius = draw.number(10, 12)
        room = CELL // 2 - radius - 1
        offset = (draw.number(-room, room), draw.number(-room, room))
        things.append(Thing(DrawnShape(cell, colour, shape, radius, offset), draw.one(PATTERNS)))
    return tuple(things)


def add_patterns(half: np.ndarray, things: tuple[Thing, ...], contrast: int) -> np.ndarray:
    """The picture at twice its size, with patterns inside the shapes. Only whole numbers are added to equal blocks, so
    that rounding leaves no trace of a pattern."""
    picture = np.rint(MARGIN + half * (1 - 2 * MARGIN / 255)).repeat(2, axis=0).repeat(2, axis=1)
    for place, (drawn, pattern) in enumerate(things):
        inside = np.roll(stencil(drawn.shape, drawn.radius - EDGE), drawn.offset, axis=(0, 1))
        strength = np.asarray(Image.fromarray(inside).resize((HALF, HALF), Image.Resampling.BILINEAR))
        wave = contrast * strength * np.tile(WAVES[pattern], (CELL, CELL))
        top, left = HALF * (place // 2), HALF * (place % 2)
        picture[top : top + HALF, left : left + HALF] += np.rint(wave)[..., None]
    return picture.astype(np.uint8)


def row(question: LookAgainQuestion, blank: bool = False) -> dict[str, Any]:
    """The question as a dataset row with the default keys; `blank`: its zooms show nothing."""
    shared = {"prompt": "<image>" + question.prompt, "images": [question.image], "answer": question.answer}
    return shared | question.columns | {"environment": "blank" if blank else "sharp"}
