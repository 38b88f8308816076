"""Finding a user's reward function: `path/to/file.py:name` or `package.module:name`. Imports nothing heavy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mtrl.rewards.signatures import UserReward
from mtrl.utils.plugins import PluginError, load_module, split_spec

DEFAULT_NAMES = ("reward_function", "compute_score")


@dataclass(frozen=True)
class Setup:
    """What a worker process is for."""

    function: str
    kwargs: Mapping[str, Any]
    timeout_s: float
    memory_bytes: int


def load_reward(spec: str, kwargs: Mapping[str, Any], seconds: float | None = None) -> UserReward:
    """Loads a user's function. A spec without a name means one of DEFAULT_NAMES, or the only public function."""
    place, name = split_spec(spec)
    module = load_module(place, "reward")
    return UserReward(find_function(module, place, name), kwargs, module, seconds)


def find_function(module: ModuleType, place: str, name: str | None) -> Callable[..., Any]:
    if name is not None:
        if not callable(getattr(module, name, None)):
            raise PluginError(
                f"{place} has no function {name!r}; it has {', '.join(public_functions(module)) or 'none'}"
            )
        return getattr(module, name)
    for default in DEFAULT_NAMES:
        if callable(getattr(module, default, None)):
            return getattr(module, default)
    names = public_functions(module)
    if len(names) != 1:
        raise PluginError(
            f"which function of {place} is the reward? It has {', '.join(names) or 'none'}; write {place}:NAME"
        )
    return getattr(module, names[0])


def reward_name(spec: str) -> str:
    """The name of a reward in logs: the function's, or the file's where the spec names no function."""
    place, name = split_spec(spec)
    return name or (Path(place).stem if place.endswith(".py") else place.rpartition(".")[2])


def public_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
