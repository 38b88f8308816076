"""Stores of responses without a record: our rollouts.jsonl, verl's rollout JSONL, and TRL's completions in parquet."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mtrl.tracking.blocks import DamagedRecord
from mtrl.tracking.jsonl import parse_row, rotated_parts
from mtrl.utils.metric_history import is_number, is_step
from mtrl.view.history import LineTail
from mtrl.view.rollout_store import SORTED_BY, Columns, Json, as_numbers

OUR_HEAD = re.compile(rb'^\{"step": (\d{1,12}), "attempt": (\d{1,9}),')  # the start of our rows: saves parsing them
SCAN_BYTES = 32 * 2**20  # bytes of a file scanned per refresh
STEPS_CACHED = 16
NOT_PARTS = {
    *("input", "output", "gts", "score", "step", "prompt", "completion", "reward", "advantage", "attempt", "time"),
    *("id", "response", "answer", "rewards", "failed", "tokens", "finish", "version"),
}  # columns that are not parts of a reward
HEAD_CHARS = 120


class RowRollouts:
    """Base class of stores whose steps are lists of plain rows, read on demand."""

    def __init__(self) -> None:
        self._columns: dict[int, Columns] = {}
        self._step_rows = lru_cache(STEPS_CACHED)(lambda step: to_viewer_rows(step, self.read(step)))

    def read(self, step: int) -> list[Json]:
        raise NotImplementedError

    def forget(self, step: int) -> None:
        self._step_rows.cache_clear()
        self._columns.pop(step, None)

    def columns(self, step: int) -> Columns:
        if step not in self._columns:
            rows = self._step_rows(step)
            self._columns[step] = {name: as_numbers([row.get(name) for row in rows], len(rows)) for name in SORTED_BY}
        return self._columns[step]

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


def to_viewer_rows(step: int, rows: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Rows of any of these formats with the viewer's keys, grouped by prompt."""
    groups: dict[str, int] = {}
    converted = []
    for index, row in enumerate(rows):
        prompt = as_text(first(row, "input", "prompt", default=""))
        name = as_text(row["id"]) if "id" in row else prompt
        group = groups.setdefault(name, len(groups))
        text = as_text(first(row, "response", "output", "completion", default=""))
        answer, reward = first(row, "answer", "gts"), first(row, "reward", "score")
        parts = row["rewards"] if isinstance(row.get("rewards"), dict) else find_reward_parts(row)
        if not is_number(reward):
            reward = sum(x for x in parts.values() if is_number(x)) if parts else None
        converted.append({
            "step": step, "row": index, "group": group, "id": name if "id" in row else f"prompt {group + 1}",
            "reward": reward, "parts": parts, "advantage": number_or_none(row.get("advantage")),
            "tokens": number_or_none(row.get("tokens")), "finish": row.get("finish"), "version": row.get("version"),
            "failed": row.get("failed"), "head": text[:HEAD_CHARS], "text": text, "prompt": prompt,
            "answer": None if answer is None else as_text(answer),
        })  # fmt: skip
    return converted


def find_reward_parts(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row under unknown names: in the files of TRL and verl these are parts of rewards."""
    return {str(name): x for name, x in row.items() if name not in NOT_PARTS and is_number(x)}


def first(row: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), default)


def number_or_none(value: Any) -> float | None:
    return value if is_number(value) else None


def as_text(value: Any) -> str:
    """A prompt or an answer as text: of a chat the contents of its messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, dict) and "content" in each for each in value):
        return "\n".join(as_text(each["content"]) for each in value)
    if isinstance(value, list) and value and all(isinstance(each, dict) and "type" in each for each in value):
        return "".join(str(each.get("text") or f"<{each['type']}>") for each in value)
    return json.dumps(value, ensure_ascii=False, default=str)


# --------------------------------------------------------------------------------------------------------------- JSONL
class JsonlRollouts(RowRollouts):
    """Rows of JSONL files by their step, or by the step in the name of the file (verl: `12.jsonl`). Only the locations
    of the rows stay in memory; files are scanned a piece at a time."""

    def __init__(self, files: Sequence[Path] = (), rotating: Path | None = None) -> None:
        super().__init__()
        self.files, self.rotating = list(files), rotating
        self.damaged = 0
        self._tails: dict[int, LineTail] = {}  # by inode: a full part is renamed
        self._locations: dict[int, array[int]] = {}  # step -> (inode, offset, length) of each row
        self._attempts: dict[int, int] = {}
        self._is_scanning = False

    def refresh(self) -> None:
        files = self.files if self.rotating is None else [*rotated_parts(self.rotating), self.rotating]
        bytes_left = SCAN_BYTES
        for path in files:
            if not path.is_file():
                continue
            inode = path.stat().st_ino
            tail = self._tails.setdefault(inode, LineTail(path))
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
        self.forget(step)

    def steps(self) -> Mapping[int, int]:
        return {step: len(self._locations[step]) // 3 for step in sorted(self._locations)}

    def read(self, step: int) -> list[Json]:
        locations, rows = iter(self._locations[step]), []
        for inode, offset, length in zip(locations, locations, locations, strict=True):
            with self._tails[inode].path.open("rb") as file:
                file.seek(offset)
                row = parse_row(file.read(length))
            rows.append(row if row is not None else {"response": "(this row is damaged)"})
        return rows

    def skipped(self) -> list[str]:
        messages = [f"rollouts: {self.damaged} lines are damaged and left out"] if self.damaged else []
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
    return (int(path.stem) if path.stem.isdecimal() else 0), 0


# ------------------------------------------------------------------------------------------------------------- parquet
class ParquetRollouts(RowRollouts):
    """TRL's `completions/completions_00012.parquet`: one file per step, or any parquet file with such columns."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path  # a file or a directory
        self._files: dict[int, tuple[Path, int]] = {}  # step -> file, number of rows
        self._versions: dict[Path, tuple[int, int]] = {}  # size and time of each file
        self._damaged: set[str] = set()

    def refresh(self) -> None:
        for path in sorted(self.path.glob("*.parquet")) if self.path.is_dir() else [self.path]:
            version = (path.stat().st_size, path.stat().st_mtime_ns)
            if self._versions.get(path) != version:
                self._versions[path] = version
                self._open(path)

    def _open(self, path: Path) -> None:
        """Read the footer only, for the number of rows."""
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

        try:
            count = parquet.read_metadata(path).num_rows
        except (OSError, ArrowException):
            self._damaged.add(path.name)
            return
        self._damaged.discard(path.name)
        number = re.search(r"(\d+)$", path.stem)
        step = int(number[1]) if number else 0
        self._files[step] = (path, count)
        self.forget(step)

    def steps(self) -> Mapping[int, int]:
        return {step: self._files[step][1] for step in sorted(self._files)}

    def read(self, step: int) -> list[Json]:
        from pyarrow import ArrowException, parquet

        path, _ = self._files[step]
        try:
            return parquet.read_table(path).to_pylist()
        except (OSError, ArrowException) as error:
            del self._files[step]
            self._damaged.add(path.name)
            raise DamagedRecord(f"{path.name} cannot be read") from error

    def skipped(self) -> list[str]:
        return [f"{name} is not a complete parquet file and is left out" for name in sorted(self._damaged)]
