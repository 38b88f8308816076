"""Previews of responses on the console: prompt, response, reward, and which tokens were trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.metrics import SUCCESS
from mtrl.report.log_pages import DecodeTokens
from mtrl.report.markdown_text import shorten
from mtrl.tracking.colour import Paint
from mtrl.types import Experience, ValidationSample
from mtrl.utils.terminal import sanitize

INDENT = "    "
VERDICT = {True: "green", False: "red", None: "bold"}  # a wrong answer is never green, whatever its reward


@dataclass(frozen=True, eq=False)
class TrainedResponse:
    """A training response and the credit of each of its tokens: positive reinforces, 0 trains nothing."""

    id: str
    prompt: str
    tokens: Tensor  # [n] token ids
    credit: Tensor  # [n]
    reward: float
    correct: bool | None = None  # None: no part of the reward measures correctness


def select_most_trained(experience: Experience) -> TrainedResponse | None:
    """The response of a step with the most credit on its tokens; None if no token has any."""
    rollouts, rewards, credit = experience.rollouts, experience.rewards, experience.credit
    if credit is None or not len(rollouts):
        return None
    credits = credit.advantage.where(credit.trained & rollouts.mask, 0.0)
    row = int(credits.abs().sum(1).argmax())
    if not credits[row].any():
        return None
    task, length = rollouts.prompts[int(rollouts.group[row])].task, int(rollouts.mask[row].sum())
    tokens = rollouts.tokens[row, :length].clone()  # a view would keep the whole step in memory
    correct = is_correct({name: part[row].item() for name, part in rewards.parts.items()})
    reward = rewards.total[row].item()
    return TrainedResponse(task.id, task.text, tokens, credits[row, :length].clone(), reward, correct)


def is_correct(parts: Mapping[str, float]) -> bool | None:
    """Whether the answer is correct according to the parts of its reward; None if none of them measures it."""
    scores = [parts[name] for name in SUCCESS if name in parts and parts[name] == parts[name]]
    return scores[0] >= 1 if scores else None


def validation_preview(sample: ValidationSample, limit: int, paint: Paint) -> list[str]:
    """The lines of one validation sample, texts cut to `limit` characters."""
    response = sanitize(shorten(sample.response, limit))
    truth = "" if sample.answer is None else f", truth {sanitize(shorten(str(sample.answer), 80))}"
    reward = paint(f"reward {sample.reward:.3f}{truth}", VERDICT[is_correct(sample.rewards or {})])
    return [*_prompt_lines(sample.id, sample.prompt, limit, paint), *_indent(response), INDENT + reward]


def training_preview(trained: TrainedResponse, decode: DecodeTokens, limit: int, paint: Paint) -> list[str]:
    """The lines of a training response; trained tokens are coloured by their credit, or marked [+..] and [-..]."""
    tokens = list(zip(decode(trained.tokens.tolist()), trained.credit.tolist(), strict=True))
    pieces, length = [], 0
    for text, credit in tokens:
        length += len(text)
        if length > limit:
            pieces.append(" [..]")
            break
        pieces.append(_paint_token(sanitize(text), credit, paint))
    count = sum(credit != 0 for _, credit in tokens)
    summary = f"reward {trained.reward:.3f}, {count} of {len(tokens)} tokens trained"
    lines = [*_prompt_lines(trained.id, trained.prompt, limit, paint), *_indent("".join(pieces))]
    return [*lines, INDENT + paint(summary, VERDICT[trained.correct])]


def _paint_token(text: str, credit: float, paint: Paint) -> str:
    if credit == 0:
        return paint(text, "dim")
    if paint.on:
        return paint(text, "praised" if credit > 0 else "blamed")
    return f"[{'+' if credit > 0 else '-'}{text}]"


def _prompt_lines(name: str, prompt: str, limit: int, paint: Paint) -> list[str]:
    question = _indent(sanitize(shorten(prompt, limit)))
    return [f"  {paint(sanitize(name), 'cyan')}", *(paint(line, "dim") for line in question)]


def _indent(text: str) -> list[str]:
    return [INDENT + line for line in text.split("\n")]
