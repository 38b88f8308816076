"""Books of responses without a record: rollouts.jsonl of ours, the rollout JSONL of verl and the completions that TRL
keeps as parquet, each with what it holds."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrl.tracking.blocks import DamagedRecord
from mtrl.tracking.jsonl import parts
from mtrl.view.history import Tail, parsed
from mtrl.view.rollout_store import SORTED_BY, Json, Page, as_numbers

OUR_HEAD = re.compile(
    rb'^\{"step": (\d{1,12}), "attempt": (\d{1,9}),'
)  # what our own rows begin with: no need to parse
AT_ONCE = 32 * 2**20  # bytes of a file that are looked through before a page is answered; the rest follows
STEPS_KEPT = 16
NOT_PARTS = {
    *("input", "output", "gts", "score", "step", "prompt", "completion", "reward", "advantage", "attempt", "time"),
    *("id", "response", "answer", "rewards", "failed", "tokens", "finish", "version"),
}  # columns that are no part of a reward
HEAD_CHARS = 120


class RowRollouts:
    """What the others share: a step is a list of plain rows, read when it is looked at."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, list[Json]] = OrderedDict()
        self._pages: dict[int, Page] = {}

    def read(self, step: int) -> list[Json]:
        raise NotImplementedError

    def forget(self, step: int) -> None:
        self._kept.pop(step, None)
        self._pages.pop(step, None)

    def step_rows(self, step: int) -> list[Json]:
        if step not in self._kept:
            self._kept[step] = numbered(step, self.read(step))
            if len(self._kept) > STEPS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(step)
        return self._kept[step]

    def page(self, step: int) -> Page:
        if step not in self._pages:
            rows = self.step_rows(step)
            found = {name: as_numbers([row.get(name) for row in rows], len(rows)) for name in SORTED_BY}
            self._pages[step] = Page(len(rows), {name: column for name, column in found.items() if column is not None})
        return self._pages[step]

    def rows(self, step: int, places: Sequence[int]) -> list[Json]:
        rows = self.step_rows(step)
        hidden = ("text", "asked", "answer")
        return [
            {name: x for name, x in rows[place].items() if name not in hidden} for place in places if place < len(rows)
        ]

    def response(self, step: int, place: int) -> Json:
        rows = self.step_rows(step)
        if not 0 <= place < len(rows):
            raise KeyError(place)
        row = rows[place]
        members = [other["row"] for other in rows if other["group"] == row["group"]]
        prompt = {"text": row["asked"], "answer": row["answer"], "images": [], "perturbed": [], "pools": None}
        kept = {name: x for name, x in row.items() if name not in ("asked", "answer")}
        return kept | {"prompt": prompt, "pieces": None, "streams": {}, "segments": [], "mass": [], "members": members}

    def maps(self, step: int, place: int) -> Json:
        raise KeyError(place)

    def image(self, step: int, key: str) -> bytes:
        raise KeyError(key)


def numbered(step: int, rows: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Rows of any of these kinds in the words of the viewer, grouped by what was asked."""
    groups: dict[str, int] = {}
    found = []
    for place, row in enumerate(rows):
        asked = as_text(first(row, "input", "prompt", default=""))
        name = as_text(row["id"]) if "id" in row else asked
        text = as_text(first(row, "response", "output", "completion", default=""))
        reward = first(row, "reward", "score")
        parts_there = row["rewards"] if isinstance(row.get("rewards"), dict) else open_foreign(row)
        if not is_finite(reward):
            reward = sum(x for x in parts_there.values() if is_finite(x)) if parts_there else None
        found.append({
            "step": step, "row": place, "group": groups.setdefault(name, len(groups)),
            "id": as_text(row["id"]) if "id" in row else f"prompt {groups[name] + 1}",
            "reward": reward, "parts": parts_there, "advantage": finite_or_none(row.get("advantage")),
            "tokens": row.get("tokens") if is_finite(row.get("tokens")) else None, "finish": row.get("finish"),
            "version": row.get("version"), "failed": row.get("failed"), "head": text[:HEAD_CHARS], "text": text,
            "asked": asked, "answer": None if (a := first(row, "answer", "gts")) is None else as_text(a),
        })  # fmt: skip
    return found


def open_foreign(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row under names that mean nothing else: in TRL's and verl's files those are parts of rewards."""
    return {str(name): x for name, x in row.items() if name not in NOT_PARTS and is_finite(x)}


def first(row: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), default)


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def finite_or_none(value: Any) -> float | None:
    return value if is_finite(value) else None


def as_text(value: Any) -> str:
    """A prompt or an answer for people: a chat as the contents of its messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, dict) and "content" in each for each in value):
        return "\n".join(as_text(each["content"]) for each in value)
    if isinstance(value, list) and value and all(isinstance(each, dict) and "type" in each for each in value):
        return "".join(str(each.get("text") or f"<{each['type']}>") for each in value)
    return json.dumps(value, ensure_ascii=False, default=str)


# --------------------------------------------------------------------------------------------------------------- JSONL
class JsonlRollouts(RowRollouts):
    """Rows of JSONL files by the step that they name, or the one that the file is named after (verl: `12.jsonl`). Only
    where each row lies is kept; files are looked through a piece at a time."""

    def __init__(self, files: Sequence[Path] = (), rotating: Path | None = None) -> None:
        super().__init__()
        self.files, self.rotating = list(files), rotating
        self.damaged = 0
        self._tails: dict[int, Tail] = {}  # by inode: a part that is renamed when it is full stays what it was
        self._where: dict[int, array[int]] = {}  # step -> (inode, start, length) for each row
        self._attempts: dict[int, int] = {}
        self._behind = False

    def refresh(self) -> None:
        files = self.files if self.rotating is None else [*parts(self.rotating), self.rotating]
        left = AT_ONCE
        for path in files:
            if not path.is_file():
                continue
            node = path.stat().st_ino
            tail = self._tails.setdefault(node, Tail(path))
            tail.path = path
            begin = tail.at
            for at, line in tail.new(left):
                self._add(node, path, at, line)
            left -= max(0, tail.at - begin)
            if left <= 0:
                break
        self._behind = left <= 0

    def _add(self, node: int, path: Path, at: int, line: bytes) -> None:
        step, attempt = file_step(line, path)
        if step is None:
            self.damaged += bool(line.strip())
            return
        if attempt != self._attempts.get(step, attempt):
            self._where.pop(step, None)  # the last attempt counts
        self._attempts[step] = attempt
        self._where.setdefault(step, array("Q")).extend((node, at, len(line)))
        self.forget(step)

    def steps(self) -> Mapping[int, int]:
        return {step: len(self._where[step]) // 3 for step in sorted(self._where)}

    def read(self, step: int) -> list[Json]:
        places, rows = self._where[step], []
        for number in range(0, len(places), 3):
            node, at, length = places[number : number + 3]
            with self._tails[node].path.open("rb") as file:
                file.seek(at)
                row = parsed(file.read(length))
            rows.append(row if row is not None else {"response": "(this row is damaged)"})
        return rows

    def skipped(self) -> list[str]:
        told = [f"rollouts: {self.damaged} lines are damaged and left out"] if self.damaged else []
        return told + (["rollouts: the files are large and are still being looked through"] if self._behind else [])


def file_step(line: bytes, path: Path) -> tuple[int | None, int]:
    """(step, attempt) of a row; its step is None where it is no row."""
    if ours := OUR_HEAD.match(line):
        whole = line.rstrip().endswith(b"}")
        return (int(ours[1]) if whole else None), int(ours[2])
    row = parsed(line)
    if row is None:
        return None, 0
    step = row.get("step")
    if type(step) is int and 0 <= step < 10**12:
        return step, 0
    return (int(path.stem) if path.stem.isdecimal() else 0), 0


# ------------------------------------------------------------------------------------------------------------- parquet
class ParquetRollouts(RowRollouts):
    """TRL's `completions/completions_00012.parquet`: a file a step, or any parquet file with such columns."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place
        self._files: dict[int, tuple[Path, int]] = {}
        self._seen: dict[Path, tuple[int, int]] = {}
        self._broken: set[str] = set()

    def refresh(self) -> None:
        files = sorted(self.place.glob("*.parquet")) if self.place.is_dir() else [self.place]
        for path in files:
            stamp = (path.stat().st_size, path.stat().st_mtime_ns)
            if self._seen.get(path) == stamp:
                continue
            self._seen[path] = stamp
            self._open(path)

    def _open(self, path: Path) -> None:
        """Reads the footer alone: how many rows there are, and whose step they are."""
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

        try:
            count = parquet.read_metadata(path).num_rows
        except (OSError, ArrowException):
            self._broken.add(path.name)
            return
        self._broken.discard(path.name)
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
            self._broken.add(path.name)
            raise DamagedRecord(f"{path.name} cannot be read") from error

    def skipped(self) -> list[str]:
        return [f"{name} is no whole parquet file and is left out" for name in sorted(self._broken)]
