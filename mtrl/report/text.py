"""Text of models and users, fit to be shown."""

from __future__ import annotations

import re

UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # control characters except the line break


def sanitize(text: str) -> str:
    """The text with control characters spelled out: what a model says must not move the cursor."""
    return UNPRINTABLE.sub(lambda sign: repr(sign.group())[1:-1], text)


def shorten(text: str, limit: int) -> str:
    """Beginning and end of a text, `limit` characters in all, and how much is left out between them."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    return f"{text[:head]} [.. {len(text) - limit} characters ..] {text[len(text) - (limit - head) :]}"
