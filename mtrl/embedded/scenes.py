"""The second embedded task: pictures of several objects, questions of several hops, long answers with much noise.

    question = make_question("test", 0)
    question.image, question.prompt, question.answer   # 84 x 84 pixels, "What colour is the object left of ..", "green"

Nine places, six to eight objects, each with a size, a colour and a shape. Everything follows from (split, index). Six
pairs of a colour and a shape are in no picture of train and in every one of validation and test, so that no picture of
theirs can be met in training; a layout belongs to one of the two.

The value of an answer is drawn before all else, evenly among six (colours, shapes, or 1 to 6), so that the text of a
question says nothing of it: an answer without looking is worth 1/6.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from PIL import Image

from mtrl.embedded.scene_pictures import CELL, COLOURS, GRID, SHAPES, DrawnShape, render
from mtrl.embedded.task import Split
from mtrl.types import Medium, Task
from mtrl.utils.seeding import rng_for

Kind = Literal["colour", "shape", "chain", "count", "comparison"]
Choice = TypeVar("Choice")

NAME = "scenes"
VERSION = 1  # raise it when the same index gives another question
KINDS: tuple[Kind, ...] = ("colour", "shape", "chain", "count", "comparison")
SIZES = ("small", "large")
RADII = {"small": (5, 6), "large": (10, 12)}
COUNTS = ("1", "2", "3", "4", "5", "6")
VALUES: dict[Kind, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "chain": tuple(COLOURS),
    "count": COUNTS,
    "comparison": tuple(COLOURS),
}
CHANCE = 1 / 6
PLACES = tuple(f"{row} {column}" for row in ("top", "middle", "bottom") for column in ("left", "centre", "right"))
STEPS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
HELD_OUT = frozenset(zip(COLOURS, (*SHAPES[2:], *SHAPES[:2]), strict=True))
"""Each colour with one shape, each shape with one colour: pairs that train never shows."""
TEST_QUESTIONS = 2000

Look = tuple[str, str]  # colour and shape


class Thing(NamedTuple):
    """One object. Its place is the number of its cell, row by row."""

    cell: int
    size: str
    colour: str
    shape: str
    radius: int
    offset: tuple[int, int]  # how far its centre is from the cell's, in pixels

    @property
    def look(self) -> Look:
        return self.colour, self.shape

    @property
    def place(self) -> str:
        return PLACES[self.cell]


class Route(NamedTuple):
    """From an object that is named to the one that is meant: ("red", "ring"), ("left of", "above")."""

    reference: Look
    relations: tuple[str, ...]

    @property
    def words(self) -> str:
        return " the object ".join([*reversed(self.relations)]) + f" the {' '.join(self.reference)}"


@dataclass(frozen=True)
class SceneQuestion:
    """One question about one picture. `value` is the right answer; `new`: it is about a pair that train lacks."""

    split: Split
    index: int
    kind: Kind
    things: tuple[Thing, ...]
    routes: tuple[Route, ...]
    value: str
    new: bool

    @property
    def answer(self) -> str:
        return self.value

    @property
    def choices(self) -> tuple[str, ...]:
        """What an answer may be."""
        return VALUES[self.kind]

    @property
    def prompt(self) -> str:
        ways = [route.words for route in self.routes]
        if self.kind == "count":
            return f"How many objects have the colour of the object {ways[0]}?"
        if self.kind == "comparison":
            return f"What colour is the larger object, the one {ways[0]} or the one {ways[1]}?"
        return f"What {'shape' if self.kind == 'shape' else 'colour'} is the object {ways[0]}?"

    @property
    def image(self) -> Image.Image:
        shown = [DrawnShape(it.cell, COLOURS[it.colour], it.shape, it.radius, it.offset) for it in self.things]
        return Image.fromarray(render(shown, rng_for(NAME, VERSION, "picture", self.split, self.index)))

    @property
    def columns(self) -> dict[str, Any]:
        told = {"kind": self.kind, "objects": len(self.things), "pair": "new" if self.new else "seen"}
        return {"task": NAME, **told}

    @property
    def task(self) -> Task:
        """The question as the rest of the code knows it."""
        return Task(
            id=f"{NAME}-{self.split}:{self.index}",
            origin=f"{NAME}, {self.split}, question {self.index + 1}",
            messages=({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": self.prompt}]},),
            media=(Medium("image", self.image),),
            answer=self.answer,
            columns=self.columns,
        )


def row(question: SceneQuestion, blank: bool = False) -> dict[str, Any]:
    """The question as a dataset row with the default keys; `blank` leaves nothing to see."""
    picture = Image.new("RGB", (GRID * CELL, GRID * CELL), (127, 127, 127)) if blank else question.image
    return {"prompt": "<image>" + question.prompt, "images": [picture], "answer": question.answer} | question.columns


# --------------------------------------------------------------------------------------------------------- composition
class Draw:
    """Draws by a key."""

    def __init__(self, *key: int | str) -> None:
        self.rng = rng_for(NAME, VERSION, *key)

    def one(self, options: Sequence[Choice]) -> Choice:
        return options[int(self.rng.integers(len(options)))]

    def some(self, options: Sequence[Choice], count: int) -> list[Choice]:
        return [options[place] for place in self.rng.permutation(len(options))[:count].tolist()]

    def number(self, low: int, high: int) -> int:
        """Both ends are possible."""
        return int(self.rng.integers(low, high + 1))

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)


def make_question(split: Split, index: int) -> SceneQuestion:
    """The question of a place in a split; kinds take turns."""
    kind = KINDS[index % len(KINDS)]
    draw = Draw("question", split, index)
    while True:
        question = compose(split, index, kind, draw)
        if scene_split(question.things) == split:
            return question


def scene_split(things: Sequence[Thing]) -> Split:
    """A layout's one and only split: train has no pair that is held out, the others have."""
    if not any(thing.look in HELD_OUT for thing in things):
        return "train"
    layout = sorted((thing.cell, thing.size, *thing.look) for thing in things)
    return "test" if hashlib.sha256(repr(layout).encode()).digest()[0] < 205 else "validation"


def compose(split: Split, index: int, kind: Kind, draw: Draw) -> SceneQuestion:
    """The value and the way to it first, then the objects that are meant, then others that fill the picture."""
    value, new = draw.one(VALUES[kind]), split != "train" and draw.chance(0.5)
    walks = pick_walks(2 if kind == "comparison" else 1, 2 if kind == "chain" else 1, draw)
    named = draw.some(looks(split if not new else "train"), len(walks))  # drawn without regard to the value
    meant = pick_meant(kind, value, new, named, draw)
    known = [look for look in looks(split) if look not in named]
    more: list[Look] = []
    if kind == "count":
        (((colour, _), _),) = meant
        more += [draw.one([look for look in known if look[0] == colour]) for _ in range(int(value) - 1)]
        known = [look for look in known if look[0] != colour]
    if split != "train" and not new:
        more.append(draw.one([look for look in known if look in HELD_OUT]))
    total = draw.number(6, 8) - 2 * len(walks)
    more += [draw.one(known) for _ in range(total - len(more))]
    taken = {cells[-1]: it for (cells, _), it in zip(walks, meant, strict=True)}
    taken |= {cells[0]: (look, draw.one(SIZES)) for (cells, _), look in zip(walks, named, strict=True)}
    between = [cell for cells, _ in walks for cell in cells[1:-1]]
    free = [cell for cell in range(len(PLACES)) if cell not in taken and cell not in between]
    waiting = between + draw.some(free, len(free))
    taken |= {cell: (look, draw.one(SIZES)) for cell, look in zip(waiting, draw.some(more, len(more)), strict=False)}
    things = tuple(thing_at(cell, *taken[cell], draw) for cell in sorted(taken))
    routes = tuple(Route(look, relations) for look, (_, relations) in zip(named, walks, strict=True))
    return SceneQuestion(split, index, kind, things, routes, value, new)


def looks(split: Split) -> list[Look]:
    """The pairs that a split may show."""
    pairs = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    return [pair for pair in pairs if split != "train" or pair not in HELD_OUT]


def neighbour(cell: int, relation: str) -> int | None:
    """The cell beside another, where the picture has one."""
    row, column = cell // GRID + STEPS[relation][0], cell % GRID + STEPS[relation][1]
    return row * GRID + column if 0 <= row < GRID and 0 <= column < GRID else None


def walk(cell: int, relations: Sequence[str]) -> list[int] | None:
    """The cells that one comes through, the first one with them; None where the picture ends."""
    cells = [cell]
    for relation in relations:
        if (beside := neighbour(cells[-1], relation)) is None:
            return None
        cells.append(beside)
    return cells


def pick_walks(count: int, steps: int, draw: Draw) -> list[tuple[list[int], tuple[str, ...]]]:
    """Ways through cells of their own, none straight back, with their relations."""
    while True:
        relations = [tuple(draw.one(tuple(STEPS)) for _ in range(steps)) for _ in range(count)]
        cells = [walk(draw.number(0, len(PLACES) - 1), each) for each in relations]
        visited = [cell for each in cells for cell in each or (-1, -1)]
        if len(set(visited)) == len(visited):
            return [(each, way) for each, way in zip(cells, relations, strict=True) if each is not None]


def pick_meant(kind: Kind, value: str, new: bool, named: Sequence[Look], draw: Draw) -> list[tuple[Look, str]]:
    """Looks and sizes of the objects that the routes lead to; `new`: what the answer is about is of a held-out pair."""
    fitting = [look for look in looks("test") if (look in HELD_OUT) == new and look not in named]
    if kind == "count":
        taken = {colour for colour, _ in named}
        return [(draw.one([look for look in fitting if look[0] not in taken]), draw.one(SIZES))]
    it = draw.one([look for look in fitting if value in look])
    if kind != "comparison":
        return [(it, draw.one(SIZES))]
    smaller = draw.one([look for look in looks("train") if look[0] != value and look not in named])
    return draw.some([(it, "large"), (smaller, "small")], 2)


def thing_at(cell: int, look: Look, size: str, draw: Draw) -> Thing:
    radius = draw.number(*RADII[size])
    room = CELL // 2 - radius - 1
    return Thing(cell, size, *look, radius, (draw.number(-room, room), draw.number(-room, room)))


# ------------------------------------------------------------------------------------------------------- causal spans
SENTENCES = {  # what the teacher says of what decides; all else that it says is noise
    "find": "I find the {look} at the {place}.",
    "step": "{relation} it is the {place}.",
    "sight": "there is a {size} {look}.",
    "count": "I count {places}, so {count}.",
    "value": "so the answer is {value}.",
    "guess": "I guess it is {value}.",
}
DECIDES = {  # by kind of question: which words of a sentence the answer hangs on
    "find": re.compile(r"\bI (find) the \w+ \w+ at the (\w+ \w+)"),
    "step": re.compile(rf"\b(?:{'|'.join(STEPS)}) it is the (\w+ \w+)"),
    "count": re.compile(r"\bI count (\w+ \w+(?:, \w+ \w+)*), so (\w+)"),
    "value": re.compile(r"\bso the answer is (\w+)"),
    "guess": re.compile(r"\bI (guess) it is (\w+)"),
    "answer": re.compile(r"<answer>\s*([^<]*[^<\s])"),
}
SIGHT = re.compile(r"\bthere is a (?P<size>\w+) (?P<colour>\w+) (?P<shape>\w+)")
SEEN = {
    "colour": ("colour",),
    "shape": ("shape",),
    "chain": ("colour",),
    "count": ("colour",),
    "comparison": ("size", "colour"),
}
"""What of an object's look the answer to a question hangs on."""


def causal_spans(row: Mapping[str, Any], response: str) -> list[tuple[int, int]] | None:
    """The characters of a response that cause its answer, right or wrong: whether it looks or guesses, places, steps,
    what of a look was asked for, the count, and the answer itself. None for a row of another task, and for a response
    that says nothing of the kind."""
    if row.get("task") != NAME:
        return None
    found = [match.span(group) for rule in DECIDES.values() for match in rule.finditer(response)
             for group in range(1, rule.groups + 1)]  # fmt: skip
    found += [match.span(group) for match in SIGHT.finditer(response) for group in SEEN[row["kind"]]]
    return sorted(span for span in found if span[0] < span[1]) or None
