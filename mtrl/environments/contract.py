"""The contract of an environment class, as in TRL 1.16, read from the class. Imports nothing heavy.

reset(**row)         None, a text, or a list of content blocks, which end the prompt
any public method    a tool: type hints, and a Google docstring that describes each argument; sync or async
get_reward()         optional: a number, or None where it does not apply; sync or async
_close()             optional, not in TRL: called when the rollout is over
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mtrl.environments.json_schema import make_schema
from mtrl.environments.records import ToolSet
from mtrl.utils.plugins import load_plugin

NOT_TOOLS = ("reset", "get_reward")
OWN_SCHEMA = "tool_schema"  # the attribute of a method that brings its own schema


def load_environment(spec: str) -> type:
    """The class that `file.py:Class` or `package.module:Class` names."""
    cls = load_plugin(spec, "environment")
    if not inspect.isclass(cls):
        raise ValueError(f"{spec} is no class; an environment is a class with the method reset")
    return cls


def tool_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """In alphabetical order, as the chat template shows them in TRL."""
    members = inspect.getmembers(cls, predicate=inspect.isfunction)
    return {name: method for name, method in members if name not in NOT_TOOLS and not name.startswith("_")}


def describe(cls: type) -> ToolSet:
    """Raise a ValueError that says what the class lacks."""
    if not callable(getattr(cls, "reset", None)):
        raise ValueError(f"{cls.__name__} has no method reset; an environment begins with reset(self, **row)")
    schemas: dict[str, Mapping[str, Any]] = {}
    for method in tool_methods(cls).values():
        schema = getattr(method, OWN_SCHEMA, None) or make_schema(method)
        name = schema["function"]["name"]
        if name in schemas:
            raise ValueError(f"{cls.__name__} has two tools of the name {name}")
        schemas[name] = schema
    waits = {name for name, method in inspect.getmembers(cls) if inspect.iscoroutinefunction(method)}
    return ToolSet(cls.__name__, tuple(schemas.values()), frozenset(waits), hasattr(cls, "get_reward"))


def reset_arguments(cls: type, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The columns that reset takes; a seed only where it declares one by name and the row has none."""
    parameters = inspect.signature(cls.reset).parameters  # type: ignore[attr-defined]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    given = {name: value for name, value in row.items() if takes_any or name in parameters}
    return {"seed": seed, **given} if "seed" in parameters else given


def check_arguments(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """Why the arguments do not fit, for the model to read; None if they do. `tool` is a bound method."""
    signature = inspect.signature(tool)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = ", ".join(name if each.default is each.empty else f"{name} (optional)"
                          for name, each in signature.parameters.items())  # fmt: skip
        return f"{str(error)[:500]}; the tool takes {takes or 'no arguments'}"
    return None
