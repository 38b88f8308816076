"""Paths in a YAML file: relative to that file where they exist beside it, else to the working directory, as typed.

Those found beside the file are kept as absolute paths, so that the configuration saved with a run means the same files
wherever it is loaded from. What an override names is always relative to the working directory.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Kind = Literal["path", "data", "code"]
"""A plain path; a list of data with commas and `@split`; Python code as `file.py:name` among names of other kinds."""

EMBEDDED = "zoo@"  # names splits of the embedded task, not a folder


def beside(value: Any, kind: Kind, folder: Path) -> Any:
    """The value of a key with each of its paths that exists in the folder made absolute."""
    if isinstance(value, list):
        return [beside(item, kind, folder) for item in value]
    if isinstance(value, Mapping):  # a credit rule with its arguments
        return {name: beside(item, kind, folder) if name == "name" else item for name, item in value.items()}
    if not isinstance(value, str) or "${" in value + str(folder):  # what another key says is taken as that key has it
        return value
    if kind == "code":
        return _code(value, folder)
    return _found(value, folder) or (_data(value, folder) if kind == "data" else value)


def _code(text: str, folder: Path) -> str:
    place, colon, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    found = _found(place, folder) if place.endswith(".py") else None
    return text if found is None else found + colon + name


def _data(text: str, folder: Path) -> str:
    items = [item.strip() for item in text.split(",")]
    if len(items) > 1 and "," in str(folder):  # its paths could not be told from the list
        return text
    found = [_item(item, folder) for item in items]
    return text if found == items else ",".join(found)


def _item(item: str, folder: Path) -> str:
    if item.startswith(EMBEDDED):
        return item
    if whole := _found(item, folder):
        return whole
    name, at, split = item.rpartition("@")
    found = _found(name, folder)
    return item if found is None else found + at + split


def _found(place: str, folder: Path) -> str | None:
    path = os.path.join(folder, place)
    relative = place and not place.startswith("~") and not os.path.isabs(place)
    return os.path.abspath(path) if relative and os.path.exists(path) else None
