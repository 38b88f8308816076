"""A dataset that passed its scan: the rows that will be used, in the order of the files.

dataset = open_dataset("train.jsonl", settings, encoder, bad_rows_path=run / "bad_rows.jsonl")
dataset.task(0)
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from mtrl.data.cache import DiskCache
from mtrl.data.columns import all_columns, with_known_columns
from mtrl.data.lengths import BAD, GOOD, SAMPLED, TOO_BIG, Scanner, SourceScan, scan_source
from mtrl.data.missing import GOES_ON, Noted
from mtrl.data.prompts import TaskBuilder
from mtrl.data.row_settings import BadRow, DataError, DataSettings, left_out_at_first, list_bad_rows
from mtrl.data.sources import DataSource, open_sources
from mtrl.protocols import PromptEncoder
from mtrl.types import Task

MANY_OVERLONG = 0.1  # share of prompts over the length limit beyond which there is a warning

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counts:
    """What became of the rows."""

    total: int
    kept: int
    bad: int
    overlong: int
    too_big: int  # images larger than max_image_side under big_images: filter


class Dataset:
    """Tasks by position. Rows are read from disk when asked for."""

    def __init__(
        self,
        sources: Sequence[DataSource],
        builder: TaskBuilder,
        scans: Sequence[SourceScan],
        settings: DataSettings,
        left_out: Set[tuple[str, int]] | None = None,
    ) -> None:
        """`left_out`: a run goes on that never used these rows (file, row). Others that are bad now were fine then, and
        keep their place in its order, to be skipped there."""
        self.sources, self.builder, self.scans, self.settings = tuple(sources), builder, tuple(scans), settings
        overlong = [_overlong(scan, settings) for scan in scans]
        late = [_late(source, scan, left_out) for source, scan in zip(sources, scans, strict=True)]
        self.late = sum(int(rows.sum()) for rows in late)  # rows that have become bad since the run began
        keep = [(scan.state == GOOD) & ~over | rows for scan, over, rows in zip(scans, overlong, late, strict=True)]
        rows = [np.flatnonzero(kept) for kept in keep]
        self._source = np.repeat(np.arange(len(rows)), [len(found) for found in rows])
        self._row = _joined(rows)
        self.lengths = _joined([scan.length[kept] for scan, kept in zip(scans, keep, strict=True)])
        self.pixels = _joined([scan.pixels[kept] for scan, kept in zip(scans, keep, strict=True)])
        self.bad_rows = tuple(_bad_rows(self.sources, self.scans, overlong, settings))
        filtered = sum(int(over.sum()) for over in overlong) if settings.filter_overlong_prompts else 0
        too_big = sum(int((scan.state == TOO_BIG).sum()) for scan in scans)
        self.counts = Counts(sum(map(len, sources)), len(self._row), len(self.bad_rows), filtered, too_big)
        self._first = np.cumsum([0, *(len(found) for found in rows)])

    def __len__(self) -> int:
        return len(self._row)

    @property
    def fingerprint(self) -> str:
        """A hash of the rows and of which are used: positions in an order mean the same only while it stays."""
        digest = hashlib.blake2b(digest_size=8)
        for number, source in enumerate(self.sources):
            digest.update(source.fingerprint.encode())
            digest.update(self._row[self._source == number].astype("<i8").tobytes())
        return digest.hexdigest()

    def task(self, position: int) -> Task:
        """Raises RowError when the row has become unreadable since the scan."""
        return self.builder.build(self.sources[self._source[position]], int(self._row[position]))

    def place(self, position: int) -> tuple[str, int]:
        """The file and the row number of a task, for messages."""
        source = self.sources[self._source[position]]
        return source.name, source.row_number(int(self._row[position]))

    def position(self, task_id: str) -> int:
        """Where the task of that id stands."""
        fingerprint, _, row = task_id.rpartition(":")
        for number, source in enumerate(self.sources):
            if source.fingerprint == fingerprint and row.isdigit():
                low, high = int(self._first[number]), int(self._first[number + 1])
                found = low + _bisect_row(source, self._row[low:high], int(row) + 1)
                if found < high and self.place(found)[1] == int(row) + 1:
                    return found
        raise DataError(f"no row of this dataset has the id {task_id!r}; the data changed since it was drawn")


def open_dataset(
    data: str | Sequence[DataSource],
    settings: DataSettings,
    encoder: PromptEncoder | None,
    *,
    cache_dir: Path | None = None,
    bad_rows_path: Path | None = None,
    truth_for: Sequence[str] = (),
    begun: bool = False,
    workers: int | None = None,
    stream: TextIO | None = None,
) -> Dataset:
    """Opens and scans the data, and refuses or leaves out what cannot be used. `truth_for` names rewards that
    want a truth; `begun` says that a run goes on, whose rows passed a scan before; `stream` gets the progress
    (stderr)."""
    left_out = None
    if begun and settings.on_bad_row != "error":
        left_out = left_out_at_first(bad_rows_path) if bad_rows_path is not None else set()
    dataset = scan_dataset(
        data, settings, encoder, left_out=left_out, cache_dir=cache_dir, workers=workers, stream=stream
    )
    counts = dataset.counts
    if dataset.bad_rows and settings.on_bad_row != "skip" and left_out is None:
        raise DataError.of_rows(dataset.bad_rows, counts.total)
    if dataset.late:
        logger.warning("%d of %d rows have become unusable since the run began and will be skipped",
                       dataset.late, counts.total)  # fmt: skip
    if dataset.bad_rows:
        if bad_rows_path is not None and left_out is None:
            list_bad_rows(bad_rows_path, dataset.bad_rows)
        where = f", listed in {bad_rows_path}" if bad_rows_path else ""
        logger.warning("%d of %d rows cannot be used and are skipped%s; the first: %s",
                       counts.bad, counts.total, where, dataset.bad_rows[0])  # fmt: skip
    if counts.overlong > MANY_OVERLONG * counts.total:
        logger.warning("%d of %d prompts (%.0f%%) are longer than dataset.max_prompt_length=%d and are left out",
                       counts.overlong, counts.total, 100 * counts.overlong / counts.total,
                       settings.max_prompt_length)  # fmt: skip
    if not len(dataset):
        raise DataError(
            f"no row is left to use of {counts.total}: {counts.bad} bad, {counts.overlong} over "
            f"dataset.max_prompt_length={settings.max_prompt_length}, {counts.too_big} over dataset.max_image_side"
        )
    _tell_of_missing(dataset, truth_for)
    return dataset


def _tell_of_missing(dataset: Dataset, truth_for: Sequence[str]) -> None:
    noted = Noted(dataset.sources, dataset.scans, dataset.builder)
    told = noted.missing(truth_for)
    if told and dataset.settings.on_missing == "error":
        raise DataError("\n".join([*told, GOES_ON]))
    for line in filter(None, [*told, noted.beside()]):
        logger.warning("%s", line)


def scan_dataset(
    data: str | Sequence[DataSource],
    settings: DataSettings,
    encoder: PromptEncoder | None,
    *,
    left_out: Set[tuple[str, int]] | None = None,
    cache_dir: Path | None = None,
    workers: int | None = None,
    stream: TextIO | None = None,
) -> Dataset:
    """The dataset with all that the scan found, bad rows included; refuses nothing."""
    cache = DiskCache(cache_dir)
    builder = TaskBuilder.of(settings)
    opened = open_sources(data, cache) if isinstance(data, str) else list(data)
    sources = with_known_columns(opened, settings, cache)
    if builder.template is not None and any(map(len, sources)):
        for name in builder.template.strange_names(all_columns(sources, cache)):
            logger.warning("dataset.format_prompt uses %r, a column that no row has (of those looked at): it is empty "
                           "and false there", name)  # fmt: skip
    scanner = Scanner(builder, encoder, settings)
    ends = np.cumsum([0, *map(len, sources)]) * SAMPLED // max(1, sum(map(len, sources)))
    scans = [
        scan_source(source, scanner, cache, sampled=int(share), workers=workers, stream=stream)
        for source, share in zip(sources, np.diff(ends), strict=True)
    ]
    return Dataset(sources, builder, scans, settings, left_out)


def _late(source: DataSource, scan: SourceScan, left_out: Set[tuple[str, int]] | None) -> np.ndarray:
    """[rows] bool: bad rows that a run has begun with."""
    late = np.zeros(len(scan.state), bool)
    if left_out is not None:
        for row in np.flatnonzero(scan.state == BAD).tolist():
            late[row] = (source.name, source.row_number(row)) not in left_out
    return late


def _overlong(scan: SourceScan, settings: DataSettings) -> np.ndarray:
    return (scan.state == GOOD) & (scan.length > settings.max_prompt_length)


def _bad_rows(
    sources: Sequence[DataSource], scans: Sequence[SourceScan], overlong: Sequence[np.ndarray], settings: DataSettings
) -> list[BadRow]:
    bad = []
    for source, scan, over in zip(sources, scans, overlong, strict=True):
        reasons = dict(scan.reasons)
        assert len(reasons) == int((scan.state == BAD).sum())
        if not settings.filter_overlong_prompts:
            for row in np.flatnonzero(over).tolist():
                reasons[row] = (
                    f"the prompt has {scan.length[row]} tokens, more than dataset.max_prompt_length="
                    f"{settings.max_prompt_length}, and dataset.filter_overlong_prompts is off"
                )
        bad += [BadRow(source.name, source.row_number(row), reason) for row, reason in sorted(reasons.items())]
    return bad


def _bisect_row(source: DataSource, rows: np.ndarray, number: int) -> int:
    """Where the row of that number stands among these; row numbers rise with the index."""
    low, high = 0, len(rows)
    while low < high:
        middle = (low + high) // 2
        if source.row_number(int(rows[middle])) < number:
            low = middle + 1
        else:
            high = middle
    return low


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
