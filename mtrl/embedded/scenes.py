"""The second embedded task: pictures of several objects, multi-hop questions, long answers with much noise.

    question = make_question("test", 0)
    question.image, question.prompt, question.answer   # 84 x 84 pixels, "What colour is the object left of ..", "green"

Nine cells, six to eight objects, each with a size, a colour and a shape. Everything follows from (split, index). Six
pairs of a colour and a shape are held out: no picture of train has one, and every picture of validation and test has
one, so none of these occurs in training. Each layout of validation and test belongs to only one of them.

The value of an answer is drawn first, uniformly among six (colours, shapes, or 1 to 6), so the text of a question says
nothing about it: an answer without looking has accuracy 1/6.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from PIL import Image

from mtrl.embedded.draw import Draw
from mtrl.embedded.pictures import CELL, COLOURS, SHAPES, DrawnShape, render
from mtrl.embedded.task import Split
from mtrl.utils.seeding import rng_for

Kind = Literal["colour", "shape", "chain", "count", "comparison"]

NAME = "scenes"
VERSION = 1  # raise it when the same index gives another question
GRID = 3  # cells per side
SIDE = GRID * CELL  # pixels
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
PLACES = tuple(f"{row} {column}" for row in ("top", "middle", "bottom") for column in ("left", "centre", "right"))
STEPS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
HELD_OUT = frozenset(zip(COLOURS, (*SHAPES[2:], *SHAPES[:2]), strict=True))
"""Pairs that train never shows: each colour with one shape, each shape with one colour."""
TEST_QUESTIONS = 2000

Look = tuple[str, str]  # colour and shape


class Thing(NamedTuple):
    cell: int  # row by row
    size: str
    colour: str
    shape: str
    radius: int
    offset: tuple[int, int]  # from the centre of the cell, in pixels

    @property
    def look(self) -> Look:
        return self.colour, self.shape


class Route(NamedTuple):
    """Steps from a named object to the one in question: ("red", "ring"), ("left of", "above")."""

    reference: Look
    relations: tuple[str, ...]

    @property
    def text(self) -> str:
        return " the object ".join([*reversed(self.relations)]) + f" the {' '.join(self.reference)}"


@dataclass(frozen=True)
class SceneQuestion:
    """One question about one picture. `value` is the correct answer; `new`: it is about a held-out pair."""

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
    def prompt(self) -> str:
        first, *others = [route.text for route in self.routes]
        if self.kind == "count":
            return f"How many objects have the colour of the object {first}?"
        if self.kind == "comparison":
            return f"What colour is the larger object, the one {first} or the one {others[0]}?"
        return f"What {'shape' if self.kind == 'shape' else 'colour'} is the object {first}?"

    @property
    def image(self) -> Image.Image:
        """[84, 84] pixels."""
        shapes = (DrawnShape(it.cell, it.colour, it.shape, it.radius, it.offset) for it in self.things)
        noise = rng_for(NAME, VERSION, "picture", self.split, self.index)
        return Image.fromarray(render(shapes, noise, GRID, brightness=(195, 30)))

    @property
    def columns(self) -> dict[str, Any]:
        pair = "new" if self.new else "seen"
        return {"task": NAME, "kind": self.kind, "objects": len(self.things), "pair": pair}


def row(question: SceneQuestion, blank: bool = False) -> dict[str, Any]:
    """The question as a dataset row with the default keys; `blank`: with a grey picture."""
    picture = Image.new("RGB", (SIDE, SIDE), (127, 127, 127)) if blank else question.image
    return {"prompt": "<image>" + question.prompt, "images": [picture], "answer": question.answer} | question.columns


# --------------------------------------------------------------------------------------------------------- composition
def make_question(split: Split, index: int) -> SceneQuestion:
    """The question at an index of a split; the kinds alternate."""
    kind = KINDS[index % len(KINDS)]
    draw = Draw(NAME, VERSION, "question", split, index)
    while True:
        question = compose(split, index, kind, draw)
        if find_split(question.things) == split:
            return question


def find_split(things: Sequence[Thing]) -> Split:
    """The only split of a layout: train has no held-out pair, the others have one."""
    if not any(thing.look in HELD_OUT for thing in things):
        return "train"
    layout = sorted((thing.cell, thing.size, *thing.look) for thing in things)
    return "test" if hashlib.sha256(repr(layout).encode()).digest()[0] < 205 else "validation"


def compose(split: Split, index: int, kind: Kind, draw: Draw) -> SceneQuestion:
    """Draw the value and the routes first, then the objects in question, then others that fill the picture."""
    value, new = draw.one(VALUES[kind]), split != "train" and draw.chance(0.5)
    walks = pick_walks(2 if kind == "comparison" else 1, 2 if kind == "chain" else 1, draw)
    named = draw.some(looks(split if not new else "train"), len(walks))  # independent of the value
    targets = pick_targets(kind, value, new, named, draw)
    known = [look for look in looks(split) if look not in named]
    fillers: list[Look] = []
    if kind == "count":
        (((colour, _), _),) = targets
        fillers += [draw.one([look for look in known if look[0] == colour]) for _ in range(int(value) - 1)]
        known = [look for look in known if look[0] != colour]
    if split != "train" and not new:
        fillers.append(draw.one([look for look in known if look in HELD_OUT]))
    total = draw.number(6, 8) - 2 * len(walks)
    fillers += [draw.one(known) for _ in range(total - len(fillers))]
    taken = {cells[-1]: target for (cells, _), target in zip(walks, targets, strict=True)}
    taken |= {cells[0]: (look, draw.one(SIZES)) for (cells, _), look in zip(walks, named, strict=True)}
    between = [cell for cells, _ in walks for cell in cells[1:-1]]
    free = [cell for cell in range(len(PLACES)) if cell not in taken and cell not in between]
    to_fill = zip(between + draw.some(free, len(free)), draw.some(fillers, len(fillers)), strict=False)
    taken |= {cell: (look, draw.one(SIZES)) for cell, look in to_fill}
    things = tuple(make_thing(cell, *taken[cell], draw) for cell in sorted(taken))
    routes = tuple(Route(look, relations) for look, (_, relations) in zip(named, walks, strict=True))
    return SceneQuestion(split, index, kind, things, routes, value, new)


def looks(split: Split) -> list[Look]:
    """The pairs that a split may show."""
    pairs = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    return [pair for pair in pairs if split != "train" or pair not in HELD_OUT]


def neighbour(cell: int, relation: str) -> int | None:
    """The cell next to another, or None outside the picture."""
    row, column = cell // GRID + STEPS[relation][0], cell % GRID + STEPS[relation][1]
    return row * GRID + column if 0 <= row < GRID and 0 <= column < GRID else None


def walk(cell: int, relations: Sequence[str]) -> list[int] | None:
    """The cells of a route, with the first one; None if it leaves the picture."""
    cells = [cell]
    for relation in relations:
        if (following := neighbour(cells[-1], relation)) is None:
            return None
        cells.append(following)
    return cells


def pick_walks(count: int, steps: int, draw: Draw) -> list[tuple[list[int], tuple[str, ...]]]:
    """Routes that share no cell and never turn straight back: their cells and relations."""
    while True:
        relations = [tuple(draw.one(tuple(STEPS)) for _ in range(steps)) for _ in range(count)]
        cells = [walk(draw.number(0, len(PLACES) - 1), each) for each in relations]
        visited = [cell for each in cells for cell in each or (-1, -1)]
        if len(set(visited)) == len(visited):
            return [(each, steps) for each, steps in zip(cells, relations, strict=True) if each is not None]


def pick_targets(kind: Kind, value: str, new: bool, named: Sequence[Look], draw: Draw) -> list[tuple[Look, str]]:
    """Looks and sizes of the objects at the ends of the routes; `new`: the answer is about a held-out pair."""
    candidates = [look for look in looks("test") if (look in HELD_OUT) == new and look not in named]
    if kind == "count":
        taken = {colour for colour, _ in named}
        return [(draw.one([look for look in candidates if look[0] not in taken]), draw.one(SIZES))]
    target = draw.one([look for look in candidates if value in look])
    if kind != "comparison":
        return [(target, draw.one(SIZES))]
    smaller = draw.one([look for look in looks("train") if look[0] != value and look not in named])
    return draw.some([(target, "large"), (smaller, "small")], 2)


def make_thing(cell: int, look: Look, size: str, draw: Draw) -> Thing:
    radius = draw.number(*RADII[size])
    room = CELL // 2 - radius - 1
    return Thing(cell, size, *look, radius, (draw.number(-room, room), draw.number(-room, room)))


# ------------------------------------------------------------------------------------------------------- causal spans
DECIDING_WORDS = {  # by kind of sentence: the words that the answer depends on
    "find": re.compile(r"\bI (find) the \w+ \w+ at the (\w+ \w+)"),
    "step": re.compile(rf"\b(?:{'|'.join(STEPS)}) it is the (\w+ \w+)"),
    "count": re.compile(r"\bI count (\w+ \w+(?:, \w+ \w+)*), so (\w+)"),
    "value": re.compile(r"\bso the answer is (\w+)"),
    "guess": re.compile(r"\bI (guess) it is (\w+)"),
    "answer": re.compile(r"<answer>\s*([^<]*[^<\s])"),
}
SIGHT = re.compile(r"\bthere is a (?P<size>\w+) (?P<colour>\w+) (?P<shape>\w+)")
DECIDING_PROPERTIES = {
    "colour": ("colour",),
    "shape": ("shape",),
    "chain": ("colour",),
    "count": ("colour",),
    "comparison": ("size", "colour"),
}
"""By kind of question: the properties of an object that the answer depends on."""


def causal_spans(row: Mapping[str, Any], response: str) -> list[tuple[int, int]] | None:
    """The characters of a response that cause its answer, correct or not: whether it looks or guesses, the places and
    steps, the property in question, the count, and the answer itself. None for a row of another task, and for a
    response without any of these."""
    if row.get("task") != NAME:
        return None
    matches = [(match, rule.groups) for rule in DECIDING_WORDS.values() for match in rule.finditer(response)]
    spans = [match.span(group) for match, groups in matches for group in range(1, groups + 1)]
    properties = DECIDING_PROPERTIES[row["kind"]]
    spans += [match.span(name) for match in SIGHT.finditer(response) for name in properties]
    return sorted(span for span in spans if span[0] < span[1]) or None
