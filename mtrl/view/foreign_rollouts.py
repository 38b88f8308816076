"""Stores of responses without a record: our rollouts.jsonl, verl's rollout JSONL, and TRL's completions in parquet."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from mtrl.tracking.blocks import MAX_RESPONSES, DamagedRecord
from mtrl.tracking.jsonl import MAX_LINE_BYTES, parse_row, rotated_parts
from mtrl.utils.files import is_own_file, regular_file
from mtrl.utils.metric_history import is_number, is_step
from mtrl.view.history import LineTail
from mtrl.view.rollout_store import SORTED_BY, Columns, Json, as_numbers, find_refused, refusals

OUR_HEAD = re.compile(rb'^\{"step": (\d{1,12}), "attempt": (\d{1,9}),')  # the start of our rows: saves parsing them
SCAN_BYTES = 32 * 2**20  # bytes of a file scanned per refresh
STEPS_CACHED = 16
NOT_PARTS = {
    *("input", "output", "gts", "score", "step", "prompt", "completion", "reward", "advantage", "attempt", "time"),
    *("id", "response", "answer", "rewards", "failed", "tokens", "finish", "version"),
}  # columns that are not parts of a reward
HEAD_CHARS = 120
STEP_DIGITS = 15  # of a step in the name of a file: a date is one, but larger numbers are not exact on the page
MAX_DEPTH = 20  # of messages in messages
MAX_PARQUET_BYTES = 2**30  # of a step, uncompressed: a small file may expand to any size
TOO_DEEP = "(nested too deeply)"


class RowRollouts:
    """Base class of stores whose steps are lists of plain rows, read on demand."""

    def __init__(self) -> None:
        self._columns: dict[int, tuple[Hashable, Columns]] = {}  # step -> its version and its columns
        self._rows_of_version = lru_cache(STEPS_CACHED)(lambda step, version: to_viewer_rows(step, self.read(step)))

    def read(self, step: int) -> Iterable[Json]:
        raise NotImplementedError

    def version(self, step: int) -> Hashable:
        """A value that changes with the rows of the step; KeyError if there is no such step."""
        raise NotImplementedError

    def columns(self, step: int) -> Columns:
        version = self.version(step)
        known_version, columns = self._columns.get(step, (None, {}))
        if known_version != version:
            rows = [read_numbers(row) for row in self.read(step)]  # without the texts: a step may have many rows
            columns = {name: as_numbers([row.get(name) for row in rows], len(rows)) for name in SORTED_BY}
            self._columns[step] = (version, columns)
        return columns

    def _step_rows(self, step: int) -> list[Json]:
        return self._rows_of_version(step, self.version(step))

    def rows(self, step: int, indices: Sequence[int]) -> list[Json]:
        rows = self._step_rows(step)
        hidden = ("text", "prompt", "answer")
        return [{name: x for name, x in rows[i].items() if name not in hidden} for i in indices if i < len(rows)]

    def response(self, step: int, row: int) -> Json:
        rows = self._step_rows(step)
        if not 0 <= row < len(rows):
            raise KeyError(row)
        one = dict(rows[row])
        members = [other["row"] for other in rows if other["group"] == one["group"]]
        texts = {"text": one.pop("prompt"), "answer": one.pop("answer")}
        prompt = {**texts, "images": [], "perturbed": [], "pools": None}
        return one | {"prompt": prompt, "pieces": None, "streams": {}, "segments": [], "mass": [], "members": members}

    def maps(self, step: int, row: int) -> Json:
        raise KeyError(row)

    def image(self, step: int, key: str) -> bytes:
        raise KeyError(key)


def to_viewer_rows(step: int, rows: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Rows of any of these formats with the viewer's keys, grouped by prompt."""
    groups: dict[str, int] = {}
    converted = []
    for index, row in enumerate(rows):
        prompt = as_text(first(row, "input", "prompt", default=""))
        name = as_text(row["id"]) if "id" in row else prompt
        group = groups.setdefault(name, len(groups))
        text = as_text(first(row, "response_turns", "response", "output", "completion", default=""))
        answer = first(row, "answer", "gts")
        converted.append({
            "step": step, "row": index, "group": group, "id": name if "id" in row else f"prompt {group + 1}",
            **read_numbers(row), "parts": read_parts(row),
            **{name: plain_value(row.get(name)) for name in ("finish", "version", "failed")},
            "head": text[:HEAD_CHARS], "text": text, "prompt": prompt,
            "answer": None if answer is None else as_text(answer),
        })  # fmt: skip
    return converted


def read_numbers(row: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers that a row is sorted by. Its reward is the sum of its parts if it has none."""
    reward = first(row, "reward", "score")
    if not is_number(reward):
        parts = read_parts(row)
        reward = sum(x for x in parts.values() if is_number(x)) if parts else None
    return {"reward": reward, **{name: number_or_none(row.get(name)) for name in ("advantage", "tokens")}}


def read_parts(row: Mapping[str, Any]) -> dict[str, Any]:
    parts = row.get("rewards")
    if isinstance(parts, dict):
        return {str(name): plain_value(x) for name, x in parts.items()}
    return find_reward_parts(row)


def find_reward_parts(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row under unknown names: in the files of TRL and verl these are parts of rewards."""
    return {str(name): x for name, x in row.items() if name not in NOT_PARTS and is_number(x)}


def first(row: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), default)


def number_or_none(value: Any) -> float | None:
    return value if is_number(value) else None


def plain_value(value: Any) -> Any:
    """A flag, a number or a short text; None for NaN, infinity and numbers beyond all limits."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return number_or_none(value)
    return as_text(value)[:HEAD_CHARS]


def as_text(value: Any, depth: int = 0) -> str:
    """A prompt or an answer as text: of a chat the contents of its messages."""
    if isinstance(value, str):
        return value
    if depth > MAX_DEPTH:
        return TOO_DEEP
    if isinstance(value, list) and value and all(isinstance(each, dict) and "content" in each for each in value):
        return "\n".join(as_text(each["content"], depth + 1) for each in value)
    if isinstance(value, list) and value and all(isinstance(each, dict) and "type" in each for each in value):
        return "".join(as_text(each.get("text") or f"<{each['type']}>", depth + 1) for each in value)
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        return TOO_DEEP


# --------------------------------------------------------------------------------------------------------------- JSONL
class JsonlRollouts(RowRollouts):
    """Rows of JSONL files by their step, or by the step in the name of the file (verl: `12.jsonl`). Only the locations
    of the rows stay in memory; files are scanned a piece at a time, and only files of the directory `root`."""

    def __init__(self, root: Path, files: Sequence[Path] = (), rotating: Path | None = None) -> None:
        super().__init__()
        self.root, self.files, self.rotating = root, list(files), rotating
        self.damaged = 0
        self._refused: list[Path] = []
        self._tails: dict[int, LineTail] = {}  # by inode: a full part is renamed
        self._locations: dict[int, array[int]] = {}  # step -> (inode, offset, length) of each row
        self._attempts: dict[int, int] = {}
        self._is_scanning = False

    def refresh(self) -> None:
        files = self.files if self.rotating is None else [*rotated_parts(self.rotating), self.rotating]
        bytes_left = SCAN_BYTES
        self._refused = find_refused(files, self.root)
        for path in files:
            try:
                inode = path.stat().st_ino
            except OSError:
                continue  # rotation renames and deletes files
            if not is_own_file(path, self.root):
                continue
            tail = self._tails.setdefault(inode, LineTail(path, self.root))
            tail.path = path
            start = tail.offset
            for offset, line in tail.read_new(bytes_left):
                self._add(inode, path, offset, line)
            bytes_left -= max(0, tail.offset - start)
            if bytes_left <= 0:
                break
        self._is_scanning = bytes_left <= 0

    def _add(self, inode: int, path: Path, offset: int, line: bytes) -> None:
        step, attempt = parse_step(line, path)
        if step is None:
            self.damaged += bool(line.strip())
            return
        if attempt != self._attempts.get(step, attempt):
            self._locations.pop(step, None)  # the last attempt counts
        self._attempts[step] = attempt
        self._locations.setdefault(step, array("Q")).extend((inode, offset, len(line)))

    def steps(self) -> Mapping[int, int]:
        return {step: len(places) // 3 for step, places in sorted(self._locations.items())}

    def version(self, step: int) -> Hashable:
        return self._attempts[step], len(self._locations[step])

    def read(self, step: int) -> Iterator[Json]:
        numbers = iter(self._locations[step][:])
        places = zip(numbers, numbers, numbers, strict=True)
        for inode, rows in groupby(places, key=lambda place: place[0]):
            with regular_file(self._tails[inode].path).open("rb") as file:
                for _, offset, length in rows:
                    file.seek(offset)
                    row = parse_row(file.read(length))
                    yield row if row is not None else {"response": "(this row is damaged)"}

    def skipped(self) -> list[str]:
        messages = [f"rollouts: {self.damaged} lines are damaged and left out"] if self.damaged else []
        if too_long := sum(tail.too_long for tail in self._tails.values()):
            messages.append(f"rollouts: {too_long} lines above {MAX_LINE_BYTES // 2**20} MiB are left out")
        messages += refusals(self._refused)
        return messages + (["rollouts: the files are large and are still being read"] if self._is_scanning else [])


def parse_step(line: bytes, path: Path) -> tuple[int | None, int]:
    """(step, attempt) of a row; the step is None if the line is damaged."""
    if ours := OUR_HEAD.match(line):
        return (int(ours[1]) if line.rstrip().endswith(b"}") else None), int(ours[2])
    row = parse_row(line)
    if row is None:
        return None, 0
    step = row.get("step")
    if is_step(step):
        return step, 0
    return (int(path.stem[-STEP_DIGITS:]) if path.stem.isdecimal() else 0), 0


# ------------------------------------------------------------------------------------------------------------- parquet
class ParquetRollouts(RowRollouts):
    """TRL's `completions/completions_00012.parquet`: one file per step, or any parquet file with such columns."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        super().__init__()
        self.path = path  # a file or a directory
        self.root = path if root is None else root
        self._files: dict[int, tuple[Path, int]] = {}  # step -> file, number of rows
        self._versions: dict[Path, tuple[int, int]] = {}  # size and time of each file
        self._damaged: set[str] = set()
        self._too_large: set[str] = set()
        self._refused: list[Path] = []

    def refresh(self) -> None:
        files = sorted(self.path.glob("*.parquet")) if self.path.is_dir() else [self.path]
        self._refused = find_refused(files, self.root)
        for path in files:
            try:
                status = path.stat()
            except OSError:
                continue  # just deleted
            if not is_own_file(path, self.root):
                continue
            version = (status.st_size, status.st_mtime_ns)
            if self._versions.get(path) != version:
                self._versions[path] = version
                self._open(path)

    def _open(self, path: Path) -> None:
        """Read the footer only, for the number of rows."""
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

        try:
            about = parquet.read_metadata(path)
            size = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
        except (OSError, ValueError, ArrowException):
            self._damaged.add(path.name)
            return
        self._damaged.discard(path.name)
        self._too_large.discard(path.name)
        if size > MAX_PARQUET_BYTES or about.num_rows > MAX_RESPONSES:
            self._too_large.add(path.name)
        else:
            number = re.search(r"\d+$", path.stem)
            self._files[int(number[0][-STEP_DIGITS:]) if number else 0] = (path, about.num_rows)

    def steps(self) -> Mapping[int, int]:
        return {step: count for step, (_, count) in sorted(self._files.items())}

    def version(self, step: int) -> Hashable:
        path, _ = self._files[step]
        return path, self._versions[path]

    def read(self, step: int) -> Iterator[Json]:
        from pyarrow import ArrowException, parquet

        path, _ = self._files[step]
        try:
            with parquet.ParquetFile(regular_file(path)) as file:
                for batch in file.iter_batches():
                    yield from batch.to_pylist()
        except (OSError, ValueError, ArrowException) as error:  # ValueError: a text that is not UTF-8
            self._files.pop(step, None)
            self._damaged.add(path.name)
            raise DamagedRecord(f"{path.name} cannot be read") from error

    def skipped(self) -> list[str]:
        messages = [f"{name} is not a complete parquet file and is left out" for name in sorted(self._damaged)]
        limit = f"{MAX_PARQUET_BYTES // 2**30} GiB or {MAX_RESPONSES:,} rows"
        messages += [f"{name} has more than {limit} and is left out" for name in sorted(self._too_large)]
        return messages + refusals(self._refused)
