"""Read the tool calls of a response. Two forms are known, by the templates of Qwen; both may occur in one response:

    <tool_call>{"name": "zoom", "arguments": {"box": [0, 0, 56, 28]}}</tool_call>
    <tool_call><function=zoom><parameter=box>[0, 0, 56, 28]</parameter></function></tool_call>

What stands before the last </think> is thinking and what stands in a code fence is a quotation: neither calls anything.
A call that cannot be read becomes a `ToolCall` with an error for the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mtrl.environments.records import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
START = re.compile(r"<tool_call>|^ {0,3}(?P<fence>`{3,}|~{3,})[^\n]*(?:\n|\Z)", re.MULTILINE)
SPACE = re.compile(r"\s*")
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\s*(.*?)\s*</parameter>", re.DOTALL)
END_FUNCTION = re.compile(r"\s*</function>\s*</tool_call>")
EXPECTED = 'write <tool_call>{"name": .., "arguments": {..}}</tool_call>'
EXPECTED_XML = (
    "write <function=NAME>, a <parameter=KEY>value</parameter> for each argument, then </function></tool_call>"
)

Schemas = Sequence[Mapping[str, Any]]


def parse_tool_calls(text: str, schemas: Schemas = ()) -> list[ToolCall]:
    """The calls in the order of the text. In the XML form every value is text: the schemas say which are numbers.

    >>> parse_tool_calls('I look. <tool_call>{"name": "zoom", "arguments": {"box": [0, 0, 9, 9]}}</tool_call>')
    [ToolCall(name='zoom', arguments={'box': [0, 0, 9, 9]}, error=None)]
    """
    calls: list[ToolCall] = []
    place = max(0, text.rfind("</think>"))
    while match := START.search(text, place):
        if match["fence"]:
            place = end_of_fence(text, match)
        else:
            call, place = read_call(text, match.end(), schemas)
            calls.append(call)
    return calls


def end_of_fence(text: str, start: re.Match[str]) -> int:
    """As in Markdown: a line of at least as many signs ends it, or the text does."""
    sign = start["fence"]
    end = re.compile(rf"^ {{0,3}}{re.escape(sign[0])}{{{len(sign)},}}[ \t]*(?:\n|\Z)", re.MULTILINE)
    found = end.search(text, start.end())
    return found.end() if found else len(text)


def read_call(text: str, place: int, schemas: Schemas) -> tuple[ToolCall, int]:
    """The call whose body begins here, and where the text goes on."""
    try:
        return read_xml(text, match, schemas) if (match := FUNCTION.match(text, place)) else read_json(text, place)
    except (ValueError, RecursionError) as error:
        end = text.find(CLOSE, place)
        return ToolCall("", error=str(error)), len(text) if end < 0 else end + len(CLOSE)


def read_json(text: str, place: int) -> tuple[ToolCall, int]:
    begin = SPACE.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing as well
    try:
        call, end = json.JSONDecoder().raw_decode(text, begin)
    except json.JSONDecodeError as error:
        where = f"at character {error.pos - begin + 1}" if error.pos < len(text) else "where the response ends"
        raise ValueError(f"The tool call is no valid JSON: {error.msg} {where}; {EXPECTED}") from None
    end = SPACE.match(text, end).end()  # type: ignore[union-attr]
    if not text.startswith(CLOSE, end):
        raise ValueError(f"The tool call does not end with {CLOSE} after its JSON object; {EXPECTED}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError(f"The tool call has no name; {EXPECTED}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f"The arguments of {call['name']} are no JSON object; {EXPECTED}")
    return ToolCall(call["name"], arguments), end + len(CLOSE)


def read_xml(text: str, function: re.Match[str], schemas: Schemas) -> tuple[ToolCall, int]:
    name, place = function[1].strip(), function.end()
    types = parameter_types(name, schemas)
    arguments: dict[str, Any] = {}
    while match := PARAMETER.match(text, place):
        key = match[1].strip()
        if key in arguments:
            raise ValueError(f"The call of {name} has the parameter {key} twice")
        arguments[key] = read_value(match[2], types.get(key))
        place = match.end()
    if not (end := END_FUNCTION.match(text, place)):
        raise ValueError(f"The call of {name} cannot be read after {len(arguments)} parameters; {EXPECTED_XML}")
    return ToolCall(name, arguments), end.end()


def parameter_types(name: str, schemas: Schemas) -> Mapping[str, Mapping[str, Any]]:
    for schema in schemas:
        if schema["function"]["name"] == name:
            return schema["function"]["parameters"].get("properties", {})
    return {}


def read_value(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Text stays text where the schema wants it; without a schema, what is JSON is read as JSON.

    >>> read_value("75001", {"type": "string"}), read_value("75001", None), read_value("Lille", None)
    ('75001', 75001, 'Lille')
    """
    if schema is not None and allows_text(schema):
        return None if text == "null" and schema.get("nullable") else text
    try:
        return json.loads(text)
    except ValueError:
        plain = {"True": True, "False": False, "None": None}  # as Python writes them
        return plain.get(text, text)


def allows_text(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", ())
    return "string" in ([kinds] if isinstance(kinds, str) else kinds) or any(
        allows_text(each) for each in schema.get("anyOf", ())
    )
