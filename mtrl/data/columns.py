"""Which column holds what: keys that reach into structs, and the names that others give to our columns.

A dataset made for TRL calls its images `image` and its truths `solution`; one made for verl has a struct `reward_model`
with the `ground_truth` in it; ShareGPT's `conversations` hold prompt and answer in one. Where a key is at its default
and no row has that column, such a name is taken and said.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from mtrl.data.cache import DiskCache, pack_json, unpack_json
from mtrl.data.formats import CONVERSATIONS, UNKNOWN, detect_format, read_conversation
from mtrl.data.media import looks_like_image, looks_like_video
from mtrl.data.row_settings import DataSettings, RowError
from mtrl.data.sources import DataSource

VERSION = 3  # of what the cache holds; raise it with KNOWN or with what is usable
LOOKED_AT = 32  # rows of a source at its start, and as many spread over all of it
MISSING = object()

logger = logging.getLogger(__name__)


class Known(NamedTuple):
    """Other names of a column, the likeliest first, and which values show that it is meant so."""

    what: str
    names: tuple[str, ...]
    usable: Callable[[Any], bool]


def is_truth(value: Any) -> bool:
    """Test splits have empty texts for answers."""
    return value is not None and not (isinstance(value, str) and not value.strip())


def is_prompt(value: Any) -> bool:
    return isinstance(value, (str, list, tuple))


KNOWN = {
    "prompt_key": Known("prompts", ("problem", "question", *CONVERSATIONS, "txt"), is_prompt),
    "answer_key": Known(
        "answers", ("reward_model.ground_truth", "solution", "ground_truth", "label", "cls", *CONVERSATIONS), is_truth
    ),
    "image_key": Known("images", ("image",), lambda value: looks_like_image("image", value)),
    "video_key": Known("videos", ("video",), looks_like_video),
}


def reach(row: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of a column; a dotted key reaches into structs, where no column has that name itself.

    >>> reach({"reward_model": {"style": "rule", "ground_truth": "B"}}, "reward_model.ground_truth")
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


def image_column(columns: Mapping[str, Any]) -> str | None:
    """The first of these columns that holds an image."""
    return next((str(name) for name, value in columns.items() if looks_like_image(str(name), value)), None)


def known_value(row: Mapping[str, Any], key: str, name: str) -> Any:
    """What a column of another name holds for a key: of a conversation the part that the key asks for."""
    if name not in CONVERSATIONS:
        return reach(row, name, MISSING)
    found = read_conversation(row.get(name), row.get("system"))
    if found is None:
        return MISSING
    return found.prompt if key == "prompt_key" else MISSING if found.truth is None else found.truth


class SeenColumns(NamedTuple):
    """What some rows of a source have: their columns, which known names hold something usable for which key, and whose
    format most of them are in."""

    columns: frozenset[str]
    usable: frozenset[tuple[str, str]]  # key, name
    format: str


class OtherNames:
    """A source whose rows have our columns, where they stand under another name. The others stay, since a reward
    function may ask for `solution`; an image does not, nobody wants its bytes twice."""

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
            value = known_value(row, self.keys[ours], theirs)
            if ours not in row and value is not MISSING:
                row[ours] = value
                if theirs in (*KNOWN["image_key"].names, *KNOWN["video_key"].names):
                    del row[theirs]
        return row

    def row_number(self, index: int) -> int:
        return self.source.row_number(index)


def with_known_columns(sources: Sequence[DataSource], settings: DataSettings, cache: DiskCache) -> list[DataSource]:
    """The sources, those with columns of other names under ours; each other name is said once."""
    found: list[DataSource] = []
    said: dict[str, None] = {}
    for source in sources:
        names = dict(_other_names(settings, seen_columns(source, cache)))
        for key, theirs in names.items():
            said[f"{KNOWN[key].what} are read from the column {theirs!r} (dataset.{key})"] = None
        keys = {getattr(settings, key): key for key in names}
        by_column = {ours: names[key] for ours, key in keys.items()}
        found.append(OtherNames(source, by_column, keys) if by_column else source)
    for line in said:
        logger.warning("%s", line)
    return found


def all_columns(sources: Sequence[DataSource], cache: DiskCache) -> set[str]:
    """The columns that were seen in any of them, under our names and theirs."""
    columns: set[str] = set()
    for source in sources:
        if isinstance(source, OtherNames):
            columns |= source.names.keys()
            source = source.source
        columns |= seen_columns(source, cache).columns
    return columns


def _other_names(settings: DataSettings, seen: SeenColumns) -> Iterator[tuple[str, str]]:
    """(key, column) for each key that is at its default, and whose column no row has, but one of another name."""
    defaults = {field.name: field.default for field in fields(DataSettings)}
    for key, known in KNOWN.items():
        ours = getattr(settings, key)
        theirs = next((name for name in known.names if (key, name) in seen.usable), None)
        if theirs is not None and ours == defaults[key] and ours not in seen.columns:
            yield key, theirs


def seen_columns(source: DataSource, cache: DiskCache) -> SeenColumns:
    """From some rows: all of them are read by the scan, which refuses what is found there and nobody reads."""
    key = None if source.stamp is None else ["columns", VERSION, source.stamp]
    entry = None if key is None else cache.load("columns", key)
    if entry is None or "seen" not in entry:
        columns, usable, format = _look(source)
        entry = {"seen": pack_json([sorted(columns), sorted(usable), format])}
        if key is not None:
            cache.store("columns", key, entry)
    columns, usable, format = unpack_json(entry["seen"])
    return SeenColumns(frozenset(columns), frozenset((key, name) for key, name in usable), format)


def _look(source: DataSource) -> SeenColumns:
    columns: set[str] = set()
    usable: set[tuple[str, str]] = set()
    formats: Counter[str] = Counter()
    spread = np.linspace(0, len(source) - 1, LOOKED_AT).astype(int).tolist() if len(source) else []
    for index in sorted({*range(min(LOOKED_AT, len(source))), *spread}):
        try:
            row = source.read(index)
        except RowError:
            continue  # the scan says so
        columns |= {str(name) for name in row}
        formats[detect_format(row)] += 1
        for key, known in KNOWN.items():
            values = ((name, known_value(row, key, name)) for name in known.names)
            usable |= {(key, name) for name, value in values if value is not MISSING and known.usable(value)}
    return SeenColumns(frozenset(columns), frozenset(usable), formats.most_common(1)[0][0] if formats else UNKNOWN)
