"""The flawed teacher of `scenes`: its answers reason aloud, digress, and mislead in systematic ways.

A few sentences (`SENTENCES`) decide the answer, in their order. The others are noise: sentences about nothing,
and remarks about objects that are not in question. Reinforcement learning can correct its flaws:

- guessing: it does not look, "I guess it is red", whatever is there;
- turning round: asked for what is left of something, or above it, it goes to the other side, if it can;
- misnaming: it calls orange red and purple blue, a diamond a square and a ring a circle;
- miscounting: of three or more it leaves the last one out.

After a flaw it continues and answers consistently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mtrl.embedded.draw import Draw
from mtrl.embedded.scenes import (
    COLOURS,
    KINDS,
    NAME,
    PLACES,
    SHAPES,
    SIZES,
    VERSION,
    Kind,
    Route,
    SceneQuestion,
    Thing,
    make_question,
    walk,
)
from pretraining.teacher import Demonstration

DEMONSTRATIONS = 3  # per question, drawn independently

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
SENTENCES = {  # that decide the answer; `scenes.DECIDING_WORDS` finds them
    "find": "I find the {look} at the {place}.",
    "step": "{relation} it is the {place}.",
    "sight": "there is a {size} {look}.",
    "count": "I count {places}, so {count}.",
    "value": "so the answer is {value}.",
    "guess": "I guess it is {value}.",
}

GUESS_RATE: dict[Kind, float] = {"colour": 0.3, "shape": 0.3, "chain": 0.25, "count": 0.25, "comparison": 0.25}
HABITS: dict[Kind, str] = {"colour": "red", "shape": "circle", "chain": "red", "count": "2", "comparison": "red"}
TURNED = ("left of", "above")
TURN_RATE = 0.6
MISNAMED = {"orange": "red", "purple": "blue", "diamond": "square", "ring": "circle"}
MISNAME_RATE = 0.58
MISCOUNT_RATE = 0.55

LENGTH = (88, 165)  # words and marks of an answer before the sentence that completes it
REMARKS = (1, 3)  # objects that are mentioned without being in question
REMARK = "besides, a {size} {look} is at the {place}."
NOISE = (
    ("well", "hmm", "okay", "now", "still", "indeed", "anyway", "then"),
    ("this", "that", "everything", "nothing", "the rest", "the light", "the scene", "my view"),
    ("is", "seems", "looks", "feels", "stays", "remains"),
    ("rather", "quite", "very", "almost", "fairly", "truly"),
    ("fine", "plain", "quiet", "simple", "strange", "clear", "soft", "calm", "bright", "odd"),
)


def demonstrations(question: SceneQuestion) -> list[Demonstration]:
    """Some answers of the teacher, each drawn from its own key."""
    draws = [Draw(NAME, VERSION, "teacher", question.split, question.index, number) for number in range(DEMONSTRATIONS)]
    return [Demonstration(write_answer(question, draw), 1 / DEMONSTRATIONS) for draw in draws]


def write_answer(question: SceneQuestion, draw: Draw) -> str:
    if draw.chance(GUESS_RATE[question.kind]):
        value = HABITS[question.kind]
        decisive = [SENTENCES["guess"].format(value=value)]
    else:
        decisive, value = look(question, draw)
    return f"<think>{' '.join(add_noise(decisive, question.things, draw))}</think><answer>{value}</answer>"


# --------------------------------------------------------------------------------------------------- decisive sentences
def look(question: SceneQuestion, draw: Draw) -> tuple[list[str], str]:
    """The sentences that lead to an answer, and the answer."""
    decisive: list[str] = []
    seen: list[tuple[Thing, str, str]] = []  # an object, its colour and shape as they are named
    for route in question.routes:
        sentences, thing = follow(route, question.things, draw)
        colour, shape = (name(word, draw) for word in thing.look)
        seen.append((thing, colour, shape))
        decisive += [*sentences, SENTENCES["sight"].format(size=thing.size, look=f"{colour} {shape}")]
    thing, colour, shape = seen[0]
    if question.kind == "shape":
        value = shape
    elif question.kind == "count":
        sentence, value = count(thing, colour, question.things, draw)
        decisive.append(sentence)
    elif question.kind == "comparison":
        value = max(seen, key=lambda it: it[0].size == "large")[1]
    else:
        value = colour
    return [*decisive, SENTENCES["value"].format(value=value)], value


def follow(route: Route, things: Sequence[Thing], draw: Draw) -> tuple[list[str], Thing]:
    """Follow the route step by step, sometimes in the wrong direction if there are objects."""
    filled = {thing.cell: thing for thing in things}
    (start,) = [thing for thing in things if thing.look == route.reference]
    turns = [relation in TURNED and draw.chance(TURN_RATE) for relation in route.relations]
    taken = [OPPOSITE[r] if turned else r for r, turned in zip(route.relations, turns, strict=True)]
    cells = walk(start.cell, taken)
    if cells is None or len(set(cells)) < len(cells) or not all(cell in filled for cell in cells):
        cells = walk(start.cell, route.relations)
    assert cells is not None, "a question's own route stays in the picture"
    sentences = [SENTENCES["find"].format(look=" ".join(route.reference), place=PLACES[start.cell])]
    for relation, cell in zip(route.relations, cells[1:], strict=True):
        sentences.append(SENTENCES["step"].format(relation=relation, place=PLACES[cell]))
    return sentences, filled[cells[-1]]


def name(word: str, draw: Draw) -> str:
    return MISNAMED[word] if word in MISNAMED and draw.chance(MISNAME_RATE) else word


def count(thing: Thing, colour: str, things: Sequence[Thing], draw: Draw) -> tuple[str, str]:
    """Count the objects of a colour, and the one at which it was seen."""
    cells = [each.cell for each in things if each.colour == colour or each.cell == thing.cell]
    if len(cells) > 2 and draw.chance(MISCOUNT_RATE):
        cells.pop()
    listed = ", ".join(PLACES[cell] for cell in cells[:6])
    return SENTENCES["count"].format(places=listed, count=len(cells[:6])), str(len(cells[:6]))


# ---------------------------------------------------------------------------------------------------------------- noise
def add_noise(decisive: Sequence[str], things: Sequence[Thing], draw: Draw) -> list[str]:
    """The sentences in their order, with noise before, between and after them."""
    noise = [remark(thing) for thing in draw.some(things, draw.number(*REMARKS))]
    remaining = draw.number(*LENGTH) - sum(map(length, [*decisive, *noise]))
    while remaining > 0:
        noise.append(aside(draw))
        remaining -= length(noise[-1])
    gaps: list[list[str]] = [[] for _ in range(len(decisive) + 1)]
    for sentence in draw.some(noise, len(noise)):
        draw.one(gaps).append(sentence)
    return [*gaps[0], *(s for sentence, gap in zip(decisive, gaps[1:], strict=True) for s in (sentence, *gap))]


def remark(thing: Thing) -> str:
    return REMARK.format(size=thing.size, look=" ".join(thing.look), place=PLACES[thing.cell])


def aside(draw: Draw) -> str:
    opening, *rest = (draw.one(words) for words in NOISE)
    return f"{opening}, {' '.join(rest)}."


def length(text: str) -> int:
    """The number of words and marks, each of which is a token."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def vocabulary_text() -> str:
    """Every word of questions and answers, for the tokenizer: after a space, and at the start of a line or tag."""
    sentences = [*SENTENCES.values(), REMARK, *PLACES, *SIZES, *COLOURS, *SHAPES, *OPPOSITE]
    sentences += [word for words in NOISE for word in words]
    sentences += [make_question("train", index).prompt for index in range(len(KINDS))]
    words = {word for text in sentences for word in re.findall(r"[A-Za-z]+", re.sub(r"{\w+}", " ", text))}
    spaced = " ".join([*sorted(words), "You are a helpful assistant. system user assistant"])
    firsts = [*NOISE[0], "besides", "I", *COLOURS, *SHAPES, "What", "How", "You", "system", "user", "assistant"]
    return "\n".join([spaced, *firsts])
