"""Feeds a logger (tensorboard, wandb, ..) from a thread. A logger that fails or loses its server never stops a run: its
entries wait, in order and up to a limit, and are retried with the next step and at the end."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from mtrl.protocols import Tracker
from mtrl.report.attention_tables import rows_over_range
from mtrl.report.conversation import DecodeText, conversation_text
from mtrl.report.markdown_text import shorten
from mtrl.tracking.background import Background
from mtrl.tracking.table import ColumnRates, Values, flatten_rates
from mtrl.types import Experience, ValidationSample

WAITING = 4096  # entries that may wait for a logger; beyond that the oldest are dropped
TRAIN_SAMPLES = 4  # training responses logged of a validated step, from the lowest reward to the highest
TEXT_CHARS = 4000  # characters logged of a text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LoggedSample:
    """A response for people to look at."""

    kind: str  # train or val
    id: str
    prompt: str
    response: str
    reward: float
    answer: str | None = None
    image: np.ndarray | None = None  # [H, W, 3], as the model saw it


@dataclass(frozen=True)
class RunInfo:
    """The run, for a logger. `first_step`: the first step that this attempt does."""

    project: str
    name: str
    directory: Path
    config: Mapping[str, Any]  # plain values by dotted key
    first_step: int = 0


class Sink(Protocol):
    """A logger. Its methods are called one after another, in one thread, and may raise anything."""

    def metrics(self, step: int, values: Values) -> None: ...

    def responses(self, step: int, samples: Sequence[LoggedSample]) -> None: ...

    def close(self) -> None: ...


class LoggerFeed(Tracker):
    """A tracker. `open_sink` starts the logger in the feed's thread and is retried if it fails. `decode`: the text of a
    turn; by default its token ids."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], decode: DecodeText = str) -> None:
        self.name, self.open_sink, self.decode = name, open_sink, decode
        self._sink: Sink | None = None
        self._waiting: deque[Callable[[Sink], None]] = deque()
        self._lost = 0
        self._broken = False
        self._last: Experience | None = None  # rows of the last step, until it is validated
        self._background = Background(f"logger {name}", waiting=WAITING)

    def metrics(self, step: int, values: Values) -> None:
        finite = {name: float(x) for name, x in values.items() if x is not None and math.isfinite(x)}
        self._submit(lambda sink: sink.metrics(step, finite))

    def rollouts(self, step: int, experience: Experience) -> None:
        rows = rows_over_range(experience.rewards.total, TRAIN_SAMPLES)
        self._last = experience.rows(torch.tensor(rows, dtype=torch.long))

    def validation(self, step: int, values: Values, by: ColumnRates, samples: Sequence[ValidationSample] = ()) -> None:
        self.metrics(step, {**values, **flatten_rates(by)})
        logged = [make_validation_sample(sample) for sample in samples]
        if self._last is not None:
            logged += make_training_samples(self._last, self.decode)
            self._last = None
        if logged:
            self._submit(lambda sink: sink.responses(step, logged))

    def close(self) -> None:
        self._background.submit(self._close_sink)
        self._background.close()

    # ------------------------------------------------------------------------------------------------ in its own thread
    def _submit(self, entry: Callable[[Sink], None]) -> None:
        self._background.submit(lambda: self._add(entry))

    def _add(self, entry: Callable[[Sink], None]) -> None:
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
        except Exception as error:  # whatever a library does, the run continues
            if not self._broken:
                message = "logger %s fails (%s: %s); the run continues, and the missed entries wait for it"
                logger.warning(message, self.name, type(error).__name__, shorten(str(error), 300))
            self._broken = True
            return
        if self._broken:
            lost = f"; {self._lost} entries are lost" if self._lost else ""
            logger.warning("logger %s works again%s", self.name, lost)
        self._broken, self._lost = False, 0

    def _close_sink(self) -> None:
        self._catch_up()
        if self._waiting or self._lost:
            lost = len(self._waiting) + self._lost
            logger.warning("logger %s: %d entries are lost; metrics.jsonl has every number", self.name, lost)
        if self._sink is not None:
            try:
                self._sink.close()
            except Exception as error:
                logger.warning("logger %s failed to close (%s)", self.name, shorten(str(error), 300))


def make_validation_sample(sample: ValidationSample) -> LoggedSample:
    return make_sample("val", sample.id, sample.prompt, sample.response, sample.reward, sample.answer)


def make_training_samples(it: Experience, decode: DecodeText) -> list[LoggedSample]:
    samples = []
    for row, group in enumerate(it.rollouts.group.tolist()):
        prompt = it.rollouts.prompts[group]
        task, reward = prompt.task, it.rewards.total[row].item()
        image = next((medium if medium.ndim == 3 else medium[0] for medium in prompt.media), None)
        response = conversation_text(it.rollouts, row, decode)
        samples.append(make_sample("train", task.id, task.text, response, reward, task.answer, image))
    return samples


def make_sample(
    kind: str, id: str, prompt: str, response: str, reward: float, answer: Any, image: np.ndarray | None = None
) -> LoggedSample:
    prompt, response = shorten(prompt, TEXT_CHARS), shorten(response, TEXT_CHARS)
    return LoggedSample(kind, id, prompt, response, reward, None if answer is None else str(answer), image)
