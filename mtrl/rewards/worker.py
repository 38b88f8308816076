"""A reward worker process: loads one user function and calls it until its pipe closes. Imports nothing heavy.

    python -m mtrl.rewards.worker FD FUNCTION      (started by `sandbox.py`)

It receives (sample, keyword arguments) and answers ("value", number, extras) or ("error", message).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

DEFAULT_NAMES = ("reward_function", "compute_score")
OTHER_SIGNATURES = {  # by a parameter's name (SPEC 3)
    "completions": "TRL's signature",
    "solution_str": "verl's signature",
    "reward_input": "EasyR1's signature",
    "reward_inputs": "EasyR1's signature",
    "signals": "the parameter `signals`",
}


def load_function(spec: str) -> Callable[..., Any]:
    """`path/to/file.py:name` or `package.module:name`; without a name one of DEFAULT_NAMES, or the only one."""
    place, name = split_spec(spec)
    module = load_module(place)
    function = find_function(module, place, name)
    refuse_other_signatures(function, easyr1=hasattr(module, "REWARD_TYPE"))
    return function


def find_function(module: ModuleType, place: str, name: str | None) -> Callable[..., Any]:
    if name is not None:
        if not callable(getattr(module, name, None)):
            raise ValueError(
                f"{place} has no function {name!r}; it has {', '.join(public_functions(module)) or 'none'}"
            )
        return getattr(module, name)
    for default in DEFAULT_NAMES:
        if callable(getattr(module, default, None)):
            return getattr(module, default)
    names = public_functions(module)
    if len(names) != 1:
        raise ValueError(
            f"which function of {place} is the reward? It has {', '.join(names) or 'none'}; write {place}:NAME"
        )
    return getattr(module, names[0])


def refuse_other_signatures(function: Callable[..., Any], easyr1: bool = False) -> None:
    """A function that wants to be called in another way would fail on every sample."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # some functions written in C do not say
        return
    found = [OTHER_SIGNATURES[name] for name in names if name in OTHER_SIGNATURES]
    if found or easyr1:
        raise ValueError(
            f"a reward function with {found[0] if found else 'REWARD_TYPE (EasyR1)'} cannot be called yet; write "
            "reward_function(data: dict) -> float | (float, dict)"
        )


def name_of(spec: str) -> str:
    """For logs: the function's name, or the file's where the function was left to us."""
    place, name = split_spec(spec)
    return name or (Path(place).stem if place.endswith(".py") else place.rpartition(".")[2])


def split_spec(spec: str) -> tuple[str, str | None]:
    place, colon, name = spec.rpartition(":")
    return (place, name) if colon and place and "/" not in name and "\\" not in name else (spec, None)


def load_module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no reward file {place}")
    sys.path.insert(0, str(path.parent))  # so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def public_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def call(function: Callable[..., Any], sample: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """("value", number, extras), with every way to go wrong as an error that says what to return instead."""
    result = function(sample, **kwargs)
    extras: dict[str, Any] = {}
    if isinstance(result, tuple):
        if len(result) != 2 or not isinstance(result[1], dict):
            raise TypeError("a reward function returns a number, None, or (number, dict of extra values)")
        result, extras = result[0], plain(result[1])
    if result is None:
        return ("value", None, extras)
    if isinstance(result, (str, bytes)) or not hasattr(result, "__float__"):
        raise TypeError(f"a reward function returns a number; it returned {type(result).__name__}")
    number = float(result)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"a reward must be finite; it was {number}")
    return ("value", number, extras)


def plain(extras: dict[str, Any]) -> dict[str, Any]:
    """Numbers, texts and lists of them, as JSON has them: arrays become lists, anything else its text."""
    as_json: dict[str, Any] = json.loads(json.dumps(extras, default=lambda x: getattr(x, "tolist", x.__str__)()))
    return as_json


def end_with(parent: int) -> None:
    """A parent that was killed cannot end a function that hangs, so it ends itself, with all that it started."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    try:
        function = load_function(sys.argv[2])
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        return
    connection.send(("ready",))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = call(function, *pickle.loads(message))
        except Exception:
            answer = ("error", traceback.format_exc())
        connection.send(answer)


if __name__ == "__main__":
    main()
