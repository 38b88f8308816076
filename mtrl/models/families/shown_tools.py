"""Describe the tools of an environment in a prompt: by the chat template if it takes tools and teaches calls in a form
that is read, otherwise in words of ours, at the end of the system message or, where a template knows none, at the
beginning of the first user message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mtrl.protocols import Schema
from mtrl.types import Task, content_text

COLUMN = "environment"  # of a row: names its environment, if there are several
TEXT = """# Tools

You can call the functions whose signatures stand between <tools> and </tools>:
<tools>
{schemas}
</tools>

To call one, write its name and its arguments as a JSON object between <tool_call> and </tool_call>:
<tool_call>
{{"name": "the name of the function", "arguments": {{"the name of an argument": "its value"}}}}
</tool_call>
Its result follows in the next message."""

QUESTION = {"role": "user", "content": "probequestion"}
LINES = "probe\nlines"  # a template that writes a content as Python or as JSON changes the line break
PROBE, CALL = "probetool", "<tool_call>"  # how each form of calls begins that `environments/tool_calls.py` reads
CALLED_NAME = "probename"
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "probe0001", "type": "function", "function": {"name": CALLED_NAME, "arguments": {"probe": PROBE}}}
    ],
}
PROBE_SCHEMA: Schema = {
    "type": "function",
    "function": {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}},
}

Message = Mapping[str, Any]
Place = Literal["template", "system", "user"]


@dataclass(frozen=True)
class ShownTools:
    """`schemas` by the name of an environment; "" has those of every row."""

    schemas: Mapping[str, tuple[Schema, ...]] = field(default_factory=dict)
    place: Place = "template"

    def of(self, task: Task) -> tuple[Schema, ...]:
        if not self.schemas or "" in self.schemas:
            return self.schemas.get("", ())
        name = (task.columns or {}).get(COLUMN)
        if not isinstance(name, str) or name not in self.schemas:
            known = ", ".join(self.schemas)
            raise ValueError(f"the row's column {COLUMN} is {name!r}, which is none of the environments: {known}")
        return self.schemas[name]

    def place_in(self, messages: Sequence[Message], schemas: Sequence[Schema]) -> Sequence[Message]:
        """The messages, with the description if it is not the template that writes it."""
        if not (schemas and messages) or self.place == "template":
            return messages
        text = TEXT.format(schemas="\n".join(json.dumps(each, ensure_ascii=False) for each in schemas))
        return add_to_system(messages, text) if self.place == "system" else add_to_question(messages, text)


def find_place(render: Callable[..., str]) -> Place:
    """Where the description stands: `render(messages, schemas)` is the rendered chat. A template that writes calls in
    another form than those that are read does not describe the tools."""
    written = _try_to_render(render, [QUESTION, CALLED])
    is_read = CALL in written or CALLED_NAME not in written
    if is_read and PROBE in _try_to_render(render, [QUESTION], [PROBE_SCHEMA]):
        return "template"
    system = {"role": "system", "content": LINES}
    return "system" if LINES in _try_to_render(render, [system, QUESTION]) else "user"


def _try_to_render(render: Callable[..., str], *arguments: Any) -> str:
    try:
        return render(*arguments)
    except (ValueError, TypeError):  # the template refuses it; a user's own `render` takes no tools
        return ""


def add_to_system(messages: Sequence[Message], text: str) -> list[Message]:
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    content = first.get("content") or ""
    if isinstance(content, str) or all(part["type"] == "text" for part in content):
        # One text: some templates show only the first part of a system message.
        return [{**first, "content": f"{content_text(content)}\n\n{text}"}, *messages[1:]]
    return [{**first, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}, *messages[1:]]


def add_to_question(messages: Sequence[Message], text: str) -> list[Message]:
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": text}, *messages]
    content = messages[at].get("content") or ""
    if isinstance(content, str):
        begun: Any = f"{text}\n\n{content}"
    elif content[0]["type"] == "text":  # in one part: some templates strip each of them
        begun = [{"type": "text", "text": f"{text}\n\n{content[0]['text']}"}, *content[1:]]
    else:
        begun = [{"type": "text", "text": f"{text}\n\n"}, *content]
    return [*messages[:at], {**messages[at], "content": begun}, *messages[at + 1 :]]
