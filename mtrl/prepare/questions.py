"""What the datasets have in common: a light first look at every row, and the question that is made of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mtrl.data.row_settings import RowError
from mtrl.prepare.tables import Table
from mtrl.prepare.texts import LeftOut


class Head(NamedTuple):
    """A row without its images: enough to choose by."""

    key: str  # the question's id in the dataset, as a file of ids names it
    id: str  # of the row, unique in the output
    question: str  # rows with the same one are split together
    left_out: str | None = None  # why it becomes no question


@dataclass(frozen=True)
class SourceQuestion:
    """One row of the output, its images as the dataset holds them."""

    id: str
    question_id: str
    prompt: str
    answer: str
    options: list[str] | None
    images: list[Any]
    source: str
    directory: Path  # relative paths of images start here


class RowFault(NamedTuple):
    """A row whose images are missing or damaged."""

    id: str
    reason: str


class RowReader(Protocol):
    """A dataset. Both passes go through the rows in the same order."""

    name: str
    stamp: Any

    def __len__(self) -> int: ...

    def heads(self) -> Iterator[Head]: ...

    def questions(self, start: int, wanted: np.ndarray) -> Iterator[tuple[int, SourceQuestion | RowFault]]:
        """Place and question of the wanted rows from `start` on, or what is wrong with it."""


class Converter(Protocol):
    """How one table's rows become questions."""

    @property
    def text(self) -> Sequence[str]:
        """The columns of a first look."""

    @property
    def columns(self) -> Sequence[str]:
        """All that is read."""

    def head(self, row: dict[str, Any], number: int) -> Head:
        """Raises LeftOut."""

    def question(self, row: dict[str, Any], number: int) -> SourceQuestion: ...

    def key(self, row: dict[str, Any], number: int) -> str: ...


class TableReader:
    """Tables one after the other, a question a row."""

    def __init__(self, name: str, tables: Sequence[tuple[Table, Converter]]) -> None:
        self.name, self.tables = name, tables
        self.stamp = [table.stamp for table, _ in tables]

    def __len__(self) -> int:
        return sum(len(table) for table, _ in self.tables)

    def heads(self) -> Iterator[Head]:
        for table, convert in self.tables:
            for number, row in enumerate(table.scan(convert.text)):
                try:
                    yield convert.head(row, number)
                except LeftOut as left_out:
                    key = convert.key(row, number)
                    yield Head(key, key, key, str(left_out))

    def questions(self, start: int, wanted: np.ndarray) -> Iterator[tuple[int, SourceQuestion | RowFault]]:
        first = 0
        for table, convert in self.tables:
            begin = max(0, start - first)
            if begin < len(table):
                for number, row in enumerate(table.scan(convert.columns, begin), begin):
                    if wanted[first + number]:
                        yield first + number, made(convert, row, number)
            first += len(table)


def made(convert: Converter, row: dict[str, Any], number: int) -> SourceQuestion | RowFault:
    try:
        return convert.question(row, number)
    except RowError as error:
        return RowFault(convert.key(row, number), error.reason)
