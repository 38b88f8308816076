"""verl's tools as an environment class: objects of `BaseTool`, and the functions of `@function_tool`. In your file:

    from mtrl.environments.verl_tools import make_environment
    from my_tools import CropTool, word_count
    Tools = make_environment(CropTool(config, schema), word_count)

A `BaseTool` is created once per rollout, at reset, with the row's `tools_kwargs[NAME]["create_kwargs"]`, and released
at the end. (verl's own loop creates it for every call.) `get_reward` is the sum of what `execute` and functions
returned as rewards and of every `calc_reward`. Imports nothing heavy, and not verl.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mtrl.environments.contract import NOT_TOOLS
from mtrl.environments.json_schema import make_schema


def make_environment(*tools: Any) -> type:
    """Raise a ValueError if a tool has no schema, or two have the same name."""
    members: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for tool in tools:
        is_object = hasattr(tool, "execute")
        schema = read_schema(tool) if is_object else make_schema(tool)
        name = schema["function"]["name"]
        if name in members:
            raise ValueError(f"two tools have the name {name}")
        if name in NOT_TOOLS or name.startswith("_"):
            raise ValueError(f"no tool may have the name {name}")
        members[name] = method_of_object(name) if is_object else method_of_function(tool)
        members[name].tool_schema = schema
        if is_object:
            objects[name] = tool
    return type("VerlTools", (VerlEnvironment,), {**members, "_objects": objects})


class VerlEnvironment:
    _objects: Mapping[str, Any]

    async def reset(self, **row: Any) -> None:
        extra = row.get("extra_info")
        keywords = row.get("tools_kwargs") or (extra.get("tools_kwargs") if isinstance(extra, Mapping) else None) or {}
        self._reward, self._keywords, self._ids = 0.0, keywords, dict[str, Any]()
        for name, tool in self._objects.items():
            created = await tool.create(create_kwargs=self._of(name, "create_kwargs"))
            self._ids[name] = created[0] if isinstance(created, tuple) else created

    async def get_reward(self) -> float:
        final = [float(await tool.calc_reward(self._ids[name])) for name, tool in self._objects.items()]
        return self._reward + sum(final)

    async def _close(self) -> None:
        for name, tool in self._objects.items():
            await tool.release(self._ids[name])

    def _of(self, name: str, part: str) -> dict[str, Any]:
        return dict((self._keywords.get(name) or {}).get(part) or {})

    def _take(self, result: Any) -> Any:
        """Keep the reward of a result; return its content."""
        if isinstance(result, tuple):
            self._reward += float(result[1] or 0.0)
            result = result[0]
        return to_blocks(result)


def method_of_object(name: str) -> Callable[..., Any]:
    async def execute(self: VerlEnvironment, **parameters: Any) -> Any:
        tool = self._objects[name]
        keywords = self._of(name, "execute_kwargs")
        return self._take(await tool.execute(self._ids[name], parameters, **keywords))

    return execute


def method_of_function(function: Callable[..., Any]) -> Callable[..., Any]:
    async def wait(self: VerlEnvironment, **arguments: Any) -> Any:
        return self._take(await function(**arguments))

    def call(self: VerlEnvironment, **arguments: Any) -> Any:
        return self._take(function(**arguments))

    method: Any = wait if inspect.iscoroutinefunction(function) else call
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(function)
    method.__signature__ = signature.replace(parameters=[receiver, *signature.parameters.values()])
    made: Callable[..., Any] = method
    return made


def read_schema(tool: Any) -> dict[str, Any]:
    schema: Any = getattr(tool, "tool_schema", None)
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_unset=True, exclude_none=True)
    if not isinstance(schema, Mapping) or "name" not in schema.get("function", {}):
        raise ValueError(f"the tool {type(tool).__name__} has no tool_schema with a function's name")
    return dict(schema)


def to_blocks(response: Any) -> Any:
    """A `ToolResponse` (text, image, video) as content blocks; anything else as it is."""
    if isinstance(response, (str, Mapping)) or not (hasattr(response, "text") or hasattr(response, "image")):
        return response
    if getattr(response, "video", None):
        raise ValueError("videos cannot be shown; return images")
    images = [{"type": "image", "image": image} for image in getattr(response, "image", None) or ()]
    text = getattr(response, "text", None)
    return images + ([{"type": "text", "text": text}] if text else [])
