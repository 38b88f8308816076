"""Feeds a logger (tensorboard, wandb, ..) off the training path. A logger that fails or loses its server never stops a
run: what it could not take waits, in order and within a bound, and is tried again with the next step and at the end."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from mtrl.protocols import Tracker
from mtrl.report.escape import shorten
from mtrl.report.markdown_pages import rows_over_range
from mtrl.tracking.background import Background
from mtrl.tracking.table import by_name
from mtrl.types import Experience, ValidationSample

WAITING = 4096  # entries that wait for a logger; beyond them the oldest are given up
SHOWN = 4  # training responses shown of a validated step, from the lowest reward to the highest
TEXT_CHARS = 4000  # of a text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Shown:
    """A response for people to look at."""

    kind: str  # train or val
    id: str
    prompt: str
    response: str
    reward: float
    answer: str | None = None
    image: np.ndarray | None = None  # [H, W, 3], as the model saw it


@dataclass(frozen=True)
class About:
    """The run that a logger is told of. `first_step`: the first step that this attempt will do again or anew."""

    project: str
    name: str
    directory: Path
    config: Mapping[str, Any]  # plain values by their keys
    first_step: int = 0


class Sink(Protocol):
    """A logger. Its methods are called one after the other, in one thread, and may raise anything."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def responses(self, step: int, shown: Sequence[Shown]) -> None: ...

    def close(self) -> None: ...


class LoggerFeed(Tracker):
    """A tracker. `open_sink` starts the logger, in the feed's own thread, and is tried again where it fails."""

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self.name, self.open_sink = name, open_sink
        self._sink: Sink | None = None
        self._waiting: deque[Callable[[Sink], None]] = deque()
        self._lost = 0
        self._broken = False
        self._last: tuple[int, Experience] | None = None
        self._background = Background(f"logger {name}", waiting=WAITING)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: float(x) for name, x in values.items() if x is not None and math.isfinite(x)}
        self._hand_over(lambda sink: sink.metrics(step, finite))

    def rollouts(self, step: int, experience: Experience) -> None:
        rows = rows_over_range(experience.rewards.total, SHOWN)
        self._last = step, experience.rows(torch.tensor(rows, dtype=torch.long))

    def validation(
        self,
        step: int,
        values: Mapping[str, float],
        by: Mapping[str, Mapping[str, float]],
        samples: Sequence[ValidationSample] = (),
    ) -> None:
        self.metrics(step, {**values, **by_name(by)})
        shown = [of_validation(sample) for sample in samples]
        if self._last is not None:
            shown += of_training(self._last[1])
            self._last = None
        if shown:
            self._hand_over(lambda sink: sink.responses(step, shown))

    def close(self) -> None:
        self._background.submit(self._end)
        self._background.close()

    # ------------------------------------------------------------------------------------------------ in its own thread
    def _hand_over(self, entry: Callable[[Sink], None]) -> None:
        self._background.submit(lambda: self._take(entry))

    def _take(self, entry: Callable[[Sink], None]) -> None:
        self._waiting.append(entry)
        while len(self._waiting) > WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._catch_up()

    def _catch_up(self) -> None:
        try:
            while self._waiting:
                if self._sink is None:
                    self._sink = self.open_sink()
                self._waiting[0](self._sink)
                self._waiting.popleft()
        except Exception as error:  # whatever a library does, a run goes on
            if not self._broken:
                told = "logger %s fails (%s: %s); the run goes on, and what it missed waits for it"
                logger.warning(told, self.name, type(error).__name__, shorten(str(error), 300))
            self._broken = True
            return
        if self._broken:
            logger.warning(
                "logger %s works again%s", self.name, f"; {self._lost} entries are lost" if self._lost else ""
            )
        self._broken, self._lost = False, 0

    def _end(self) -> None:
        self._catch_up()
        if self._waiting or self._lost:
            lost = len(self._waiting) + self._lost
            logger.warning("logger %s: %d entries are lost; metrics.jsonl has every number", self.name, lost)
        if self._sink is not None:
            try:
                self._sink.close()
            except Exception as error:
                logger.warning("logger %s did not end well (%s)", self.name, shorten(str(error), 300))


def of_validation(sample: ValidationSample) -> Shown:
    answer = None if sample.answer is None else str(sample.answer)
    return bounded(Shown("val", sample.id, sample.prompt, sample.response, sample.reward, answer))


def of_training(it: Experience) -> list[Shown]:
    found = []
    for row, group in enumerate(it.rollouts.group.tolist()):
        prompt = it.rollouts.prompts[group]
        answer = None if prompt.task.answer is None else str(prompt.task.answer)
        image = next((medium if medium.ndim == 3 else medium[0] for medium in prompt.media), None)
        reward, task = it.rewards.total[row].item(), prompt.task
        found.append(bounded(Shown("train", task.id, task.text, it.rollouts.text[row], reward, answer, image)))
    return found


def bounded(shown: Shown) -> Shown:
    return replace(shown, prompt=shorten(shown.prompt, TEXT_CHARS), response=shorten(shown.response, TEXT_CHARS))
