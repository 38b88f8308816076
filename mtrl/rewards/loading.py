"""Finding a user's reward function: `path/to/file.py:name` or `package.module:name`. Imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mtrl.rewards.signatures import Reward

DEFAULT_NAMES = ("reward_function", "compute_score")
PLACE = struct.Struct("q")  # which sample of its message a worker is at, in memory that it shares with its parent


class NoReward(ValueError):
    """There is no such function; the message is all that a user needs. What a user's file raises is another matter."""


@dataclass(frozen=True)
class Setup:
    """What a worker process is for."""

    function: str
    kwargs: Mapping[str, Any]
    timeout_s: float
    memory_bytes: int
    parent: int  # its process id
    scratch: str  # a directory that must not outlive the parent


def load_reward(spec: str, kwargs: Mapping[str, Any], seconds: float | None = None) -> Reward:
    """Without a name: one of DEFAULT_NAMES, or the only public function."""
    place, name = split_spec(spec)
    module = load_module(place)
    return Reward(find_function(module, place, name), kwargs, module, seconds)


def find_function(module: ModuleType, place: str, name: str | None) -> Callable[..., Any]:
    if name is not None:
        if not callable(getattr(module, name, None)):
            raise NoReward(f"{place} has no function {name!r}; it has {', '.join(public_functions(module)) or 'none'}")
        return getattr(module, name)
    for default in DEFAULT_NAMES:
        if callable(getattr(module, default, None)):
            return getattr(module, default)
    names = public_functions(module)
    if len(names) != 1:
        raise NoReward(
            f"which function of {place} is the reward? It has {', '.join(names) or 'none'}; write {place}:NAME"
        )
    return getattr(module, names[0])


def name_of(spec: str) -> str:
    """For logs: the function's name, or the file's where the function was left to us."""
    place, name = split_spec(spec)
    return name or (Path(place).stem if place.endswith(".py") else place.rpartition(".")[2])


def split_spec(spec: str) -> tuple[str, str | None]:
    place, colon, name = spec.rpartition(":")
    return (place, name) if colon and place and "/" not in name and "\\" not in name else (spec, None)


def load_module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return import_named(place)
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise NoReward(f"there is no reward file {place}")
    if not os.access(path, os.R_OK):
        raise NoReward(f"{place} cannot be read: permission denied")
    sys.path.append(str(path.parent))  # it can import its neighbours; one called math.py hides nobody's math
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def import_named(place: str) -> ModuleType:
    """A module by its name. One that it fails to import in turn is a fault of its own."""
    ways = "name file.py[:name] or package.module:name"
    if "/" in place or place.startswith("."):
        raise NoReward(f"{place} is no Python file; {ways}")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if f"{place}.".startswith(f"{error.name}."):
            raise NoReward(f"{error}; {ways}") from error
        raise


def public_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
