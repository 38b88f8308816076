"""Resolves paths in a YAML file: relative to that file if they exist there, else to the working directory.

Paths found next to the file are stored as absolute paths, so that the configuration saved with a run means the same
files wherever it is loaded. Paths in overrides are always relative to the working directory. A template found in
neither directory may be a packaged one, by its name there (`experiments/think_answer.jinja`).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mtrl.config.packaged import CONFIG_DIR

PathKind = Literal["folder", "template", "data", "code"]
"""A plain path; one that may be packaged; data as a comma-separated list with `@split`; code as `file.py:name`."""

# Splits of the embedded tasks, not folders.
EMBEDDED = ("zoo@", "scenes@", "scenes-blank@", "lookagain@", "lookagain-blank@")
CODE_ARGUMENTS = ("name", "spans")  # arguments of a credit rule: the rule, and the function that marks characters
PYTHON_PREFIX = "python:"  # names an object that a script gave to mtrl.Trainer: rows, or a reward function


def resolve_paths(value: Any, kind: PathKind, folder: Path | None) -> Any:
    """Make each path in the value absolute that exists in the folder. An override has no folder."""
    if isinstance(value, list):
        return [resolve_paths(item, kind, folder) for item in value]
    if isinstance(value, Mapping):  # a credit rule with its arguments, or files by the names of environments
        paths = CODE_ARGUMENTS if "name" in value else value
        return {name: resolve_paths(item, kind, folder) if name in paths else item for name, item in value.items()}
    if not isinstance(value, str) or "${" in value + str(folder):  # a reference is resolved by the key it refers to
        return value
    if kind == "code":
        return _resolve_code(value, folder)
    if kind == "data":
        return _existing(value, folder) or _resolve_data(value, folder)
    as_typed = kind == "folder" or os.path.exists(os.path.expanduser(value))
    return _existing(value, folder) or (None if as_typed else _existing(value, CONFIG_DIR)) or value


def _resolve_code(text: str, folder: Path | None) -> str:
    file, colon, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    path = _existing(file, folder) if file.endswith(".py") else None
    return text if path is None else path + colon + name


def _resolve_data(text: str, folder: Path | None) -> str:
    items = [item.strip() for item in text.split(",")]
    if len(items) > 1 and "," in str(folder):  # a folder with a comma in its name would break the list
        return text
    resolved = [_resolve_source(item, folder) for item in items]
    return text if resolved == items else ",".join(resolved)


def _resolve_source(item: str, folder: Path | None) -> str:
    if item.startswith(EMBEDDED):
        return item
    if whole := _existing(item, folder):
        return whole
    name, at, split = item.rpartition("@")
    path = _existing(name, folder)
    return item if path is None else path + at + split


def _existing(name: str, folder: Path | None) -> str | None:
    if folder is None or not name or name.startswith("~") or os.path.isabs(name):
        return None
    path = os.path.abspath(os.path.join(folder, name))
    return path if os.path.exists(path) else None
