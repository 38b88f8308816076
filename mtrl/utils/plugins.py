"""Load objects from user files: `path/to/file.py:name` or `package.module:name`. Imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from mtrl.utils.files import regular_file

RENAMED = {"mtrl.zoo.": "mtrl.embedded."}  # modules of this package that configurations of 0.1.0 name


class PluginError(ValueError):
    """The named object does not exist; the message suffices for a user. Errors inside a user's file pass unchanged."""


def load_plugin(spec: str, what: str) -> Any:
    """The object that `spec` names; `what` describes it in error messages."""
    source, name = split_spec(spec)
    module = load_module(source, what)
    if name is None or not hasattr(module, name):
        own = {each: value for each, value in vars(module).items() if not each.startswith("_")}
        defined = [each for each, value in own.items() if getattr(value, "__module__", None) == module.__name__]
        raise PluginError(f"{source} has no {what} {name or ''}; it has {', '.join(defined) or 'nothing'}")
    return getattr(module, name)


def load_user_object(spec: str, what: str) -> Any:
    """The object that `spec` names; PluginError says in one line what is wrong, even if the file itself raises."""
    try:
        return load_plugin(spec, what)
    except PluginError:
        raise
    except Exception as error:  # anything the user's file raises
        where = find_line(error, split_spec(spec)[0])
        raise PluginError(f"{spec} cannot be loaded: {type(error).__name__}: {error}{where}") from error


def find_line(error: BaseException, file: str) -> str:
    """` (file.py:12)`: the last line of the file that the error passed through; empty if there is none."""
    path = Path(file).expanduser().resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f" ({path.name}:{lines[-1]})" if lines else ""


def split_spec(spec: str) -> tuple[str, str | None]:
    """The file or module of a spec, and the name in it."""
    source, colon, name = spec.rpartition(":")
    return (source, name) if colon and source and "/" not in name and "\\" not in name else (spec, None)


def load_module(source: str, what: str) -> ModuleType:
    if not source.endswith(".py"):
        return _import_module(source)
    path = Path(source).expanduser().resolve()
    if not path.exists() or path.is_dir():
        raise PluginError(f"there is no {what} file {source}")
    try:
        regular_file(path)
    except OSError as error:
        raise PluginError(f"{source} cannot be read: {error.strerror}") from error
    if not os.access(path, os.R_OK):
        raise PluginError(f"{source} cannot be read: permission denied")
    sys.path.append(str(path.parent))  # it can import its neighbours; appended, so a math.py there hides no other
    spec = importlib.util.spec_from_file_location(f"{what.replace(' ', '_')}_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    """A module by its name. An import that fails inside it raises its own error."""
    hint = "name file.py[:name] or package.module:name"
    if "/" in name or name.startswith("."):
        raise PluginError(f"{name} is no Python file; {hint}")
    for old, new in RENAMED.items():
        name = name.replace(old, new) if name.startswith(old) else name
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            raise PluginError(f"{error}; {hint}") from error
        raise
