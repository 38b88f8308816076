"""A scanned dataset: the rows to use, in the order of the files.

dataset = open_dataset("train.jsonl", settings, encoder, bad_rows_path=run / "bad_rows.jsonl")
dataset.task(0)
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtrl.data.cache import DiskCache
from mtrl.data.columns import apply_column_aliases, list_columns
from mtrl.data.lengths import BAD, GOOD, SAMPLED_ROWS, TOO_BIG, Scanner, SourceScan, scan_source
from mtrl.data.missing import CONTINUE_ANYWAY, ScanNotes
from mtrl.data.prompts import TaskBuilder
from mtrl.data.row_settings import BadRow, DataError, DataSettings, DataSource, list_bad_rows, read_initial_bad_rows
from mtrl.data.sources import open_sources
from mtrl.protocols import PromptEncoder
from mtrl.types import Task

WARN_OVERLONG_SHARE = 0.1  # warn if a larger share of the prompts is over the length limit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counts:
    """Numbers of rows."""

    total: int
    used: int
    bad: int
    overlong: int
    too_big: int  # images larger than max_image_side under big_images: filter


class Dataset:
    """Tasks by position; rows are read from disk on access."""

    def __init__(
        self,
        sources: Sequence[DataSource],
        builder: TaskBuilder,
        scans: Sequence[SourceScan],
        settings: DataSettings,
        left_out: Set[tuple[str, int]] | None = None,
    ) -> None:
        """`left_out`: rows (file, row) that a resumed run never used. Other rows that are bad now were fine at its
        start; they stay in its order and are skipped there."""
        self.sources, self.builder, self.scans, self.settings = tuple(sources), builder, tuple(scans), settings
        overlong = [(scan.state == GOOD) & (scan.length > settings.max_prompt_length) for scan in scans]
        late = [_find_late_rows(source, scan, left_out) for source, scan in zip(sources, scans, strict=True)]
        self.late = sum(int(rows.sum()) for rows in late)  # rows that have become bad since the run began
        use = [(scan.state == GOOD) & ~over | rows for scan, over, rows in zip(scans, overlong, late, strict=True)]
        rows = [np.flatnonzero(used) for used in use]
        self._first = np.cumsum([0, *map(len, rows)])  # position of the first row of each source
        self._source = np.repeat(np.arange(len(rows)), [len(used) for used in rows])
        self._row = _concatenate(rows)
        self.lengths = _concatenate([scan.length[used] for scan, used in zip(scans, use, strict=True)])
        self.pixels = _concatenate([scan.pixels[used] for scan, used in zip(scans, use, strict=True)])
        self.bad_rows = tuple(_list_bad_rows(self.sources, self.scans, overlong, settings))
        filtered = sum(int(over.sum()) for over in overlong) if settings.filter_overlong_prompts else 0
        too_big = sum(int((scan.state == TOO_BIG).sum()) for scan in scans)
        self.counts = Counts(sum(map(len, sources)), len(self._row), len(self.bad_rows), filtered, too_big)

    def __len__(self) -> int:
        return len(self._row)

    @property
    def fingerprint(self) -> str:
        """Hash the rows and which of them are used: a saved position is valid only for the same hash."""
        digest = hashlib.blake2b(digest_size=8)
        for number, source in enumerate(self.sources):
            digest.update(source.fingerprint.encode())
            digest.update(self._row[self._source == number].astype("<i8").tobytes())
        return digest.hexdigest()

    def task(self, position: int) -> Task:
        """Build a task, or raise RowError if the row has become unreadable since the scan."""
        return self.builder.build(self.sources[self._source[position]], int(self._row[position]))

    def locate(self, position: int) -> tuple[str, int]:
        """Return the file and the row number of a task, for messages."""
        source = self.sources[self._source[position]]
        return source.name, source.row_number(int(self._row[position]))

    def changed_file(self, position: int) -> str | None:
        """Return a media file of a task that is another one than the scan has seen."""
        return self.scans[self._source[position]].changed_file(int(self._row[position]))

    def find_position(self, task_id: str) -> int:
        fingerprint, _, row = task_id.rpartition(":")
        for number, source in enumerate(self.sources):
            if source.fingerprint == fingerprint and row.isdigit():
                low, high = int(self._first[number]), int(self._first[number + 1])
                position = low + bisect_left(self._row[low:high], int(row) + 1, key=source.row_number)
                if position < high and self.locate(position)[1] == int(row) + 1:
                    return position
        raise DataError(f"no row of this dataset has the id {task_id!r}; the data changed since it was drawn")


def open_dataset(
    data: str | Sequence[DataSource],
    settings: DataSettings,
    encoder: PromptEncoder | None,
    *,
    cache_dir: Path | None = None,
    bad_rows_path: Path | None = None,
    answer_rewards: Sequence[str] = (),
    resuming: bool = False,
    workers: int | None = None,
) -> Dataset:
    """Open and scan the data; raise an error for unusable rows or leave them out. `answer_rewards`: names of rewards
    that need an answer; `resuming`: the rows of this run have passed a scan before."""
    left_out = None
    if resuming and settings.on_bad_row != "error":
        left_out = read_initial_bad_rows(bad_rows_path) if bad_rows_path is not None else set()
    dataset = scan_dataset(data, settings, encoder, left_out=left_out, cache_dir=cache_dir, workers=workers)
    counts = dataset.counts
    if not counts.total:
        names = ", ".join(source.name for source in dataset.sources[:3])
        raise DataError(f"{names} holds no row; a row is an object with the column dataset.prompt_key")
    if dataset.bad_rows and settings.on_bad_row != "skip" and left_out is None:
        raise DataError.from_bad_rows(dataset.bad_rows, counts.total)
    if dataset.late:
        logger.warning("%d of %d rows have become unusable since the run began and will be skipped",
                       dataset.late, counts.total)  # fmt: skip
    if resuming and (written := sum(scan.rescanned for scan in dataset.scans)):
        logger.warning("the image or video files of %d rows were written after the last scan; the resumed run uses "
                       "them as they are now", written)  # fmt: skip
    if dataset.bad_rows:
        if bad_rows_path is not None and left_out is None:
            list_bad_rows(bad_rows_path, dataset.bad_rows)
        where = f", listed in {bad_rows_path}" if bad_rows_path else ""
        logger.warning("%d of %d rows cannot be used and are skipped%s; the first: %s",
                       counts.bad, counts.total, where, dataset.bad_rows[0])  # fmt: skip
    if counts.overlong > WARN_OVERLONG_SHARE * counts.total:
        logger.warning("%d of %d prompts (%.0f%%) are longer than dataset.max_prompt_length=%d and are left out",
                       counts.overlong, counts.total, 100 * counts.overlong / counts.total,
                       settings.max_prompt_length)  # fmt: skip
    if not len(dataset):
        raise DataError(
            f"none of {counts.total} rows can be used: {counts.bad} bad, {counts.overlong} over "
            f"dataset.max_prompt_length={settings.max_prompt_length}, {counts.too_big} over dataset.max_image_side"
        )
    notes = ScanNotes(dataset.sources, dataset.scans, dataset.builder)
    missing = notes.missing(answer_rewards)
    if missing and settings.on_missing == "error":
        raise DataError("\n".join([*missing, CONTINUE_ANYWAY]))
    for message in filter(None, [*missing, notes.extra_images()]):
        logger.warning("%s", message)
    return dataset


def scan_dataset(
    data: str | Sequence[DataSource],
    settings: DataSettings,
    encoder: PromptEncoder | None,
    *,
    left_out: Set[tuple[str, int]] | None = None,
    cache_dir: Path | None = None,
    workers: int | None = None,
) -> Dataset:
    """Return the dataset with the results of the scan, including bad rows, without raising an error for them."""
    cache = DiskCache(cache_dir)
    builder = TaskBuilder.from_settings(settings)
    opened = open_sources(data, cache) if isinstance(data, str) else list(data)
    sources = apply_column_aliases(opened, settings, cache)
    if builder.template is not None and any(map(len, sources)):
        for name in builder.template.unknown_names(list_columns(sources, cache)):
            logger.warning("dataset.format_prompt uses %r, a column that none of the inspected rows has: it is empty "
                           "and false there", name)  # fmt: skip
    scanner = Scanner(builder, encoder, settings)
    ends = np.cumsum([0, *map(len, sources)]) * SAMPLED_ROWS // max(1, sum(map(len, sources)))
    scans = [
        scan_source(source, scanner, cache, sampled=int(share), workers=workers)
        for source, share in zip(sources, np.diff(ends), strict=True)
    ]
    return Dataset(sources, builder, scans, settings, left_out)


def _find_late_rows(source: DataSource, scan: SourceScan, left_out: Set[tuple[str, int]] | None) -> np.ndarray:
    """[rows] bool: bad rows that were fine when the run began."""
    late = np.zeros(len(scan.state), bool)
    if left_out is not None:
        for row in np.flatnonzero(scan.state == BAD).tolist():
            late[row] = (source.name, source.row_number(row)) not in left_out
    return late


def _list_bad_rows(
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


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
