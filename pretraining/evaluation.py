"""How good is a model at an embedded task? Accuracy by kind of question, greedy and sampled."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from PIL import Image

from mtrl.protocols import Generator, PromptEncoder
from mtrl.types import Prompt, Rollouts, Sampling, Task

WELL_FORMED = re.compile(r"<think>.*?</think>\s*<answer>\s*(\w+)\s*</answer>\s*", re.DOTALL)


class EvaluationQuestion(Protocol):
    """What the questions of all embedded tasks have."""

    @property
    def kind(self) -> str: ...

    @property
    def answer(self) -> str: ...

    @property
    def value(self) -> str:
        """The right answer in words."""

    @property
    def choices(self) -> Sequence[str]:
        """What an answer may be."""

    @property
    def image(self) -> Image.Image: ...

    @property
    def task(self) -> Task: ...


@dataclass(frozen=True)
class Grades:
    """Means over questions: accuracy of one answer (avg), of a question's best answer (best), right format (form)."""

    avg: float
    best: float
    form: float
    by_kind: dict[str, float]


def make_prompts(questions: Sequence[EvaluationQuestion], encoder: PromptEncoder, blank: bool = False) -> list[Prompt]:
    """The questions as prompts; `blank` makes their pictures plain grey."""
    pictures = [np.asarray(question.image) for question in questions]
    if blank:
        pictures = [np.full_like(picture, 127) for picture in pictures]
    return [encoder.encode(q.task, [picture]) for q, picture in zip(questions, pictures, strict=True)]


def grade(questions: Sequence[EvaluationQuestion], rollouts: Rollouts) -> Grades:
    groups = rollouts.group.tolist()
    answers = [graded_answer(text, questions[group]) for group, text in zip(groups, rollouts.text, strict=True)]
    right: dict[int, list[bool]] = defaultdict(list)
    for group, answer in zip(groups, answers, strict=True):
        right[group].append(answer == questions[group].answer)
    rates = torch.tensor([sum(right[g]) / len(right[g]) for g in range(len(questions))], dtype=torch.float64)
    of_kind = {kind: torch.tensor([q.kind == kind for q in questions]) for kind in question_kinds(questions)}
    return Grades(
        avg=float(rates.mean()),
        best=float((rates > 0).double().mean()),
        form=sum(answer is not None for answer in answers) / len(answers),
        by_kind={kind: float(rates[rows].mean()) for kind, rows in of_kind.items()},
    )


def graded_answer(text: str, question: EvaluationQuestion) -> str | None:
    """The answer of a response in the right format; None where it has another, or the question no such answer."""
    found = WELL_FORMED.fullmatch(text)
    return found[1] if found and found[1] in question.choices else None


def question_kinds(questions: Sequence[EvaluationQuestion]) -> list[str]:
    return list(dict.fromkeys(question.kind for question in questions))


def examine(
    generator: Generator,
    encoder: PromptEncoder,
    questions: Sequence[EvaluationQuestion],
    sampling: Sampling,
    blank: bool = False,
) -> Grades:
    return grade(questions, generator.generate(make_prompts(questions, encoder, blank), sampling))


def best_constant(questions: Sequence[EvaluationQuestion]) -> dict[str, float]:
    """By kind, the share of the commonest right letter or right value: what an answer without looking is worth."""
    best: dict[str, float] = {}
    for kind in question_kinds(questions):
        of_kind = [q for q in questions if q.kind == kind]
        answers = [[q.answer for q in of_kind], [q.value for q in of_kind]]
        best[kind] = max(max(column.count(x) for x in set(column)) for column in answers) / len(of_kind)
    return best
