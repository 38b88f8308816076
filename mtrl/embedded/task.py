"""The embedded visual task: small pictures of coloured shapes, and multiple-choice questions about them.

    question = make_question("test", 0)
    question.image, question.prompt, question.answer   # a picture of 56 x 56 pixels, the text with options, "C"

Five kinds of questions (colour, shape, position, count, comparison) and three levels (2, 3 or 4 objects). Everything
follows from (split, index), so a split may have any length and nothing is stored. A layout (which shape of which colour
is where) belongs to exactly one split: no picture of the test occurs in training.

The text alone says nothing about the answer: the four options always contain the habitual value of the kind (red, a
circle, ..), and given the options each is right with probability 1/4. So an answer without looking has accuracy 0.25.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

from mtrl.embedded.pictures import CELL, COLOURS, DrawnShape, render

Split = Literal["train", "validation", "test"]
Kind = Literal["colour", "shape", "position", "count", "comparison"]

KINDS: tuple[Kind, ...] = ("colour", "shape", "position", "count", "comparison")
SHAPES = ("circle", "square", "triangle", "diamond")
PLACES = ("top left", "top right", "bottom left", "bottom right")
COUNTS = ("1", "2", "3", "4")
VALUES: dict[Kind, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "position": PLACES,
    "count": COUNTS,
    "comparison": tuple(COLOURS),
}
HABITS: dict[Kind, str] = {
    "colour": "red",
    "shape": "circle",
    "position": "top left",
    "count": "2",
    "comparison": "red",
}
"""The answers of the teacher when it does not look."""

LETTERS = "ABCD"
TEST_QUESTIONS = 1000


@dataclass(frozen=True)
class Item:
    """One coloured shape in one of the four cells."""

    place: str
    colour: str
    shape: str
    radius: int
    offset: tuple[int, int]  # from the centre of the cell, in pixels


@dataclass(frozen=True)
class ZooQuestion:
    """One question about one picture. `value` is the correct option in words, `answer` its letter."""

    split: Split
    index: int
    kind: Kind
    items: tuple[Item, ...]
    text: str
    subject: str  # what the question is about: "the circle", "the red one"
    value: str
    options: tuple[str, ...]

    @property
    def level(self) -> int:
        """1 to 3: two, three or four objects."""
        return len(self.items) - 1

    @property
    def answer(self) -> str:
        return LETTERS[self.options.index(self.value)]

    @property
    def prompt(self) -> str:
        return "\n".join(
            [self.text, *(f"{letter} {option}" for letter, option in zip(LETTERS, self.options, strict=True))]
        )

    @property
    def image(self) -> Image.Image:
        """[56, 56] pixels."""
        shapes = (DrawnShape(PLACES.index(i.place), i.colour, i.shape, i.radius, i.offset) for i in self.items)
        seed = int.from_bytes(hashlib.sha256(f"{self.split}:{self.index}".encode()).digest()[:8], "little")
        noise = np.random.Generator(np.random.Philox(seed))
        return Image.fromarray(render(shapes, noise, cells_per_side=2, brightness=(200, 35)))

    @property
    def columns(self) -> dict[str, Any]:
        return {"options": list(self.options), "kind": self.kind, "level": self.level}


def make_question(split: Split, index: int) -> ZooQuestion:
    """The question at an index of a split; the kinds alternate."""
    kind = KINDS[index % len(KINDS)]
    rng = random.Random(f"mtrl zoo 1:{split}:{index}")
    while True:
        value = pick_value(kind, rng)
        items, text, subject = COMPOSERS[kind](value, rng)
        if find_split(items) == split:
            return ZooQuestion(split, index, kind, items, text, subject, value, pick_options(kind, value, rng))


def row(question: ZooQuestion) -> dict[str, Any]:
    """The question as a dataset row with the default keys."""
    shared = {"prompt": "<image>" + question.prompt, "images": [question.image], "answer": question.answer}
    return shared | question.columns


def find_split(items: tuple[Item, ...]) -> Split:
    """The only split of a picture's layout."""
    return split_of(sorted((item.place, item.colour, item.shape) for item in items))


def split_of(layout: Sequence[tuple[object, ...]]) -> Split:
    """80% of all layouts belong to train, 10% to validation, 10% to test."""
    bucket = hashlib.sha256(repr(layout).encode()).digest()[0]
    return "train" if bucket < 205 else "validation" if bucket < 231 else "test"


def pick_value(kind: Kind, rng: random.Random) -> str:
    """The habitual value with probability 1/4, else any other: with `pick_options`, the text alone gives 1/4."""
    others = [value for value in VALUES[kind] if value != HABITS[kind]]
    return HABITS[kind] if rng.random() < 0.25 else rng.choice(others)


def pick_options(kind: Kind, value: str, rng: random.Random) -> tuple[str, ...]:
    """Four values in random order: the correct one, the habitual one, and others."""
    options = list(dict.fromkeys([value, HABITS[kind]]))
    others = [other for other in VALUES[kind] if other not in options]
    options += rng.sample(others, 4 - len(options))
    rng.shuffle(options)
    return tuple(options)


# ------------------------------------------------------------------------------------------------------- compositions
Composition = tuple[tuple[Item, ...], str, str]  # the items, the text of the question, its subject


def ask_colour(value: str, rng: random.Random) -> Composition:
    shape = rng.choice(SHAPES)
    others = [other for other in SHAPES if other != shape]
    looks = [(value, shape), *((rng.choice(list(COLOURS)), rng.choice(others)) for _ in range(rng.randint(1, 3)))]
    return arrange(looks, rng), f"What colour is the {shape}?", f"the {shape}"


def ask_shape(value: str, rng: random.Random) -> Composition:
    colour = rng.choice(list(COLOURS))
    others = [other for other in COLOURS if other != colour]
    looks = [(colour, value), *((rng.choice(others), rng.choice(SHAPES)) for _ in range(rng.randint(1, 3)))]
    return arrange(looks, rng), f"What shape is the {colour} one?", f"the {colour} one"


def ask_position(value: str, rng: random.Random) -> Composition:
    colour = rng.choice(list(COLOURS))
    others = [other for other in COLOURS if other != colour]
    looks = [
        (colour, rng.choice(SHAPES)),
        *((rng.choice(others), rng.choice(SHAPES)) for _ in range(rng.randint(1, 3))),
    ]
    return arrange(looks, rng, first=value), f"Where is the {colour} one?", f"the {colour} one"


def ask_count(value: str, rng: random.Random) -> Composition:
    shape = rng.choice(SHAPES)
    others = [other for other in SHAPES if other != shape]
    counted = int(value)
    total = rng.randint(max(2, counted), 4)
    shapes = [shape] * counted + [rng.choice(others) for _ in range(total - counted)]
    looks = [(rng.choice(list(COLOURS)), each) for each in shapes]
    return arrange(looks, rng), f"How many {shape}s?", f"{shape}s"


def ask_comparison(value: str, rng: random.Random) -> Composition:
    others = [other for other in COLOURS if other != value]
    looks = [(value, rng.choice(SHAPES)), *((rng.choice(others), rng.choice(SHAPES)) for _ in range(rng.randint(1, 3)))]
    return arrange(looks, rng, largest_first=True), "What colour is the largest?", "the largest"


COMPOSERS = {
    "colour": ask_colour,
    "shape": ask_shape,
    "position": ask_position,
    "count": ask_count,
    "comparison": ask_comparison,
}


def arrange(
    looks: list[tuple[str, str]], rng: random.Random, first: str | None = None, largest_first: bool = False
) -> tuple[Item, ...]:
    """Put (colour, shape) pairs into cells, the first one at `first`; with `largest_first` it is by far the largest."""
    places = rng.sample(PLACES, len(PLACES))
    if first is not None:
        places.remove(first)
        places.insert(0, first)
    items = []
    for order, (colour, shape) in enumerate(looks):
        radius = rng.randint(8, 10)
        if largest_first:
            radius = 12 if order == 0 else rng.randint(6, 8)
        room = CELL // 2 - radius - 1
        offset = (rng.randint(-room, room), rng.randint(-room, room))
        items.append(Item(places[order], colour, shape, radius, offset))
    return tuple(items)
