"""The parts of messages: their texts, the marks of their media, and where system messages are in a rendered chat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mtrl.types import Task

CHATML_SYSTEM = re.compile(r"<\|im_start\|>system\n.*?(?=<\|im_start\|>|\Z)", re.DOTALL)


def content_parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a message: {"type": "text", "text": ..}, {"type": "image"} or {"type": "video"}."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"not a message (a role and a content): {message!r:.200}")
    content = message.get("content")
    if isinstance(content, str):
        yield {"type": "text", "text": content}
        return
    if content is not None and not isinstance(content, (list, tuple)):
        raise ValueError(f"the content of a message is a {type(content).__name__}; it must be text or a list of parts")
    for part in content or ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "image", "video") or (kind == "text" and not isinstance(part.get("text"), str)):
            raise ValueError(f"not a part of a message (a text with its text, an image or a video): {part!r:.200}")
        yield dict(part)


def check_marks(task: Task, media_count: int) -> None:
    """Check that messages, task and given media agree in number and kind of media."""
    marks = [part["type"] for message in task.messages for part in content_parts(message) if part["type"] != "text"]
    kinds = [medium.kind for medium in task.media]
    if not len(marks) == len(kinds) == media_count:
        media = "media" if "video" in (*marks, *kinds) else "images"
        raise ValueError(
            f"the messages have {len(marks)} {media.removesuffix('s')} marks, the row names {len(kinds)} {media} and "
            f"{media_count} were given; the three must be equal"
        )
    if marks != kinds:
        raise ValueError(f"the messages have marks of {', '.join(marks)}, the row's media are {', '.join(kinds)}")


def system_spans(text: str, messages: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(begin, end) of system segments in the rendered text: in ChatML (Qwen) the whole turn, also one that the template
    adds; elsewhere the text of system messages."""
    if spans := [match.span() for match in CHATML_SYSTEM.finditer(text)]:
        return spans
    for message in messages:
        if message.get("role") == "system":
            body = "".join(part.get("text", "") for part in content_parts(message)).strip()  # templates trim
            begin = text.find(body)
            if body and begin >= 0:
                spans.append((begin, begin + len(body)))
    return spans
