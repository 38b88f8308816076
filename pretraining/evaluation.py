"""Evaluation of a model on an embedded task: accuracy by kind of question."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mtrl.data.media import decode, read_size
from mtrl.embedded import look_again, scenes
from mtrl.embedded.look_again import LookAgainQuestion
from mtrl.embedded.scenes import SceneQuestion
from mtrl.embedded.task import LETTERS, ZooQuestion
from mtrl.protocols import Generator, PromptEncoder
from mtrl.types import Medium, Prompt, Rollouts, Sampling, Task

WELL_FORMED = re.compile(r"<think>.*?</think>\s*<answer>\s*(\w+)\s*</answer>\s*", re.DOTALL)
Question = ZooQuestion | SceneQuestion | LookAgainQuestion
NAMES: dict[type[Question], str] = {ZooQuestion: "zoo", SceneQuestion: scenes.NAME, LookAgainQuestion: look_again.NAME}
CHANCE = 1 / 6  # accuracy of an answer to `scenes` without looking


@dataclass(frozen=True)
class Grades:
    """Means over questions: accuracy of one answer (avg), of a question's best answer (best), correct format (form)."""

    avg: float
    best: float
    form: float
    by_kind: dict[str, float]


def make_task(question: Question) -> Task:
    name = NAMES[type(question)]
    return Task(
        id=f"{name}-{question.split}:{question.index}",
        origin=f"{name}, {question.split}, question {question.index + 1}",
        messages=({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question.prompt}]},),
        media=(Medium("image", question.image),),
        answer=question.answer,
        columns=question.columns,
    )


def make_prompts(questions: Sequence[Question], encoder: PromptEncoder, blank: bool = False) -> list[Prompt]:
    """The questions as prompts, with pictures in the size of the model; `blank` makes them plain grey."""
    tasks = [make_task(question) for question in questions]
    pictures = [decode(task.media[0], encoder.target_size(*read_size(task.media[0]))) for task in tasks]
    if blank:
        pictures = [np.full_like(picture, 127) for picture in pictures]
    return [encoder.encode(task, [picture]) for task, picture in zip(tasks, pictures, strict=True)]


def grade(questions: Sequence[Question], rollouts: Rollouts) -> Grades:
    groups = rollouts.group.tolist()
    answers = [parse_answer(text, questions[group]) for group, text in zip(groups, rollouts.text, strict=True)]
    correct: dict[int, list[bool]] = defaultdict(list)
    for group, answer in zip(groups, answers, strict=True):
        correct[group].append(answer == questions[group].answer)
    rates = torch.tensor([sum(correct[g]) / len(correct[g]) for g in range(len(questions))], dtype=torch.float64)
    is_kind = {kind: torch.tensor([q.kind == kind for q in questions]) for kind in list_kinds(questions)}
    return Grades(
        avg=float(rates.mean()),
        best=float((rates > 0).double().mean()),
        form=sum(answer is not None for answer in answers) / len(answers),
        by_kind={kind: float(rates[rows].mean()) for kind, rows in is_kind.items()},
    )


def parse_answer(text: str, question: Question) -> str | None:
    """The answer of a response; None if its format is wrong or the answer is none of the possible ones."""
    match = WELL_FORMED.fullmatch(text)
    choices = scenes.VALUES[question.kind] if isinstance(question, SceneQuestion) else tuple(LETTERS)
    return match[1] if match and match[1] in choices else None


def list_kinds(questions: Sequence[Question]) -> list[str]:
    return list(dict.fromkeys(question.kind for question in questions))


def evaluate(
    generator: Generator,
    encoder: PromptEncoder,
    questions: Sequence[Question],
    sampling: Sampling,
    blank: bool = False,
) -> Grades:
    return grade(questions, generator.generate(make_prompts(questions, encoder, blank), sampling))


def best_constant(questions: Sequence[Question]) -> dict[str, float]:
    """By kind, the share of the most common correct letter or value: the accuracy of a constant answer."""
    best: dict[str, float] = {}
    for kind in list_kinds(questions):
        answers = [q.answer for q in questions if q.kind == kind]
        values = [q.value for q in questions if q.kind == kind]
        best[kind] = max(Counter(column).most_common(1)[0][1] for column in (answers, values)) / len(answers)
    return best
