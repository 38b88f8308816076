"""Recorded responses to try rewards on: the rollouts of a run, or the rows of a dataset."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from mtrl.data import BadRow, DataError, DataSource
from mtrl.data.prompts import TaskBuilder
from mtrl.data.row_settings import RowError
from mtrl.data.video import decode_medium, measure_media, target_sizes
from mtrl.models.families import TextEncoder
from mtrl.rollout.responses import make_rollouts
from mtrl.tracking.jsonl import iter_rows
from mtrl.types import FinishReason, Prompt, Rollouts, Task

RESPONSES_PER_BATCH = 512  # responses scored together; their images are in memory at the same time
ROLLOUTS = "rollouts.jsonl"
ROW = {"step": int, "id": str, "response": str}  # columns of every row of a run's rollouts
STOP: FinishReason = "stop"
RESPONSE = "response"  # the column of a dataset that holds a response, or a list of them


@dataclass(frozen=True)
class Group:
    """Responses to one task, and how each ended."""

    task: Task
    responses: tuple[str, ...]
    finish: tuple[FinishReason, ...]


def find_rollouts_file(data: str) -> Path | None:
    """The rollouts of a run, by their path or that of the run; None if the path is something else."""
    path = Path(data)
    file = path / ROLLOUTS if path.is_dir() else path
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    return file if ROW.keys() <= next(iter_rows(file), {}).keys() else None


@dataclass
class RunRecord:
    """A run's rollouts, joined by task id with the rows they came from. Those without such a row have only the response
    and the answer."""

    file: Path
    sources: Sequence[DataSource]
    builder: TaskBuilder
    joined: Counter[bool] = field(default_factory=Counter)

    def groups(self) -> Iterator[Group]:
        attempts = {row["step"]: row.get("attempt") for row in self._rows()}  # the last attempt of each step
        rows = (row for row in self._rows() if row.get("attempt") == attempts[row["step"]])
        for (step, name), members in groupby(rows, key=lambda row: (row["step"], row["id"])):
            responses = list(members)
            task = self.find(name)
            self.joined[task is not None] += len(responses)
            if task is None:
                task = Task(name, f"row {name}", (), answer=responses[0].get("answer"))
            task = replace(task, origin=f"step {step}, {task.origin}")
            finish = tuple(row.get("finish", STOP) for row in responses)
            yield Group(task, tuple(row["response"] for row in responses), finish)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(iter_rows(self.file), 1):
            for name, kind in ROW.items():
                if not isinstance(row.get(name), kind):
                    problem = f"its {name!r} is {'missing' if name not in row else 'no ' + kind.__name__}"
                    raise DataError(f"{self.file}, row {number} was not written by a run: {problem}; remove the row")
            yield row

    def notes(self) -> list[str]:
        """Notes for the reader of the results; complete after all groups have been read."""
        if not self.joined[False]:
            return [f"prompt, images and columns are those of {', '.join(source.name for source in self.sources)}"]
        data = "the run's data" if self.sources else "any data"
        return [
            f"{self.joined[False]} of {sum(self.joined.values())} responses have no row in {data}: a reward sees "
            "their response and answer, but no prompt, images or columns"
        ]

    def find(self, name: str) -> Task | None:
        """The task of this id in the data; None if it is not there."""
        fingerprint, _, row = name.rpartition(":")
        for source in self.sources:
            if source.fingerprint == fingerprint and row.isdigit():
                number = int(row) + 1
                index = bisect_left(range(len(source)), number, key=source.row_number)
                if index < len(source) and source.row_number(index) == number:
                    return self.builder.build(source, index)
        return None


@dataclass
class DataRecord:
    """The rows of a dataset. If a row has no response, its answer is tried instead."""

    sources: Sequence[DataSource]
    builder: TaskBuilder
    answers: int = 0
    bad: list[BadRow] = field(default_factory=list)

    def groups(self) -> Iterator[Group]:
        for source in self.sources:
            for index in range(len(source)):
                group = self._group(source, index)
                if group is not None:
                    yield group

    def _group(self, source: DataSource, index: int) -> Group | None:
        try:
            task = self.builder.build(source, index)
            responses = get_responses(task)
            if responses is None:
                if task.answer is None:
                    raise RowError(f"it has neither a column {RESPONSE!r} nor an answer (dataset.answer_key)")
                responses = (str(task.answer),)
                self.answers += 1
            return Group(task, responses, (STOP,) * len(responses))
        except RowError as error:
            bad = BadRow(source.name, source.row_number(index), error.reason)
            if self.builder.settings.on_bad_row != "skip":
                raise DataError(f"{bad}\nRepair it, or set dataset.on_bad_row=skip to leave it out.") from error
            self.bad.append(bad)
            return None

    def notes(self) -> list[str]:
        notes = []
        if self.answers:
            notes.append(
                f"{self.answers} rows have no column {RESPONSE!r}: their answer is tried instead, as it is (a reward "
                "that looks for <answer> or \\boxed{} finds none in it)"
            )
        if self.bad:
            notes.append(f"{len(self.bad)} rows cannot be used and are skipped; the first: {self.bad[0]}")
        return notes


def get_responses(task: Task) -> tuple[str, ...] | None:
    value: Any = (task.columns or {}).get(RESPONSE)
    if value is None:
        return None
    responses = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not responses or not all(isinstance(each, str) for each in responses):
        raise RowError(f"its {RESPONSE} is a {type(value).__name__}; expected a text or a list of texts")
    return responses


# ---------------------------------------------------------------------------------------------------------- as rollouts
def iterate_rollouts(groups: Iterable[Group], encoder: TextEncoder | None) -> Iterator[Rollouts]:
    """Recorded responses in batches, like those of a generator. Without an encoder responses have no tokens, and images
    keep their own size."""
    batch: list[Group] = []
    for group in groups:
        batch.append(group)
        if sum(len(each.responses) for each in batch) >= RESPONSES_PER_BATCH:
            yield make_batch(batch, encoder)
            batch = []
    if batch:
        yield make_batch(batch, encoder)


def make_batch(groups: Sequence[Group], encoder: TextEncoder | None) -> Rollouts:
    texts = [text for group in groups for text in group.responses]
    finish = [reason for group in groups for reason in group.finish]
    ids = [encode_response(text, why, encoder) if encoder else [] for text, why in zip(texts, finish, strict=True)]
    return make_rollouts(
        [make_prompt(group.task, encoder) for group in groups],
        [index for index, group in enumerate(groups) for _ in group.responses],
        ids,
        None,
        text=texts,
        finish=finish,
        version=0,
        pad_id=encoder.pad_id if encoder else 0,
    )


def encode_response(text: str, finish: FinishReason, encoder: TextEncoder) -> list[int]:
    """The tokens of a recorded text, with the end token, which is not in the text, if the response ended by itself."""
    end = encoder.stop_ids[:1] if finish == STOP else ()
    return [*encoder.tokenizer.encode(text, add_special_tokens=False), *end]


def make_prompt(task: Task, encoder: TextEncoder | None) -> Prompt:
    """The prompt of a task with decoded images; without tokens, which rewards do not see."""
    try:
        task, sizes = measure_media(task, encoder)
        targets = target_sizes(encoder, sizes, task.media)
        media = tuple(decode_medium(medium, target) for medium, target in zip(task.media, targets, strict=True))
    except ValueError as error:
        raise DataError(f"{task.origin}: {error}") from error
    empty = torch.zeros(0, dtype=torch.long)
    return Prompt(task, media, empty, empty, empty)
