"""Text of models and users, fit to be shown."""

from __future__ import annotations


def shorten(text: str, limit: int) -> str:
    """Beginning and end of a text, `limit` characters in all, and how much is left out between them."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    return f"{text[:head]} [.. {len(text) - limit} characters ..] {text[len(text) - (limit - head) :]}"
