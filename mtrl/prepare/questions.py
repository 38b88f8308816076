"""The interface of the datasets: a first pass over the text of every row, and the conversion of a row to a question."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mtrl.data.row_settings import RowError
from mtrl.prepare.tables import Table
from mtrl.prepare.texts import SkipRow


class RowHeader(NamedTuple):
    """The ids of a row, enough to select it."""

    key: str  # the question's id in the dataset, as in a file of ids
    id: str  # the row's id, unique in the output
    question: str  # rows with the same one stay in the same split
    left_out: str | None = None  # why the row does not become a question


@dataclass(frozen=True)
class SourceQuestion:
    """One row of the output, with its images as the dataset stores them."""

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
    """A dataset. Both passes return the rows in the same order."""

    name: str
    stamp: Any

    def __len__(self) -> int: ...

    def headers(self) -> Iterator[RowHeader]: ...

    def questions(self, start: int, wanted: np.ndarray) -> Iterator[tuple[int, SourceQuestion | RowFault]]:
        """Yield index and question, or its fault, of the wanted rows from `start` on."""


@dataclass(frozen=True)
class DatasetConverter(ABC):
    """Converts the rows of one table to questions."""

    table: Table
    text_columns: tuple[str, ...]  # all that the first pass reads
    image_columns: tuple[str, ...]

    @abstractmethod
    def key(self, row: dict[str, Any], number: int) -> str:
        """Return the question's id in the dataset."""

    @abstractmethod
    def header(self, row: dict[str, Any], number: int) -> RowHeader:
        """Return the ids of a row, or raise SkipRow."""

    @abstractmethod
    def question(self, row: dict[str, Any], number: int) -> SourceQuestion:
        """Convert a row, or raise RowError if its images are missing."""


class TableReader:
    """Reads tables one after the other, one question per row."""

    def __init__(self, name: str, converters: Sequence[DatasetConverter]) -> None:
        self.name, self.converters = name, converters
        self.stamp = [converter.table.stamp for converter in converters]

    def __len__(self) -> int:
        return sum(len(converter.table) for converter in self.converters)

    def headers(self) -> Iterator[RowHeader]:
        for converter in self.converters:
            for number, row in enumerate(converter.table.scan(converter.text_columns)):
                try:
                    yield converter.header(row, number)
                except SkipRow as reason:
                    key = converter.key(row, number)
                    yield RowHeader(key, key, key, str(reason))

    def questions(self, start: int, wanted: np.ndarray) -> Iterator[tuple[int, SourceQuestion | RowFault]]:
        first = 0
        for converter in self.converters:
            table, begin = converter.table, max(0, start - first)
            columns = (*converter.text_columns, *converter.image_columns)
            for number, row in enumerate(table.scan(columns, begin), begin) if begin < len(table) else ():
                if wanted[first + number]:
                    yield first + number, _convert(converter, row, number)
            first += len(table)


def _convert(converter: DatasetConverter, row: dict[str, Any], number: int) -> SourceQuestion | RowFault:
    try:
        return converter.question(row, number)
    except RowError as error:
        return RowFault(converter.key(row, number), error.reason)
