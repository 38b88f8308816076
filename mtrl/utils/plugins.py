"""What users bring by name: `path/to/file.py:name` or `package.module:name`. Imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mtrl.utils.files import regular_file


class PluginError(ValueError):
    """There is no such thing; the message is all that a user needs. What a user's file raises is another matter."""


def load_plugin(spec: str, what: str) -> Any:
    """The object that `spec` names; `what` it should be is for messages."""
    place, name = split_spec(spec)
    module = load_module(place, what)
    if name is None or not hasattr(module, name):
        own = {each: value for each, value in vars(module).items() if not each.startswith("_")}
        there = [each for each, value in own.items() if getattr(value, "__module__", None) == module.__name__]
        raise PluginError(f"{place} has no {what} {name or ''}; it has {', '.join(there) or 'nothing'}")
    return getattr(module, name)


RENAMED = {"mtrl.zoo.": "mtrl.embedded."}  # modules of this package that configurations of 0.1.0 name


def split_spec(spec: str) -> tuple[str, str | None]:
    place, colon, name = spec.rpartition(":")
    return (place, name) if colon and place and "/" not in name and "\\" not in name else (spec, None)


def load_module(place: str, what: str) -> ModuleType:
    if not place.endswith(".py"):
        return import_named(place)
    path = Path(place).expanduser().resolve()
    if not path.exists() or path.is_dir():
        raise PluginError(f"there is no {what} file {place}")
    try:
        regular_file(path)
    except OSError as error:
        raise PluginError(f"{place} cannot be read: {error.strerror}") from error
    if not os.access(path, os.R_OK):
        raise PluginError(f"{place} cannot be read: permission denied")
    sys.path.append(str(path.parent))  # it can import its neighbours; one called math.py hides nobody's math
    spec = importlib.util.spec_from_file_location(f"{what.replace(' ', '_')}_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def import_named(place: str) -> ModuleType:
    """A module by its name. One that it fails to import in turn is a fault of its own."""
    ways = "name file.py[:name] or package.module:name"
    if "/" in place or place.startswith("."):
        raise PluginError(f"{place} is no Python file; {ways}")
    for old, new in RENAMED.items():
        place = place.replace(old, new) if place.startswith(old) else place
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if f"{place}.".startswith(f"{error.name}."):
            raise PluginError(f"{error}; {ways}") from error
        raise
