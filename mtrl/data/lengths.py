"""The scan at the start of a run: read every row, check the headers of its images, measure its prompt. The images of
some rows (with `check_images: full`, of all rows) are decoded, since only that shows damage in the middle of a file.

Results are cached per source. The key is the data file (path, size, mtime), the encoder's fingerprint and the settings
that matter; the length limit is not among them, so changing it needs no new scan. Rows whose image files changed in
size or mtime, appeared or disappeared are scanned again, the others are not. The same stamps show later whether a file
is still the one of the scan (`changed_file`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import PIL

from mtrl.data.cache import DiskCache, pack_json, unpack_json
from mtrl.data.columns import find_image_column
from mtrl.data.media import Kind, Size, limit_side
from mtrl.data.parallel import map_rows
from mtrl.data.prompts import MARKS, TaskBuilder
from mtrl.data.row_settings import DataSettings, DataSource, RowError
from mtrl.data.templates import read_template
from mtrl.data.video import check_pixels, measure_media, target_sizes
from mtrl.protocols import PromptEncoder
from mtrl.types import Task
from mtrl.utils.files import regular_file

VERSION = 6  # version of the cached results; raise it when the same row would now get another result
GOOD, BAD, TOO_BIG = 0, 1, 2  # states of a row
# Notes about a row, which may have several.
UNREAD_MEDIA: dict[Kind, int] = {"image": 1, "video": 2}
MARK_AS_TEXT: dict[Kind, int] = {"image": 4, "video": 8}
EXTRA_IMAGES = 16
SAMPLED_ROWS = 64  # rows whose media are decoded, spread over the data

HASHED_BYTES = 16 << 10  # at each end of a media file; most of them are read for its header anyway

FileStamp = tuple[str, int, int, int]  # path, bytes, mtime in ns, hash; -1, -1, 0 if the file does not exist


@dataclass(frozen=True)
class RowScan:
    """Result for one row."""

    state: int = GOOD
    reason: str = ""
    length: int = -1  # prompt tokens; -1: no encoder, or a bad row
    pixels: int = 0  # total of all images and frames, at the sizes the model sees
    note: int = 0  # a sum of the notes above
    sizes: tuple[tuple[int, int, int], ...] = ()  # height and width of each medium in the data, frames shown
    files: tuple[FileStamp, ...] = ()


@dataclass
class SourceScan:
    """The `RowScan` of every row of a source, as arrays."""

    state: np.ndarray  # [rows]
    length: np.ndarray  # [rows]
    pixels: np.ndarray  # [rows]
    note: np.ndarray  # [rows]
    sizes: np.ndarray  # [media, 4]: row, height, width, frames (0: an image)
    stamps: np.ndarray  # [files, 4]: row, bytes, mtime, hash; sorted by row
    paths: list[str] = field(default_factory=list)  # [files]
    reasons: dict[int, str] = field(default_factory=dict)  # why each bad row cannot be used, by row
    rescanned: int = 0  # rows that the cache had, with files that were written since

    @classmethod
    def empty(cls, rows: int) -> SourceScan:
        return cls(
            state=np.zeros(rows, np.uint8),
            length=np.full(rows, -1, np.int32),
            pixels=np.zeros(rows, np.int64),
            note=np.zeros(rows, np.uint8),
            sizes=np.zeros((0, 4), np.int64),
            stamps=np.zeros((0, 4), np.int64),
        )

    def update(self, rows: Sequence[int], results: Sequence[RowScan]) -> None:
        """Replace the results of these rows."""
        is_new = np.zeros(len(self.state), bool)
        is_new[list(rows)] = True
        old = ~is_new[self.stamps[:, 0]]
        paths = [path for path, is_old in zip(self.paths, old, strict=True) if is_old]
        stamps = [(row, *stamp) for row, scan in zip(rows, results, strict=True) for _, *stamp in scan.files]
        sizes = [(row, *size) for row, scan in zip(rows, results, strict=True) for size in scan.sizes]
        paths += [path for scan in results for path, *_ in scan.files]
        all_stamps = np.concatenate([self.stamps[old], np.array(stamps, np.int64).reshape(-1, 4)])
        order = np.argsort(all_stamps[:, 0], kind="stable")
        self.paths, self.stamps = [paths[index] for index in order.tolist()], all_stamps[order]
        self.sizes = np.concatenate([self.sizes[~is_new[self.sizes[:, 0]]], np.array(sizes, np.int64).reshape(-1, 4)])
        for row, scan in zip(rows, results, strict=True):
            self.state[row], self.length[row], self.pixels[row] = scan.state, scan.length, scan.pixels
            self.note[row] = scan.note
            self.reasons.pop(row, None)
            if scan.state == BAD:
                self.reasons[row] = scan.reason

    def mark_bad(self, row: int, reason: str) -> None:
        self.state[row], self.length[row], self.pixels[row], self.note[row] = BAD, -1, 0, 0
        self.reasons[row] = reason

    def sizes_of(self, kind: Kind) -> np.ndarray:
        """[media, 4]: the `sizes` of all images, or of all videos."""
        return self.sizes[(self.sizes[:, 3] > 0) == (kind == "video")]

    def rows_over(self, side: int, kind: Kind) -> np.ndarray:
        """Return the rows that were left out and have an image, or a video, over this size."""
        sizes = self.sizes_of(kind)
        rows = np.unique(sizes[sizes[:, 1:3].max(1, initial=0) > side, 0])
        return rows[self.state[rows] == TOO_BIG]

    def rows_with_note(self, note: int) -> np.ndarray:
        return np.flatnonzero(self.note & note)

    def rows_with_media(self, among: Sequence[int], count: int) -> list[int]:
        """Return up to `count` good rows with images or videos, spread evenly."""
        rows = np.unique(self.sizes[:, 0])
        rows = rows[(self.state[rows] == GOOD) & np.isin(rows, among)]
        return rows[spread_evenly(len(rows), count)].tolist()

    def changed_rows(self) -> list[int]:
        """Return the rows with a media file that has changed."""
        stamps = zip(self.paths, self.stamps.tolist(), strict=True)
        return sorted({row for path, (row, size, mtime, _) in stamps if _size_and_mtime(path) != (size, mtime)})

    @cached_property
    def _stamped_rows(self) -> np.ndarray:
        return np.ascontiguousarray(self.stamps[:, 0])

    def changed_file(self, row: int) -> str | None:
        """Return a media file of a good row that is another one than the scan has seen. A file that was only written
        again, with the same content, is the same."""
        if self.state[row] != GOOD:
            return None
        low, high = np.searchsorted(self._stamped_rows, [row, row + 1]).tolist()
        for path, (_, size, mtime, digest) in zip(self.paths[low:high], self.stamps[low:high].tolist(), strict=True):
            if _size_and_mtime(path) != (size, mtime) and _stamp(path)[1::2] != (size, digest):
                return path
        return None


@dataclass(frozen=True)
class Scanner:
    """Scans single rows; worker processes inherit it by fork."""

    builder: TaskBuilder
    encoder: PromptEncoder | None
    settings: DataSettings

    def scan(self, source: DataSource, index: int) -> RowScan:
        files: tuple[FileStamp, ...] = ()
        try:
            task = self.builder.build(source, index)
            files = tuple(_stamp(m.source) for m in task.media if isinstance(m.source, str))  # before reading them
            return self._measure(task, files, self._note(source, task))
        except RowError as error:
            return RowScan(BAD, error.reason, files=files)

    def find_damage(self, source: DataSource, index: int) -> str:
        """Return why an image of the row cannot be decoded, or an empty string."""
        try:
            check_pixels(measure_media(self.builder.build(source, index), self.encoder, verify=False)[0].media)
        except RowError as error:
            return error.reason
        return ""

    def _note(self, source: DataSource, task: Task) -> int:
        if task.media:
            return EXTRA_IMAGES if find_image_column(task.columns or {}) is not None else 0
        if unread := self.builder.find_unread_media(source, task.columns or {}):
            return sum(UNREAD_MEDIA[kind] for kind in unread)
        return sum(MARK_AS_TEXT[kind] for mark, kind in MARKS.items() if mark in task.text)

    def _measure(self, task: Task, files: tuple[FileStamp, ...], note: int) -> RowScan:
        task, sizes = measure_media(task, self.encoder)
        if self.settings.check_images == "full":
            check_pixels(task.media)
        frame_counts = [0 if medium.clip is None else len(medium.clip.frames) for medium in task.media]
        media_sizes = tuple((*size, frames) for size, frames in zip(sizes, frame_counts, strict=True))
        limit = self.settings.max_image_side
        if self.settings.big_images == "filter" and limit is not None and any(max(size) > limit for size in sizes):
            return RowScan(TOO_BIG, sizes=media_sizes, files=files)
        limited = [limit_side(size, limit) for size in sizes]
        targets = target_sizes(self.encoder, limited, task.media)
        length = prompt_length(self.encoder, task, limited)
        pixels = sum(max(1, frames) * h * w for frames, (h, w) in zip(frame_counts, targets, strict=True))
        return RowScan(GOOD, "", length, pixels, note, media_sizes, files)


def scan_source(
    source: DataSource, scanner: Scanner, cache: DiskCache, sampled: int, workers: int | None = None
) -> SourceScan:
    """Scan all rows, using the cache for unchanged ones. The images of `sampled` of the scanned rows are decoded."""
    key = None if source.stamp is None else _cache_key(source, scanner)
    scan = None if key is None else _load(cache, key, len(source))
    todo = range(len(source)) if scan is None else scan.changed_rows()
    if scan is None:
        scan = SourceScan.empty(len(source))
    else:
        scan.rescanned = len(todo)
    if todo:
        results = map_rows(partial(scanner.scan, source), todo, f"checking {source.name}", workers=workers)
        scan.update(todo, results)
        for row in [] if scanner.settings.check_images == "full" else scan.rows_with_media(todo, sampled):
            if reason := scanner.find_damage(source, row):
                scan.mark_bad(row, reason)
        if key is not None:
            _store(cache, key, scan)
    return scan


def spread_evenly(rows: int, count: int) -> np.ndarray:
    """Return up to `count` different indices, evenly from the first to the last row.

    >>> spread_evenly(9, 3).tolist(), spread_evenly(2, 5).tolist()
    ([0, 4, 8], [0, 1])
    """
    return np.unique(np.linspace(0, rows - 1, min(rows, count)).astype(np.int64))


def prompt_length(encoder: PromptEncoder | None, task: Task, sizes: Sequence[Size]) -> int:
    """Return the tokens of the prompt, -1 without an encoder. `sizes` are those before `target_size`: the encoder
    applies it itself, and applied twice it may shrink a long strip twice."""
    if encoder is None:
        return -1
    try:
        return encoder.length(task, sizes)
    except ValueError as error:
        raise RowError(str(error)) from error


def _stamp(path: str) -> FileStamp:
    size, mtime = _size_and_mtime(path)
    digest = hashlib.blake2b(digest_size=8)
    try:
        with regular_file(path).open("rb") as file:
            digest.update(file.read(HASHED_BYTES))
            file.seek(max(0, size - HASHED_BYTES))
            digest.update(file.read(HASHED_BYTES))
    except (OSError, ValueError):  # whoever reads the medium reports it
        return path, size, mtime, 0
    return path, size, mtime, int.from_bytes(digest.digest(), "little", signed=True)


def _size_and_mtime(path: str) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def _cache_key(source: DataSource, scanner: Scanner) -> dict[str, Any]:
    settings = scanner.settings
    names = ("prompt_key", "image_key", "video_key", "options_key", "max_image_side", "big_images", "system_prompt",
             "on_missing", "check_images")  # fmt: skip
    template = settings.format_prompt and read_template(settings.format_prompt)
    return {
        "version": [VERSION, PIL.__version__],
        "stamp": source.stamp,
        "rows": source.fingerprint,
        "encoder": scanner.encoder.fingerprint() if scanner.encoder else None,
        "settings": {name: getattr(settings, name) for name in names},
        "image_dir": os.path.abspath(os.path.expanduser(settings.image_dir)) if settings.image_dir else None,
        "template": hashlib.sha256(template.encode()).hexdigest() if template else None,
    }


ARRAYS = ("state", "length", "pixels", "note", "sizes", "stamps")


def _store(cache: DiskCache, key: Any, scan: SourceScan) -> None:
    reasons = [[row, reason] for row, reason in scan.reasons.items()]
    arrays = {name: getattr(scan, name) for name in ARRAYS}
    cache.store("scan", key, arrays | {"paths": pack_json(scan.paths), "reasons": pack_json(reasons)})


def _load(cache: DiskCache, key: Any, rows: int) -> SourceScan | None:
    entry = cache.load("scan", key)
    if entry is None or {*ARRAYS, "paths", "reasons"} - entry.keys() or len(entry["state"]) != rows:
        return None
    reasons = {int(row): str(reason) for row, reason in unpack_json(entry["reasons"])}
    arrays: dict[str, Any] = {name: entry[name] for name in ARRAYS}
    return SourceScan(**arrays, paths=unpack_json(entry["paths"]), reasons=reasons)
