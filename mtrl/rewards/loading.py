"""Load a user's reward function: `path/to/file.py:name` or `package.module:name`. Imports nothing heavy."""

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
class WorkerSetup:
    """The first message to a worker process."""

    function: str
    kwargs: Mapping[str, Any]
    timeout_s: float
    memory_bytes: int


def load_reward(spec: str, kwargs: Mapping[str, Any], seconds: float | None = None) -> UserReward:
    """Load a user's function. A spec without a name means one of DEFAULT_NAMES, or the only public function."""
    location, name = split_spec(spec)
    module = load_module(location, "reward")
    return UserReward(find_function(module, location, name), kwargs, module, seconds)


def find_function(module: ModuleType, location: str, name: str | None) -> Callable[..., Any]:
    public = public_functions(module)
    listed = ", ".join(public) or "none"
    if name is not None:
        if not callable(getattr(module, name, None)):
            raise PluginError(f"{location} has no function {name!r}; it has {listed}")
        return getattr(module, name)
    for default in DEFAULT_NAMES:
        if callable(getattr(module, default, None)):
            return getattr(module, default)
    if len(public) != 1:
        raise PluginError(f"which function of {location} is the reward? It has {listed}; write {location}:NAME")
    return getattr(module, public[0])


def reward_name(spec: str) -> str:
    """Return the name of a reward in logs: the function's, or the file's if the spec names no function."""
    location, name = split_spec(spec)
    return name or (Path(location).stem if location.endswith(".py") else location.rpartition(".")[2])


def public_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
