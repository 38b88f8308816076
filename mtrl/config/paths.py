"""Paths in a YAML file: relative to that file where they exist beside it, else to the working directory, as typed.

Those found beside the file are kept as absolute paths, so that the configuration saved with a run means the same files
wherever it is loaded from. What an override names is always relative to the working directory. A template that is in
neither place may be one of the package, by its name there (`experiments/think_answer.jinja`).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mtrl.config.packaged import HOME

Kind = Literal["folder", "template", "data", "code"]
"""A plain path; one that may be packaged; data as a list with commas and `@split`; Python code as `file.py:name`."""

EMBEDDED = ("zoo@", "scenes@", "scenes-blank@")  # name splits of the embedded tasks, not a folder
CODE = ("name", "spans")  # of a credit rule: itself, and the function that tells one which characters count
GIVEN = "python:"  # names what a script gave to mtrl.Trainer: rows, or a reward function


def placed(value: Any, kind: Kind, folder: Path | None) -> Any:
    """The value of a key with each of its paths that exists in the folder made absolute. An override has no folder."""
    if isinstance(value, list):
        return [placed(item, kind, folder) for item in value]
    if isinstance(value, Mapping):  # a credit rule with its arguments
        return {name: placed(item, kind, folder) if name in CODE else item for name, item in value.items()}
    if not isinstance(value, str) or "${" in value + str(folder):  # what another key says is taken as that key has it
        return value
    if kind == "code":
        return _code(value, folder)
    if kind == "data":
        return _found(value, folder) or _data(value, folder)
    as_typed = kind == "folder" or os.path.exists(os.path.expanduser(value))
    return _found(value, folder) or (None if as_typed else _found(value, HOME)) or value


def _code(text: str, folder: Path | None) -> str:
    place, colon, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    found = _found(place, folder) if place.endswith(".py") else None
    return text if found is None else found + colon + name


def _data(text: str, folder: Path | None) -> str:
    items = [item.strip() for item in text.split(",")]
    if len(items) > 1 and "," in str(folder):  # a folder with a comma in its name would break the list
        return text
    found = [_item(item, folder) for item in items]
    return text if found == items else ",".join(found)


def _item(item: str, folder: Path | None) -> str:
    if item.startswith(EMBEDDED):
        return item
    if whole := _found(item, folder):
        return whole
    name, at, split = item.rpartition("@")
    found = _found(name, folder)
    return item if found is None else found + at + split


def _found(place: str, folder: Path | None) -> str | None:
    if folder is None or not place or place.startswith("~") or os.path.isabs(place):
        return None
    path = os.path.abspath(os.path.join(folder, place))
    return path if os.path.exists(path) else None
