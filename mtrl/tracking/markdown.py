"""The Markdown logs of a run, for people: prompts, responses, rewards and attention.

    logs/rollout_results_<time>.md        every step (or every validated one)
    logs/eval_results_<time>.md           every validation
    logs/attention_diagnostics_<time>.md  every step whose attention was measured
    logs/token_weights.md                 every step with token weights

Append-only and limited in size (see background.py), a few samples per step: rollouts.jsonl has every response.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mtrl.protocols import Tracker
from mtrl.report.conversation import DecodeText
from mtrl.report.log_pages import DecodeTokens, attention_page, evaluation_page, rollout_page, weights_page
from mtrl.tracking.background import LIMIT_BYTES, Background, append_bounded
from mtrl.tracking.table import ColumnRates, Values
from mtrl.types import Experience, Observations, Prompt, Rollouts, ValidationSample


@dataclass(frozen=True)
class LogPaths:
    rollouts: Path
    evaluation: Path
    attention: Path
    weights: Path

    @classmethod
    def make(cls, logs: Path, rollouts: str | None = None, attention: str | None = None) -> LogPaths:
        """The paths of the logs, in `logs` unless a .md file or a directory is given for one of them."""
        now = time.strftime("%Y%m%d-%H%M%S")

        def choose(given: str | None, name: str) -> Path:
            path = logs if given is None else Path(given).expanduser()
            return path if path.suffix == ".md" else path / f"{name}_{now}.md"

        results = choose(rollouts, "rollout_results")
        return cls(
            rollouts=results,
            evaluation=results.parent / f"eval_results_{now}.md",
            attention=choose(attention, "attention_diagnostics"),
            weights=results.parent / "token_weights.md",
        )


class MarkdownLogs(Tracker):
    """A tracker. With `every_step` off, only validated steps are written. `decode_text`: of a turn; by default its
    token ids."""

    def __init__(
        self,
        paths: LogPaths,
        decode: DecodeTokens,
        every_step: bool = True,
        limit_bytes: int = LIMIT_BYTES,
        decode_text: DecodeText = str,
    ) -> None:
        self.paths, self.decode, self.decode_text = paths, decode, decode_text
        self.every_step, self.limit = every_step, limit_bytes
        self._background = Background("Markdown logs")
        self._last: tuple[int, Experience] | None = None

    def rollouts(self, step: int, experience: Experience) -> None:
        self._last = step, replace(experience, rollouts=without_pixels(experience.rollouts))
        if self.every_step:
            self._write_last()

    def validation(self, step: int, values: Values, by: ColumnRates, samples: Sequence[ValidationSample] = ()) -> None:
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
        self._append(self.paths.rollouts, rollout_page(step, it, self.decode_text))
        if it.signals.attention_mass is not None:
            self._append(self.paths.attention, attention_page(step, it, self.decode))
        if it.credit is not None and it.credit.weights is not None:
            self._append(self.paths.weights, weights_page(step, it, self.decode))

    def _append(self, path: Path, page: str) -> None:
        append_bounded(path, page, self.limit)


def without_pixels(rollouts: Rollouts) -> Rollouts:
    """The log shows none, and they must not stay in memory for it."""

    def strip(prompt: Prompt) -> Prompt:
        return replace(prompt, media=(), task=replace(prompt.task, media=()))

    def strip_messages(each: Observations) -> Observations:
        return replace(each, turns=tuple(replace(turn, message=strip(turn.message)) for turn in each.turns))

    prompts = tuple(map(strip, rollouts.prompts))
    if rollouts.observations is None:
        return replace(rollouts, prompts=prompts)
    observations = tuple(each and strip_messages(each) for each in rollouts.observations)
    return replace(rollouts, prompts=prompts, observations=observations)
