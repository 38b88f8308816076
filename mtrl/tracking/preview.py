"""Responses for people: what was asked, what the model said, what it got for it, and which tokens learnt from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.metrics import SUCCESS
from mtrl.report.escape import shorten
from mtrl.tracking.colour import Paint
from mtrl.types import Experience, ValidationSample
from mtrl.utils.terminal import sanitize

INDENT = "    "
VERDICT = {True: "green", False: "red", None: "bold"}  # a wrong answer is never green, whatever it was paid

DecodeTokens = Callable[[Sequence[int]], Sequence[str]]


@dataclass(frozen=True, eq=False)
class Trained:
    """A training response and the credit of each of its tokens: positive is praise, 0 teaches nothing."""

    id: str
    prompt: str
    tokens: Tensor  # [n] token ids
    credit: Tensor  # [n] one for each token
    reward: float
    right: bool | None = None  # None: no part of the reward tells right from wrong


def most_taught(experience: Experience) -> Trained | None:
    """The response of a step with the most credit on its tokens; None where nothing is learnt."""
    rollouts, rewards, credit = experience.rollouts, experience.rewards, experience.credit
    if credit is None or not len(rollouts):
        return None
    credits = (credit.advantage * credit.keep_mask).where(rollouts.mask, 0.0)
    row = int(credits.abs().sum(1).argmax())
    if not credits[row].any():
        return None
    task, length = rollouts.prompts[int(rollouts.group[row])].task, int(rollouts.mask[row].sum())
    tokens = rollouts.tokens[row, :length].clone()  # not a view, which would hold the whole step
    right = is_right({name: part[row].item() for name, part in rewards.parts.items()})
    return Trained(task.id, task.text, tokens, credits[row, :length].clone(), rewards.total[row].item(), right)


def is_right(parts: Mapping[str, float]) -> bool | None:
    """Whether the answer is right, by the parts of its reward; None where none of them says so, or applies."""
    said = [parts[name] for name in SUCCESS if name in parts and parts[name] == parts[name]]
    return said[0] >= 1 if said else None


def validation_preview(sample: ValidationSample, limit: int, paint: Paint) -> list[str]:
    """The lines of one validation sample, texts cut to `limit` characters."""
    response = sanitize(shorten(sample.response, limit))
    return [*_asked(sample.id, sample.prompt, limit, paint), *_indented(response), *_got(sample, paint)]


def training_preview(trained: Trained, decode: DecodeTokens, limit: int, paint: Paint) -> list[str]:
    """The lines of a training response; tokens that learn stand on green or red, or without colours between marks."""
    shown = list(zip(decode(trained.tokens.tolist()), trained.credit.tolist(), strict=True))
    pieces, length = [], 0
    for text, credit in shown:
        length += len(text)
        if length > limit:
            pieces.append(" [..]")
            break
        pieces.append(_token(sanitize(text), credit, paint))
    learnt = sum(credit != 0 for _, credit in shown)
    told = f"reward {trained.reward:.3f}, {learnt} of {len(shown)} tokens learn"
    lines = [*_asked(trained.id, trained.prompt, limit, paint), *_indented("".join(pieces))]
    return [*lines, INDENT + paint(told, VERDICT[trained.right])]


def _token(text: str, credit: float, paint: Paint) -> str:
    if credit == 0:
        return paint(text, "dim")
    if paint.on:
        return paint(text, "praised" if credit > 0 else "blamed")
    return f"[{'+' if credit > 0 else '-'}{text}]"


def _asked(name: str, prompt: str, limit: int, paint: Paint) -> list[str]:
    question = _indented(sanitize(shorten(prompt, limit)))
    return [f"  {paint(sanitize(name), 'cyan')}", *(paint(line, "dim") for line in question)]


def _got(sample: ValidationSample, paint: Paint) -> list[str]:
    truth = "" if sample.answer is None else f", truth {sanitize(shorten(str(sample.answer), 80))}"
    return [INDENT + paint(f"reward {sample.reward:.3f}{truth}", VERDICT[is_right(sample.rewards or {})])]


def _indented(text: str) -> list[str]:
    return [INDENT + line for line in text.split("\n")]
