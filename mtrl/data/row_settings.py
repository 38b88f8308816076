"""What the modules of `data/` share: the settings, the interface of a data source, and the errors of rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from mtrl.utils.files import regular_file

MAX_REASON_CHARS = 400
MAX_NESTING = 100  # levels of lists and objects in a row: code that walks a row may recurse
MAX_LISTED_CAUSES = 20
# Parts of a reason that differ between rows with the same cause: names, quotes, details in brackets, numbers.
ROW_DETAIL = re.compile(r"""the (?:image|video) .+?(?= (?:does not|cannot|is|has|\())|'[^']*'|"[^"]*"|\([^()]*\)|\d+""")
MISSING_FILE = re.compile(r"the (image|video) .* does not exist")
IMAGE_DIR = "set dataset.image_dir to the directory that the paths start from"


@dataclass(frozen=True)
class DataSettings:
    """The keys of the `dataset:` block that reading rows depends on."""

    prompt_key: str = "prompt"
    answer_key: str = "answer"
    image_key: str = "images"
    video_key: str = "videos"
    options_key: str = "options"
    image_dir: str | None = None  # null: the directory of the data file
    max_image_side: int | None = None
    big_images: Literal["resize", "filter"] = "resize"
    max_prompt_length: int = 2048
    filter_overlong_prompts: bool = True
    on_bad_row: Literal["scan", "error", "skip"] = "scan"
    check_images: Literal["sample", "full"] = "sample"
    on_missing: Literal["error", "warn"] = "error"
    on_unread_media: Literal["error", "ignore"] = "error"
    format_prompt: str | None = None  # a Jinja file
    system_prompt: str | None = None


class DataSource(Protocol):
    """One file or dataset of rows. Reading must be safe from several threads and after a fork."""

    name: str  # for messages
    fingerprint: str
    directory: Path  # relative media paths start here unless image_dir is set
    stamp: Any  # identifies the file for caches (JSON); None: do not cache

    def __len__(self) -> int: ...

    def read(self, index: int) -> dict[str, Any]:
        """Return a row, or raise RowError if it cannot be read."""

    def row_number(self, index: int) -> int:
        """Return the row's number for messages, counted from 1; JSONL overrides this with the line number."""
        return index + 1


class RowError(ValueError):
    """Why one row cannot be used; the caller adds the file and the row number."""

    @property
    def reason(self) -> str:
        return one_line(self, MAX_REASON_CHARS)


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return the message of an error on one line, shortened to `limit` characters: a row may contain anything."""
    return shorten(" ".join(str(error).split()) or type(error).__name__, limit)


def shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


@dataclass(frozen=True)
class BadRow:
    """
    >>> print(BadRow("train.jsonl", 7, "the prompt is empty"))
    train.jsonl, row 7: the prompt is empty
    """

    file: str
    row: int  # counted from 1; in JSONL it is the line
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason}"


class DataError(ValueError):
    """Data that cannot be used as it is, with a message that says what to do."""

    def __init__(self, message: str, bad_rows: Sequence[BadRow] = ()) -> None:
        super().__init__(message)
        self.bad_rows = tuple(bad_rows)

    @classmethod
    def from_bad_rows(cls, bad_rows: Sequence[BadRow], total: int) -> DataError:
        """Make one error for all bad rows of a scan, with an example of each cause."""
        lines = [f"{len(bad_rows)} of {total} rows cannot be used:"]
        lines += [f"  {line}" for line in group_by_cause(bad_rows)]
        lines.append("Repair them, or set dataset.on_bad_row=skip to train without them.")
        return cls("\n".join(lines), bad_rows)


def group_by_cause(bad_rows: Iterable[BadRow]) -> list[str]:
    """Return one line per cause: its first row, how many more rows have it, and the key that helps.

    >>> group_by_cause(BadRow("a.jsonl", row, f"the image {row}.png is empty") for row in (3, 4, 8))
    ['a.jsonl, row 3: the image 3.png is empty (and 2 more rows like it)']
    """
    rows: dict[tuple[str, str], list[BadRow]] = {}
    for bad in bad_rows:
        rows.setdefault((bad.file, ROW_DETAIL.sub("..", bad.reason)), []).append(bad)
    lines = []
    for first, *others in rows.values():
        more = f" (and {len(others):,} more row{'s' if len(others) > 1 else ''} like it)" if others else ""
        lines.append(f"{first}{more}{f'; {IMAGE_DIR}' if MISSING_FILE.search(first.reason) else ''}")
    hidden = len(lines) - MAX_LISTED_CAUSES
    return lines if hidden <= 0 else [*lines[:MAX_LISTED_CAUSES], f"... and rows with {hidden:,} other causes"]


def list_bad_rows(path: Path, bad_rows: Iterable[BadRow], *, late: bool = False) -> None:
    """Append rows to a JSONL list (file, row, reason), except those already in it: a resumed run finds the same rows
    again. `late`: the rows were fine when the run began."""
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = set(regular_file(path).read_text(encoding="utf-8").splitlines()) if path.exists() else set()
    when = {"late": True} if late else {}
    lines = [json.dumps({"file": bad.file, "row": bad.row, "reason": bad.reason, **when}) for bad in bad_rows]
    with path.open("a", encoding="utf-8") as out:
        out.writelines(line + "\n" for line in dict.fromkeys(lines) if line not in listed)


def read_initial_bad_rows(path: Path) -> set[tuple[str, int]]:
    """Return file and row of the rows that were bad when the run first started, so that it never used them."""
    rows = set()
    for line in regular_file(path).read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError, KeyError):  # a crash may have cut off the last line
            entry = json.loads(line)
            if not entry.get("late"):
                rows.add((entry["file"], entry["row"]))
    return rows


def check_object(value: Any) -> dict[str, Any]:
    """Return a row as a dict; raise RowError if it is none, or nested too deep."""
    if not isinstance(value, Mapping):
        raise RowError(f"it is a {type(value).__name__}, not an object with columns")
    if _is_too_deep(value):
        raise RowError(f"it is nested more than {MAX_NESTING} levels deep")
    return dict(value)


def _is_too_deep(value: Any) -> bool:
    """Check level by level: recursion would fail on such a value."""
    level = [value]
    for _ in range(MAX_NESTING):
        inner = [list(each.values()) if isinstance(each, Mapping) else each for each in level]
        nested = (item for each in inner for item in each if isinstance(item, (list, tuple, Mapping)))
        level = list({id(item): item for item in nested}.values())  # each object once, however often it occurs
        if not level:
            return False
    return True
