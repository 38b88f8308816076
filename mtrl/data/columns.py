"""Columns of a row: keys that reach into structs, and the column names of other frameworks.

A dataset made for TRL calls its images `image` and its answers `solution`; verl has a struct `reward_model` that
contains the `ground_truth`; ShareGPT's `conversations` contain both prompt and answer. If a key has its default and no
row has that column, such an alias is used and reported.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mtrl.data.cache import DiskCache, pack_json, unpack_json
from mtrl.data.formats import CONVERSATIONS, UNKNOWN, detect_format, read_conversation
from mtrl.data.media import looks_like_image, looks_like_video
from mtrl.data.row_settings import DataSettings, DataSource, RowError

VERSION = 3  # version of the cached summary; raise it when COLUMN_ALIASES or the checks of values change
INSPECTED_ROWS = 32  # the first rows of a source, and as many spread over all of it
MISSING = object()

logger = logging.getLogger(__name__)


class ColumnAliases(NamedTuple):
    """Other names of a column, the likeliest first, and a check that a value fits."""

    content: str
    names: tuple[str, ...]
    is_usable: Callable[[Any], bool]


def is_ground_truth(value: Any) -> bool:
    """Whether a row has an answer; those of test splits are often empty strings."""
    return value is not None and not (isinstance(value, str) and not value.strip())


ANSWERS = ("reward_model.ground_truth", "solution", "ground_truth", "label", "cls", *CONVERSATIONS)
COLUMN_ALIASES = {
    "prompt_key": ColumnAliases(
        "prompts", ("problem", "question", *CONVERSATIONS, "txt"), lambda value: isinstance(value, (str, list, tuple))
    ),
    "answer_key": ColumnAliases("answers", ANSWERS, is_ground_truth),
    "image_key": ColumnAliases("images", ("image",), lambda value: looks_like_image("image", value)),
    "video_key": ColumnAliases("videos", ("video",), looks_like_video),
}


def get_column(row: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a column; a dotted key reaches into structs, unless a column has that very name.

    >>> get_column({"reward_model": {"style": "rule", "ground_truth": "B"}}, "reward_model.ground_truth")
    'B'
    """
    if key in row or "." not in key:
        return row.get(key, default)
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def find_image_column(columns: Mapping[str, Any]) -> str | None:
    """Return the first of these columns that holds an image."""
    return next((str(name) for name, value in columns.items() if looks_like_image(str(name), value)), None)


def read_alias(row: Mapping[str, Any], key: str, name: str) -> Any:
    """Return the value for a key from a column with an alias: of a conversation, its prompt or its answer."""
    if name not in CONVERSATIONS:
        return get_column(row, name, MISSING)
    conversation = read_conversation(row.get(name), row.get("system"))
    if conversation is None:
        return MISSING
    if key == "prompt_key":
        return conversation.prompt
    return MISSING if conversation.truth is None else conversation.truth


class ColumnSummary(NamedTuple):
    """Inspection of some rows of a source."""

    columns: frozenset[str]
    usable: frozenset[tuple[str, str]]  # key and alias of columns with a usable value
    format: str  # the format of most rows


class RenamedColumns(DataSource):
    """A source whose rows also have our column names. The original columns stay, since a reward function may ask for
    `solution`; only images and videos are moved, to have their bytes once."""

    def __init__(self, source: DataSource, names: Mapping[str, str], keys: Mapping[str, str]) -> None:
        self.source, self.names = source, names  # our column -> theirs
        self.keys = keys  # our column -> its key of the settings
        self.name, self.fingerprint = source.name, source.fingerprint
        self.directory, self.stamp = source.directory, source.stamp

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> dict[str, Any]:
        row = self.source.read(index)
        for ours, theirs in self.names.items():
            value = read_alias(row, self.keys[ours], theirs)
            if ours not in row and value is not MISSING:
                row[ours] = value
                if theirs in (*COLUMN_ALIASES["image_key"].names, *COLUMN_ALIASES["video_key"].names):
                    del row[theirs]
        return row

    def row_number(self, index: int) -> int:
        return self.source.row_number(index)


def apply_column_aliases(sources: Sequence[DataSource], settings: DataSettings, cache: DiskCache) -> list[DataSource]:
    """Rename the columns of sources that use aliases, and log each alias once."""
    renamed: list[DataSource] = []
    messages: dict[str, None] = {}
    for source in sources:
        names = dict(_find_aliases(settings, inspect_columns(source, cache)))
        for key, theirs in names.items():
            messages[f"{COLUMN_ALIASES[key].content} are read from the column {theirs!r} (dataset.{key})"] = None
        keys = {getattr(settings, key): key for key in names}
        by_column = {ours: names[key] for ours, key in keys.items()}
        renamed.append(RenamedColumns(source, by_column, keys) if by_column else source)
    data = tuple(source.fingerprint for source in sources)
    for message in messages:
        report_once(message, data)
    return renamed


@lru_cache
def report_once(message: str, data: tuple[str, ...]) -> None:
    """Log a message about these data: every evaluation of a trainer opens them again."""
    logger.warning("%s", message)


def alias_columns(source: DataSource) -> set[str]:
    """Return the columns of a source that are read in place of ours, under the names of the file."""
    names: set[str] = set()
    inner: Any = source
    while inner is not None:  # the source may be some rows of a renamed one
        names |= set(inner.names.values()) if isinstance(inner, RenamedColumns) else set()
        inner = getattr(inner, "source", None)
    return names


def list_columns(sources: Sequence[DataSource], cache: DiskCache) -> set[str]:
    """Return the columns seen in any source, under our names and the original ones."""
    columns: set[str] = set()
    for source in sources:
        if isinstance(source, RenamedColumns):
            columns |= source.names.keys()
            source = source.source
        columns |= inspect_columns(source, cache).columns
    return columns


def _find_aliases(settings: DataSettings, summary: ColumnSummary) -> Iterator[tuple[str, str]]:
    """Yield (key, alias) for each key that has its default, if no row has its column and some row has an alias."""
    defaults = {field.name: field.default for field in fields(DataSettings)}
    for key, aliases in COLUMN_ALIASES.items():
        ours = getattr(settings, key)
        theirs = next((name for name in aliases.names if (key, name) in summary.usable), None)
        if theirs is not None and ours == defaults[key] and ours not in summary.columns:
            yield key, theirs


def inspect_columns(source: DataSource, cache: DiskCache) -> ColumnSummary:
    """Summarize the columns of some rows. The scan reads all rows and reports images that nothing reads."""
    key = None if source.stamp is None else ["columns", VERSION, source.stamp]
    entry = cache.get("columns", key, {"seen"}, lambda: {"seen": pack_json(_inspect_rows(source))})
    columns, usable, format = unpack_json(entry["seen"])
    return ColumnSummary(frozenset(columns), frozenset((key, name) for key, name in usable), format)


def _inspect_rows(source: DataSource) -> list[Any]:
    """The fields of a ColumnSummary as JSON values."""
    columns: set[str] = set()
    usable: set[tuple[str, str]] = set()
    formats: Counter[str] = Counter()
    spread = np.linspace(0, len(source) - 1, INSPECTED_ROWS).astype(int).tolist() if len(source) else []
    for index in sorted({*range(min(INSPECTED_ROWS, len(source))), *spread}):
        try:
            row = source.read(index)
        except RowError:
            continue  # the scan reports it
        columns |= {str(name) for name in row}
        formats[detect_format(row)] += 1
        for key, aliases in COLUMN_ALIASES.items():
            values = ((name, read_alias(row, key, name)) for name in aliases.names)
            usable |= {(key, name) for name, value in values if value is not MISSING and aliases.is_usable(value)}
    return [sorted(columns), sorted(usable), formats.most_common(1)[0][0] if formats else UNKNOWN]
