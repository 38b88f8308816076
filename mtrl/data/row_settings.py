"""What the parts of `data/` tell each other: the settings they read and the rows they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtrl.utils.files import regular_file

MAX_REASON = 400  # characters of the reason why a row cannot be used
MAX_LISTED = 20  # causes of bad rows that a message spells out
PARTICULAR = re.compile(r"""the (?:image|video) .+?(?= (?:does not|cannot|is|has|\())|'[^']*'|"[^"]*"|\([^()]*\)|\d+""")
ABSENT = re.compile(r"the (image|video) .* does not exist")
IMAGE_DIR = "set dataset.image_dir to the directory that the paths start from"


@dataclass(frozen=True)
class DataSettings:
    """What `data/` needs of the config. Names and meanings are those of its `dataset:` block."""

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
    format_prompt: str | None = None  # a Jinja file
    system_prompt: str | None = None


class RowError(ValueError):
    """Why one row cannot be used. Whoever knows the file and the row number adds them."""

    @property
    def reason(self) -> str:
        """The message on one line, and shortened: a row may hold anything."""
        text = " ".join(str(self).split())
        return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."


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
    """Data that cannot be used as it is, in words a user can act on."""

    def __init__(self, message: str, bad_rows: Sequence[BadRow] = ()) -> None:
        super().__init__(message)
        self.bad_rows = tuple(bad_rows)

    @classmethod
    def of_rows(cls, bad_rows: Sequence[BadRow], total: int) -> DataError:
        """One error for all the bad rows of a scan, the first of them spelled out."""
        lines = [f"{len(bad_rows)} of {total} rows cannot be used:", *(f"  {line}" for line in by_cause(bad_rows))]
        lines.append("Repair them, or set dataset.on_bad_row=skip to train without them.")
        return cls("\n".join(lines), bad_rows)


def by_cause(bad_rows: Iterable[BadRow]) -> list[str]:
    """A line for each cause: its first row, how many rows have it too, and the key that would help.

    >>> by_cause(BadRow("a.jsonl", row, f"the image {row}.png is empty") for row in (3, 4, 8))
    ['a.jsonl, row 3: the image 3.png is empty (and 2 more rows like it)']
    """
    rows: dict[tuple[str, str], list[BadRow]] = {}
    for bad in bad_rows:  # numbers, names and details are the row's own, the rest is the cause
        rows.setdefault((bad.file, PARTICULAR.sub("..", bad.reason)), []).append(bad)
    lines = []
    for first, *others in rows.values():
        more = f" (and {len(others):,} more row{'s' if len(others) > 1 else ''} like it)" if others else ""
        lines.append(f"{first}{more}{f'; {IMAGE_DIR}' if ABSENT.search(first.reason) else ''}")
    hidden = len(lines) - MAX_LISTED
    return lines if hidden <= 0 else [*lines[:MAX_LISTED], f"... and rows with {hidden:,} other causes"]


def list_bad_rows(path: Path, bad_rows: Iterable[BadRow], *, late: bool = False) -> None:
    """Adds rows to a JSONL list (file, row, reason), except those in it: a resumed run finds the same ones again. Rows
    that were fine when the run began are `late`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = set(regular_file(path).read_text(encoding="utf-8").splitlines()) if path.exists() else set()
    when = {"late": True} if late else {}
    lines = [json.dumps({"file": bad.file, "row": bad.row, "reason": bad.reason, **when}) for bad in bad_rows]
    with path.open("a", encoding="utf-8") as out:
        out.writelines(line + "\n" for line in dict.fromkeys(lines) if line not in listed)


def left_out_at_first(path: Path) -> set[tuple[str, int]]:
    """File and row of those that a run has never used: the scan of its first start listed them."""
    found = set()
    for line in regular_file(path).read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError, KeyError):  # a line that a crash cut off
            entry = json.loads(line)
            if not entry.get("late"):
                found.add((entry["file"], entry["row"]))
    return found
