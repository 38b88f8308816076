"""The JSON schema of a tool, from its type hints and its Google docstring, equal to that of transformers.

`transformers.utils.get_json_schema` itself would load transformers and torch into the processes of environments, which
are many and start often. Tests compare both. Imports nothing heavy.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

SIMPLE: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"}, float: {"type": "number"}, str: {"type": "string"}, bool: {"type": "boolean"},
    type(None): {"type": "null"}, list: {"type": "array"}, tuple: {"type": "array"}, dict: {"type": "object"}, Any: {},
}  # fmt: skip
HEADINGS = ("Args:", "Returns:", "Raises:")
ENTRY = re.compile(r"(\w+):\s*(.*)")
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def make_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Raise a ValueError that says what the tool lacks.

    >>> def add(a: int):
    ...     '''Adds.
    ...
    ...     Args:
    ...         a: A number.
    ...     '''
    >>> make_schema(add)["function"]["parameters"]
    {'type': 'object', 'properties': {'a': {'type': 'integer', 'description': 'A number.'}}, 'required': ['a']}
    """
    name, text = tool.__name__, inspect.getdoc(tool)
    if not text or not text.strip():
        raise ValueError(f"the tool {name} has no docstring; the model knows a tool only by its description")
    sections = split_docstring(text.strip())
    descriptions = read_arguments(sections["Args:"])
    properties, required = {}, []
    hints = read_hints(tool)
    for each in parameters(tool):
        if each.name not in hints:
            raise ValueError(f"the tool {name} has no type hint for {each.name}")
        if each.name not in descriptions:
            raise ValueError(f"the docstring of the tool {name} does not describe {each.name}: a line below Args:")
        properties[each.name] = described(type_schema(hints[each.name]), descriptions[each.name])
        if each.default is each.empty:
            required.append(each.name)
    function: dict[str, Any] = {
        "name": name,
        "description": "\n".join(sections[""]).strip(),
        "parameters": {"type": "object", "properties": properties} | ({"required": required} if required else {}),
    }
    if "return" in hints:
        returns = "\n".join(sections["Returns:"]).strip()
        function["return"] = type_schema(hints["return"]) | ({"description": returns} if returns else {})
    return {"type": "function", "function": function}


def parameters(tool: Callable[..., Any]) -> list[inspect.Parameter]:
    """Without the `self` of a method."""
    found = list(inspect.signature(tool).parameters.values())
    is_method = found and found[0].name in ("self", "cls") and found[0].annotation is inspect.Parameter.empty
    return found[1:] if is_method else found


def read_hints(tool: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(tool)
    except Exception as error:  # a name that does not exist
        raise ValueError(f"the type hints of the tool {tool.__name__} cannot be read: {error}") from error


def split_docstring(text: str) -> dict[str, list[str]]:
    """The lines of the description (named "") and of each section."""
    sections: dict[str, list[str]] = {"": [], **{heading: [] for heading in HEADINGS}}
    lines = sections[""]
    for line in text.split("\n"):
        if line.strip() in HEADINGS:
            lines = sections[line.strip()]
        else:
            lines.append(line)
    return sections


def read_arguments(lines: list[str]) -> dict[str, str]:
    """The description of each argument; a line that begins with a word and a colon begins the next one."""
    found: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, lines)):
        if entry := ENTRY.fullmatch(line):
            found[entry[1]] = [entry[2]]
        elif found:
            found[next(reversed(found))].append(line)
    return {name: " ".join(filter(None, parts)) for name, parts in found.items()}


def described(schema: dict[str, Any], description: str) -> dict[str, Any]:
    if choices := CHOICES.search(description):
        values = [each.strip() if isinstance(each, str) else each for each in json.loads(choices[1])]
        schema, description = schema | {"enum": values}, description[: choices.start()].strip()
    return schema | {"description": description}


def type_schema(hint: Any) -> dict[str, Any]:
    """An unknown class is an object."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None:
        return dict(SIMPLE.get(hint, {"type": "object"}))
    if origin is Union or origin is types.UnionType:
        return union_schema(inner)
    if origin is Literal:
        kinds = list(dict.fromkeys(SIMPLE[type(value)]["type"] for value in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": type_schema(inner[0])}
    if origin is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [type_schema(each) for each in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_schema(inner[1])}
    raise ValueError(f"the type hint {hint} has no JSON schema; use int, float, str, bool, list[..], dict[str, ..], "
                     "Literal[..] or unions of them")  # fmt: skip


def union_schema(members: tuple[Any, ...]) -> dict[str, Any]:
    schemas = [type_schema(each) for each in members if each is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(set(each) == {"type"} and isinstance(each["type"], str) for each in schemas):
        kinds = sorted({each["type"] for each in schemas})
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if type(None) in members else {})
