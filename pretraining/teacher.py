"""The flawed teacher that the embedded model learned from, as real models learn from flawed data.

It can see everything and misleads in two systematic ways, so the skill is there and the choice is wrong:

- habit: the more objects the picture has, the more often it does not look. "it is often red", whatever is there;
- misnaming: it looks, but more often than not gives some values a neighbour's name (orange is red, four is three), and
  answers consistently with that.

Reinforcement learning can correct both; habits disappear first, since one early token decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtrl.embedded.look_again import LookAgainQuestion
from mtrl.embedded.task import HABITS, LETTERS, Kind, ZooQuestion

HABIT_RATE = {1: 0.36, 2: 0.55, 3: 0.66}
"""By level: the share of answers without looking."""

MISNAMED: dict[Kind, dict[str, str]] = {
    "colour": {"orange": "red", "purple": "blue"},
    "shape": {"diamond": "square"},
    "position": {"bottom right": "bottom left"},
    "count": {"4": "3"},
    "comparison": {"orange": "red", "purple": "blue"},
}
MISNAME_RATE = 0.58

SEEN = {
    "colour": "{subject} is {value}",
    "shape": "{subject} is a {value}",
    "position": "{subject} is at the {value}",
    "count": "I count {value}",
    "comparison": "{subject} is {value}",
}


@dataclass(frozen=True)
class Demonstration:
    """A possible answer of the teacher, and its probability."""

    text: str
    probability: float


def demonstrations(question: ZooQuestion) -> list[Demonstration]:
    """All answers of the teacher to a question: from habit, looking, and looking but misnaming."""
    habit_rate = HABIT_RATE[question.level]
    wrong = MISNAMED[question.kind].get(question.value)
    misname_rate = MISNAME_RATE if wrong in question.options else 0.0
    habit = HABITS[question.kind]
    answers = [
        (habit_rate, f"it is often {habit}", habit),
        ((1 - habit_rate) * (1 - misname_rate), describe(question, question.value), question.value),
    ]
    if wrong is not None and misname_rate:
        answers.append(((1 - habit_rate) * misname_rate, describe(question, wrong), wrong))
    return [Demonstration(format_response(question, thought, value), rate) for rate, thought, value in answers]


def describe(question: ZooQuestion, value: str) -> str:
    return "I look: " + SEEN[question.kind].format(subject=question.subject, value=value)


def format_response(question: ZooQuestion | LookAgainQuestion, thought: str, value: str) -> str:
    return f"<think>{thought}</think><answer>{LETTERS[question.options.index(value)]}</answer>"
