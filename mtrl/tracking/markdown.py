"""The Markdown logs of a run, for people: what was asked, what was said, what it was worth, where the model looked.

    logs/rollout_results_<time>.md        every step (or every validated one)
    logs/eval_results_<time>.md           every validation
    logs/attention_diagnostics_<time>.md  every step whose attention was measured
    logs/token_weights.md                 every step whose tokens were weighted

Append-only and bounded (see background.py), a few samples a step: every response is in rollouts.jsonl.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mtrl.algorithms.signals import pool_sizes, segment, sequence_mass, vgr
from mtrl.protocols import Tracker
from mtrl.report import markdown_pages as pages
from mtrl.report.markdown_pages import SHOWN_SEGMENTS, fenced, number, summary_cells, table
from mtrl.tracking.background import LIMIT_BYTES, Background, append_bounded
from mtrl.tracking.preview import DecodeTokens
from mtrl.types import Experience, Prompt, ValidationSample
from mtrl.utils.terminal import sanitize

SAMPLES = 4  # responses shown of a step, from the lowest reward to the highest
SAMPLES_OF_TOKENS = 2  # responses written out token by token
HEAD_TOKENS = 32  # tokens shown in a preview
JSON_TOKENS = 256  # most tokens of a response that is written out


@dataclass(frozen=True)
class LogPaths:
    rollouts: Path
    evaluation: Path
    attention: Path
    weights: Path

    @classmethod
    def of(cls, logs: Path, rollouts: str | None = None, attention: str | None = None) -> LogPaths:
        """The paths of the logs: in `logs`, or where a path says, which is a file that ends with .md or a directory."""
        now = time.strftime("%Y%m%d-%H%M%S")

        def place(given: str | None, name: str) -> Path:
            path = logs if given is None else Path(given).expanduser()
            return path if path.suffix == ".md" else path / f"{name}_{now}.md"

        results = place(rollouts, "rollout_results")
        return cls(
            rollouts=results,
            evaluation=results.parent / f"eval_results_{now}.md",
            attention=place(attention, "attention_diagnostics"),
            weights=results.parent / "token_weights.md",
        )


class MarkdownLogs(Tracker):
    """A tracker. With `every_step` off, steps are written only where they are validated."""

    def __init__(
        self, paths: LogPaths, decode: DecodeTokens, every_step: bool = True, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.paths, self.decode, self.every_step, self.limit = paths, decode, every_step, limit_bytes
        self._background = Background("Markdown logs")
        self._last: tuple[int, Experience] | None = None

    def rollouts(self, step: int, experience: Experience) -> None:
        rollouts = experience.rollouts
        lean = replace(rollouts, prompts=tuple(map(without_media, rollouts.prompts)))
        self._last = step, replace(experience, rollouts=lean)
        if self.every_step:
            self._write_last()

    def validation(
        self,
        step: int,
        values: Mapping[str, float],
        by: Mapping[str, Mapping[str, float]],
        samples: Sequence[ValidationSample] = (),
    ) -> None:
        self._write_last()
        page = partial(evaluation_page, step, dict(values), by, samples)
        self._background.submit(lambda: self._append(self.paths.evaluation, page()))

    def close(self) -> None:
        self._background.close()

    def _write_last(self) -> None:
        if self._last is not None:
            self._background.submit(partial(self._write, *self._last))
        self._last = None

    def _write(self, step: int, it: Experience) -> None:
        self._append(self.paths.rollouts, rollout_page(step, it))
        if it.signals.attention_mass is not None:
            self._append(self.paths.attention, attention_page(step, it, self.decode))
        if it.credit is not None and it.credit.weights is not None:
            self._append(self.paths.weights, weights_page(step, it, self.decode))

    def _append(self, path: Path, page: str) -> None:
        append_bounded(path, page, self.limit)


def without_media(prompt: Prompt) -> Prompt:
    """The prompt without its pixels, which must not wait in memory for a log that does not show them."""
    return replace(prompt, media=(), task=replace(prompt.task, media=()))


# --------------------------------------------------------------------------------------------------------------- pages
def rollout_page(step: int, it: Experience) -> str:
    rollouts, rewards = it.rollouts, it.rewards
    lengths = rollouts.mask.sum(1)
    rows = [
        ["reward", *summary_cells(rewards.total)],
        *([name, *summary_cells(part)] for name, part in rewards.parts.items()),
    ]
    rows.append(["response length", *summary_cells(lengths.double())])
    parts = [
        f"# Step {step}",
        f"{len(rollouts)} responses to {len(rollouts.prompts)} prompts, {int(rollouts.truncated.sum())} cut at the "
        f"length limit, {int(rewards.failed.sum())} failed rewards.",
        table(["", "mean", "std", "min", "max"], rows),
    ]
    mass, sizes = response_mass(it), row_sizes(it)
    if mass is not None:
        parts += [pages.attention_table(mass, sizes), pages.BALANCE]
    for row in pages.rows_over_range(rewards.total, SAMPLES):
        task = rollouts.prompts[int(rollouts.group[row])].task
        scores = reward_table(
            float(rewards.total[row]), {name: float(part[row]) for name, part in rewards.parts.items()}
        )
        looked = [] if mass is None else [pages.row_attention(mass[row], sizes[row])]
        told = "; ".join([scores, f"{int(lengths[row])} tokens, {rollouts.finish_reason[row]}", *looked])
        parts += sample(task.id, task.text, rollouts.text[row], task.answer, told)
    return "\n\n".join(parts) + "\n\n"


def evaluation_page(
    step: int, values: Mapping[str, float], by: Mapping[str, Mapping[str, float]], samples: Sequence[ValidationSample]
) -> str:
    attention = {name: x for name, x in values.items() if "attention/" in name}
    rows = [[name, number(x)] for name, x in values.items() if name not in attention]
    parts = [f"# Validation at step {step}", table(["", "value"], rows)]
    if attention:
        parts.append(segment_table(attention))
    for column, rates in by.items():
        parts.append(table([f"by {column}", "success"], [[value, number(rate)] for value, rate in rates.items()]))
    for each in samples:
        told = reward_table(each.reward, each.rewards or {})
        parts += sample(each.id, each.prompt, each.response, each.answer, told)
    return "\n\n".join(parts) + "\n\n"


def attention_page(step: int, it: Experience, decode: DecodeTokens) -> str:
    """Attention by segment, while answering and while reading the prompt, and the beginnings of the responses that look
    most and least."""
    mass, sizes = response_mass(it), row_sizes(it)
    assert mass is not None and it.signals.attention_mass is not None
    parts = [f"# Step {step}", "While answering:", pages.attention_table(mass, sizes)]
    if it.signals.prompt_attention_mass is not None:
        parts += ["While reading (the prompt's tokens after the image):"]
        parts += [pages.attention_table(it.signals.prompt_attention_mass, sizes)]
    ratio = vgr(segment(mass, "all"), sizes)
    known = (~ratio.isnan()).nonzero().flatten()
    for place in pages.rows_over_range(ratio[known], 2):
        row = int(known[place])
        values = vgr(segment(it.signals.attention_mass[row], "all"), sizes[row])
        parts.append(f"Response with VGR {number(float(ratio[row]))}, token by token:")
        parts.append(fenced(preview(it, row, values, decode)))
    return "\n\n".join(parts) + "\n\n"


def weights_page(step: int, it: Experience, decode: DecodeTokens) -> str:
    assert it.credit is not None and it.credit.weights is not None
    weights, mask, mass = it.credit.weights, it.rollouts.mask, it.signals.attention_mass
    rows = pages.rows_over_range(it.rewards.total, SAMPLES_OF_TOKENS)
    parts = [
        f"# Step {step}",
        table(["token weight", "mean", "std", "min", "max"], [["", *summary_cells(weights[mask])]]),
    ]
    for row in rows:
        length = min(int(mask[row].sum()), JSON_TOKENS)
        texts = decode(it.rollouts.tokens[row, :length].tolist())
        tokens = [
            {"token": text, "weight": round(value, 4)}
            for text, value in zip(texts, weights[row, :length].tolist(), strict=True)
        ]
        if mass is not None:
            ratios = vgr(segment(mass[row, :length], "weight"), row_sizes(it)[row]).tolist()
            for token, ratio in zip(tokens, ratios, strict=True):
                token["vgr"] = None if ratio != ratio else round(ratio, 4)
        parts.append(f"Response of reward {number(float(it.rewards.total[row]))}, head:")
        parts.append(fenced(preview(it, row, weights[row], decode)))
        parts.append(as_json(tokens))
    return "\n\n".join(parts) + "\n\n"


# -------------------------------------------------------------------------------------------------------------- pieces
def sample(name: str, prompt: str, response: str, answer: object, told: str) -> list[str]:
    solution = "none" if answer is None else str(answer)
    heads = [f"### {sanitize(name)}", "prompt", fenced(prompt), "completion", fenced(response)]
    return [*heads, "solution", fenced(solution), told]


def reward_table(total: float, parts: Mapping[str, float]) -> str:
    return ", ".join([f"reward {number(total)}", *(f"{name} {number(x)}" for name, x in parts.items())])


def preview(it: Experience, row: int, values: Tensor, decode: DecodeTokens) -> str:
    """The first tokens of a response, each as token(value)."""
    length = min(int(it.rollouts.mask[row].sum()), HEAD_TOKENS)
    texts = decode(it.rollouts.tokens[row, :length].tolist())
    return " ".join(f"{text}({number(value)})" for text, value in zip(texts, values[:length].tolist(), strict=True))


def as_json(tokens: Sequence[Mapping[str, object]]) -> str:
    """Tokens as JSON, one a line: readable, and still one list."""
    lines = ",\n".join(json.dumps(token, ensure_ascii=False) for token in tokens)
    return f"```json\n[\n{lines}\n]\n```"


def segment_table(values: Mapping[str, float]) -> str:
    """A table of means by segment, from metrics such as `val/attention/vgr_late`."""

    def found(kind: str, name: str) -> str:
        return next((number(x) for key, x in values.items() if key.endswith(f"attention/{kind}_{name}")), "n/a")

    kinds = ("vgr", "aei_text", "aei_vision")
    rows = [[name, *(found(kind, name) for kind in kinds)] for name in SHOWN_SEGMENTS]
    return table(["layers", "VGR", "AEI text", "AEI vision"], rows)


def response_mass(it: Experience) -> Tensor | None:
    """The mean attention mass of each response, [N, len(SEGMENTS), 2]."""
    return None if it.signals.attention_mass is None else sequence_mass(it.signals.attention_mass, it.rollouts.mask)


def row_sizes(it: Experience) -> Tensor:
    """The pool sizes of each response's prompt, [N, 2]."""
    sizes = pool_sizes(it.rollouts.prompts)
    return sizes[it.rollouts.group] if len(sizes) else torch.zeros(0, 2, dtype=torch.long)
