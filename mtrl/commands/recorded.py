"""Responses that were written down, for trying rewards on them: the rollouts of a run, or the rows of a dataset."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch

from mtrl.data import BadRow, DataError
from mtrl.data.prompts import TaskBuilder
from mtrl.data.row_settings import RowError
from mtrl.data.sources import DataSource
from mtrl.data.video import measure, pixels, target_sizes
from mtrl.models.families import TextEncoder
from mtrl.rollout.responses import make_rollouts
from mtrl.tracking.jsonl import read_rows_of
from mtrl.types import Finish, Prompt, Rollouts, Task

ROWS_AT_ONCE = 512  # responses scored together; their images are in memory at the same time
ROLLOUTS = "rollouts.jsonl"
ROW = {"step": int, "id": str, "response": str}  # what each row of a run's rollouts has
STOP: Finish = "stop"
RESPONSE = "response"  # the column of a dataset that holds a response, or a list of them


@dataclass(frozen=True)
class Group:
    """Responses to one task, and how each ended."""

    task: Task
    responses: tuple[str, ...]
    finish: tuple[Finish, ...]


class Recorded(Protocol):
    def groups(self) -> Iterator[Group]: ...

    def notes(self) -> list[str]:
        """What a reader of the results must know; complete when the groups have been read."""


def rollouts_file(data: str) -> Path | None:
    """The rollouts that a path names, as a file or by the run they are in; None where it is something else."""
    path = Path(data)
    file = path / ROLLOUTS if path.is_dir() else path
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    return file if ROW.keys() <= next(read_rows_of(file), {}).keys() else None


@dataclass
class RunRecord:
    """A run's rollouts, joined by task id with the rows they came from. What cannot be joined has the response and the
    answer alone."""

    file: Path
    sources: Sequence[DataSource]
    builder: TaskBuilder
    joined: Counter[bool] = field(default_factory=Counter)

    def groups(self) -> Iterator[Group]:
        attempts = {row["step"]: row.get("attempt") for row in self._rows()}  # the last attempt of each step
        rows = (row for row in self._rows() if row.get("attempt") == attempts[row["step"]])
        for (step, name), members in groupby(rows, key=lambda row: (row["step"], row["id"])):
            responses = list(members)
            task = self._task(name)
            self.joined[task is not None] += len(responses)
            if task is None:
                task = Task(name, f"row {name}", (), answer=responses[0].get("answer"))
            task = replace(task, origin=f"step {step}, {task.origin}")
            finish = tuple(row.get("finish", STOP) for row in responses)
            yield Group(task, tuple(row["response"] for row in responses), finish)

    def _rows(self) -> Iterator[dict[str, Any]]:
        """The rows as a run writes them; one that lacks something was put there by somebody else."""
        for number, row in enumerate(read_rows_of(self.file), 1):
            for name, kind in ROW.items():
                if not isinstance(row.get(name), kind):
                    told = f"its {name!r} is {'missing' if name not in row else 'no ' + kind.__name__}"
                    raise DataError(f"{self.file}, row {number} is not what a run writes: {told}; remove the row")
            yield row

    def notes(self) -> list[str]:
        if not self.joined[False]:
            return [f"prompt, images and columns are those of {', '.join(source.name for source in self.sources)}"]
        where = "the run's data" if self.sources else "any data"
        return [
            f"{self.joined[False]} of {sum(self.joined.values())} responses have no row in {where}: a reward sees "
            "their response and answer, but no prompt, images or columns"
        ]

    def _task(self, name: str) -> Task | None:
        fingerprint, _, row = name.rpartition(":")
        for source in self.sources:
            if source.fingerprint == fingerprint and row.isdigit():
                number = int(row) + 1
                place = bisect_left(range(len(source)), number, key=source.row_number)
                if place < len(source) and source.row_number(place) == number:
                    return self.builder.build(source, place)
        return None


@dataclass
class DataRecord:
    """The rows of a dataset. One without a response is tried with its own answer."""

    sources: Sequence[DataSource]
    builder: TaskBuilder
    answers: int = 0
    bad: list[BadRow] = field(default_factory=list)

    def groups(self) -> Iterator[Group]:
        for source in self.sources:
            for place in range(len(source)):
                group = self._group(source, place)
                if group is not None:
                    yield group

    def _group(self, source: DataSource, place: int) -> Group | None:
        try:
            task = self.builder.build(source, place)
            responses = recorded_responses(task)
            if responses is None:
                responses = (recorded_answer(task),)
                self.answers += 1
            return Group(task, responses, (STOP,) * len(responses))
        except RowError as error:
            bad = BadRow(source.name, source.row_number(place), error.reason)
            if self.builder.settings.on_bad_row != "skip":
                raise DataError(f"{bad}\nRepair it, or set dataset.on_bad_row=skip to go on without it.") from error
            self.bad.append(bad)
            return None

    def notes(self) -> list[str]:
        notes = []
        if self.answers:
            notes.append(
                f"{self.answers} rows have no column {RESPONSE!r}: their own answer is tried in its place, as it "
                "stands (a reward that looks for <answer> or \\boxed{} finds none in it)"
            )
        if self.bad:
            notes.append(f"{len(self.bad)} rows cannot be used and are skipped; the first: {self.bad[0]}")
        return notes


def recorded_responses(task: Task) -> tuple[str, ...] | None:
    found: Any = (task.columns or {}).get(RESPONSE)
    if found is None:
        return None
    responses = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    if not responses or not all(isinstance(each, str) for each in responses):
        raise RowError(f"its {RESPONSE} is a {type(found).__name__}; expected a text or a list of texts")
    return responses


def recorded_answer(task: Task) -> str:
    if task.answer is None:
        raise RowError(f"it has neither a column {RESPONSE!r} nor an answer (dataset.answer_key)")
    return str(task.answer)


# ---------------------------------------------------------------------------------------------------------- as rollouts
def batches(groups: Iterable[Group], encoder: TextEncoder | None) -> Iterator[Rollouts]:
    """Recorded responses as a generator would have handed them over. Without an encoder responses have no tokens, and
    images keep their own size."""
    waiting: list[Group] = []
    for group in groups:
        waiting.append(group)
        if sum(len(each.responses) for each in waiting) >= ROWS_AT_ONCE:
            yield as_rollouts(waiting, encoder)
            waiting = []
    if waiting:
        yield as_rollouts(waiting, encoder)


def as_rollouts(groups: Sequence[Group], encoder: TextEncoder | None) -> Rollouts:
    texts = [text for group in groups for text in group.responses]
    finish = [how for group in groups for how in group.finish]
    ids = [response_tokens(text, how, encoder) if encoder else [] for text, how in zip(texts, finish, strict=True)]
    return make_rollouts(
        [seen_prompt(group.task, encoder) for group in groups],
        [place for place, group in enumerate(groups) for _ in group.responses],
        ids,
        None,
        text=texts,
        finish=finish,
        version=0,
        pad_id=encoder.pad_id if encoder else 0,
    )


def response_tokens(text: str, finish: Finish, encoder: TextEncoder) -> list[int]:
    """The tokens of a recorded text, with the end token that it does not show where the response came to its end."""
    end = encoder.stop_ids[:1] if finish == STOP else ()
    return [*encoder.tokenizer.encode(text, add_special_tokens=False), *end]


def seen_prompt(task: Task, encoder: TextEncoder | None) -> Prompt:
    """The prompt of a task with its images decoded, without tokens, which rewards do not see."""
    try:
        task, sizes = measure(task, encoder)
        targets = target_sizes(encoder, sizes, task.media)
        media = tuple(pixels(medium, target) for medium, target in zip(task.media, targets, strict=True))
    except ValueError as error:
        raise DataError(f"{task.origin}: {error}") from error
    nothing = torch.zeros(0, dtype=torch.long)
    return Prompt(task, media, nothing, nothing, nothing)
