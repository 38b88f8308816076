"""How good is a model at the embedded task? Accuracy by kind of question, greedy and sampled."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mtrl.protocols import Generator, PromptEncoder
from mtrl.types import Prompt, Rollouts, Sampling
from mtrl.zoo.task import KINDS, Question, as_task

WELL_FORMED = re.compile(r"<think>.*?</think>\s*<answer>\s*([A-D])\s*</answer>\s*", re.DOTALL)


@dataclass(frozen=True)
class Grades:
    """Means over questions: accuracy of one answer (avg), of a question's best answer (best), right format (form)."""

    avg: float
    best: float
    form: float
    by_kind: dict[str, float]


def prompts_of(questions: Sequence[Question], encoder: PromptEncoder, blank: bool = False) -> list[Prompt]:
    """The questions as prompts; `blank` makes their pictures plain grey."""
    pictures = [np.asarray(question.image) for question in questions]
    if blank:
        pictures = [np.full_like(picture, 127) for picture in pictures]
    return [encoder.encode(as_task(q), [picture]) for q, picture in zip(questions, pictures, strict=True)]


def grade(questions: Sequence[Question], rollouts: Rollouts) -> Grades:
    answers = [WELL_FORMED.fullmatch(text) for text in rollouts.text]
    right: dict[int, list[bool]] = defaultdict(list)
    for group, answer in zip(rollouts.group.tolist(), answers, strict=True):
        right[group].append(answer is not None and answer[1] == questions[group].answer)
    rates = torch.tensor([sum(right[g]) / len(right[g]) for g in range(len(questions))], dtype=torch.float64)
    of_kind = {kind: torch.tensor([q.kind == kind for q in questions]) for kind in KINDS}
    return Grades(
        avg=float(rates.mean()),
        best=float((rates > 0).double().mean()),
        form=sum(answer is not None for answer in answers) / len(answers),
        by_kind={kind: float(rates[rows].mean()) for kind, rows in of_kind.items() if rows.any()},
    )


def examine(
    generator: Generator, encoder: PromptEncoder, questions: Sequence[Question], sampling: Sampling, blank: bool = False
) -> Grades:
    return grade(questions, generator.generate(prompts_of(questions, encoder, blank), sampling))


def best_constant(questions: Sequence[Question]) -> dict[str, float]:
    """By kind, the share of the commonest right letter or right value: what an answer without looking is worth."""
    best: dict[str, float] = {}
    for kind in KINDS:
        of_kind = [q for q in questions if q.kind == kind]
        answers = [[q.answer for q in of_kind], [q.value for q in of_kind]]
        best[kind] = max(max(column.count(x) for x in set(column)) for column in answers) / len(of_kind)
    return best
