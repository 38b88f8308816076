"""The embedded visual task: small pictures of coloured shapes, and multiple-choice questions about them.

    question = make_question("test", 0)
    question.image, question.prompt, question.answer   # a picture of 56 x 56 pixels, the text with options, "C"

Five kinds of questions (colour, shape, position, count, comparison) and three levels (2, 3 or 4 objects). Everything
follows from (split, index), so a split is as long as one likes and nothing needs to be stored. A layout (which shape of
which colour stands where) belongs to exactly one split: no picture of the test can be met in training.

The text alone says nothing about the answer: the four options always hold the habitual value of the kind (red, a
circle, ..), and given the options each is right with probability 1/4. So an answer without looking is worth 0.25.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw

from mtrl.types import Medium, Task

Split = Literal["train", "validation", "test"]
Kind = Literal["colour", "shape", "position", "count", "comparison"]

KINDS: tuple[Kind, ...] = ("colour", "shape", "position", "count", "comparison")
COLOURS = {
    "red": (215, 45, 45),
    "orange": (240, 145, 30),
    "yellow": (235, 220, 50),
    "green": (50, 160, 60),
    "blue": (45, 85, 215),
    "purple": (140, 60, 175),
}
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
"""What one would answer without looking."""

LETTERS = "ABCD"
IMAGE_SIDE = 56
CELL = IMAGE_SIDE // 2
TINT = 24.0  # tint of the ground, as light falls in a room: cold above, warm below, reddish left, greenish right
TEST_QUESTIONS = 1000


@dataclass(frozen=True)
class Item:
    """One coloured shape in one of the four cells."""

    place: str
    colour: str
    shape: str
    radius: int
    offset: tuple[int, int]  # how far its centre is from the cell's, in pixels


@dataclass(frozen=True)
class ZooQuestion:
    """One question about one picture. `value` is the right option in words, `answer` its letter."""

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
    def choices(self) -> tuple[str, ...]:
        """What an answer may be."""
        return tuple(LETTERS)

    @property
    def task(self) -> Task:
        return as_task(self)

    @property
    def prompt(self) -> str:
        return "\n".join(
            [self.text, *(f"{letter} {option}" for letter, option in zip(LETTERS, self.options, strict=True))]
        )

    @property
    def image(self) -> Image.Image:
        return Image.fromarray(render(self.items, noise_seed=f"{self.split}:{self.index}"))


def make_question(split: Split, index: int) -> ZooQuestion:
    """The question of a place in a split; kinds take turns."""
    kind = KINDS[index % len(KINDS)]
    rng = random.Random(f"mtrl zoo 1:{split}:{index}")
    while True:
        value = pick_value(kind, rng)
        items, text, subject = SCENES[kind](value, rng)
        if question_split(items) == split:
            return ZooQuestion(split, index, kind, items, text, subject, value, pick_options(kind, value, rng))


def as_task(question: ZooQuestion) -> Task:
    """The question as the rest of the code knows it."""
    content = [{"type": "image"}, {"type": "text", "text": question.prompt}]
    return Task(
        id=f"zoo-{question.split}:{question.index}",
        origin=f"embedded task, {question.split}, question {question.index + 1}",
        messages=({"role": "user", "content": content},),
        media=(Medium("image", question.image),),
        answer=question.answer,
        columns={"options": list(question.options), "kind": question.kind, "level": question.level},
    )


def row(question: ZooQuestion) -> dict[str, Any]:
    """The question as a dataset row with the default keys."""
    return {
        "prompt": "<image>" + question.prompt,
        "images": [question.image],
        "answer": question.answer,
        "options": list(question.options),
        "kind": question.kind,
        "level": question.level,
    }


def question_split(items: tuple[Item, ...]) -> Split:
    """A layout's one and only split: 80% train, 10% validation, 10% test."""
    layout = sorted((item.place, item.colour, item.shape) for item in items)
    bucket = hashlib.sha256(repr(layout).encode()).digest()[0]
    return "train" if bucket < 205 else "validation" if bucket < 231 else "test"


def pick_value(kind: Kind, rng: random.Random) -> str:
    """The habitual value with probability 1/4, any other equally: with `pick_options`, text alone is worth 1/4."""
    others = [value for value in VALUES[kind] if value != HABITS[kind]]
    return HABITS[kind] if rng.random() < 0.25 else rng.choice(others)


def pick_options(kind: Kind, value: str, rng: random.Random) -> tuple[str, ...]:
    """Four values in any order: the right one, the habitual one, and others."""
    options = list(dict.fromkeys([value, HABITS[kind]]))
    others = [other for other in VALUES[kind] if other not in options]
    options += rng.sample(others, 4 - len(options))
    rng.shuffle(options)
    return tuple(options)


# ------------------------------------------------------------------------------------------------------------- scenes
def ask_colour(value: str, rng: random.Random) -> tuple[tuple[Item, ...], str, str]:
    shape = rng.choice(SHAPES)
    others = [other for other in SHAPES if other != shape]
    looks = [(value, shape), *((rng.choice(list(COLOURS)), rng.choice(others)) for _ in range(rng.randint(1, 3)))]
    return place(looks, rng), f"What colour is the {shape}?", f"the {shape}"


def ask_shape(value: str, rng: random.Random) -> tuple[tuple[Item, ...], str, str]:
    colour = rng.choice(list(COLOURS))
    others = [other for other in COLOURS if other != colour]
    looks = [(colour, value), *((rng.choice(others), rng.choice(SHAPES)) for _ in range(rng.randint(1, 3)))]
    return place(looks, rng), f"What shape is the {colour} one?", f"the {colour} one"


def ask_position(value: str, rng: random.Random) -> tuple[tuple[Item, ...], str, str]:
    colour = rng.choice(list(COLOURS))
    others = [other for other in COLOURS if other != colour]
    looks = [
        (colour, rng.choice(SHAPES)),
        *((rng.choice(others), rng.choice(SHAPES)) for _ in range(rng.randint(1, 3))),
    ]
    return place(looks, rng, first=value), f"Where is the {colour} one?", f"the {colour} one"


def ask_count(value: str, rng: random.Random) -> tuple[tuple[Item, ...], str, str]:
    shape = rng.choice(SHAPES)
    others = [other for other in SHAPES if other != shape]
    counted = int(value)
    total = rng.randint(max(2, counted), 4)
    shapes = [shape] * counted + [rng.choice(others) for _ in range(total - counted)]
    looks = [(rng.choice(list(COLOURS)), each) for each in shapes]
    return place(looks, rng), f"How many {shape}s?", f"{shape}s"


def ask_comparison(value: str, rng: random.Random) -> tuple[tuple[Item, ...], str, str]:
    others = [other for other in COLOURS if other != value]
    looks = [(value, rng.choice(SHAPES)), *((rng.choice(others), rng.choice(SHAPES)) for _ in range(rng.randint(1, 3)))]
    return place(looks, rng, largest_first=True), "What colour is the largest?", "the largest"


SCENES = {
    "colour": ask_colour,
    "shape": ask_shape,
    "position": ask_position,
    "count": ask_count,
    "comparison": ask_comparison,
}


def place(
    looks: list[tuple[str, str]], rng: random.Random, first: str | None = None, largest_first: bool = False
) -> tuple[Item, ...]:
    """(colour, shape) pairs into cells of their own, the first one at `first`; sizes vary by a third, more if asked."""
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


# ---------------------------------------------------------------------------------------------------------- rendering
def render(items: tuple[Item, ...], noise_seed: str) -> np.ndarray:
    """[56, 56, 3] uint8: shapes with soft edges and slightly varying colours on a light, grainy ground."""
    seed = int.from_bytes(hashlib.sha256(noise_seed.encode()).digest()[:8], "little")
    noise = np.random.Generator(np.random.Philox(seed))
    picture = np.full((IMAGE_SIDE, IMAGE_SIDE, 3), 200 + 35 * noise.random(), dtype=np.float32)
    picture[:CELL, :, 2] += TINT
    picture[CELL:, :, 2] -= TINT
    picture[:, :CELL, 0] += TINT
    picture[:, CELL:, 0] -= TINT
    for item in items:
        corner = PLACES.index(item.place)
        top, left = CELL * (corner // 2), CELL * (corner % 2)
        cell = picture[top : top + CELL, left : left + CELL]
        colour = np.array(COLOURS[item.colour]) + (noise.random(3) - 0.5) * 24
        coverage = np.roll(stencil(item.shape, item.radius), item.offset, axis=(0, 1))
        cell += coverage[..., None] * (colour - cell)
    picture += (noise.random(picture.shape) - 0.5) * 12
    return picture.clip(0, 255).astype(np.uint8)


@lru_cache(maxsize=64)
def stencil(shape: str, radius: int) -> np.ndarray:
    """[28, 28] float32: how much of each pixel the shape covers, drawn at 8 times the size."""
    fine, centre, reach = 8, CELL * 4, radius * 8
    canvas = Image.new("L", (CELL * fine, CELL * fine))
    draw = ImageDraw.Draw(canvas)
    box = (centre - reach, centre - reach, centre + reach, centre + reach)
    if shape == "circle":
        draw.ellipse(box, fill=255)
    elif shape == "square":
        side = round(reach * 0.88)
        draw.rectangle((centre - side, centre - side, centre + side, centre + side), fill=255)
    elif shape == "triangle":
        draw.polygon([(centre, box[1]), (box[0], box[3]), (box[2], box[3])], fill=255)
    else:
        draw.polygon([(centre, box[1]), (box[2], centre), (centre, box[3]), (box[0], centre)], fill=255)
    return np.asarray(canvas.resize((CELL, CELL), Image.Resampling.BOX), dtype=np.float32) / 255
