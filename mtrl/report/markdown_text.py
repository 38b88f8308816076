"""Texts of models and users made safe for Markdown, and Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mtrl.utils.terminal import sanitize

TEXT_CHARS = 4000  # characters shown of one prompt or response
NAME_CHARS = 80


def shorten(text: str, limit: int) -> str:
    """Start and end of a text, `limit` characters in all, with the number of omitted characters between them."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    return f"{text[:head]} [.. {len(text) - limit} characters ..] {text[len(text) - (limit - head) :]}"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """
    >>> print(table(["part", "mean"], [["a|b", 0.5]]))
    | part | mean |
    |---|---|
    | a\\|b | 0.5 |
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("|" + "|".join(map(_cell, line)) + "|" for line in lines)


def _cell(value: object) -> str:
    text = sanitize(str(value)).replace("\n", "\\n").replace("|", "\\|")
    return text if text == "---" else f" {text} "


def escape_markup(name: str) -> str:
    """A name for a heading or a table, with all Markdown escaped except |, which `table` escapes."""
    line = shorten(sanitize(name).replace("\n", " "), NAME_CHARS)
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>#!" else sign for sign in line)


def fenced(text: str, language: str = "") -> str:
    """The text unchanged in a code block whose fence is longer than any fence in the text."""
    ticks = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}{language}\n{sanitize(shorten(text, TEXT_CHARS))}\n{fence}"


def number(value: float, digits: int = 4) -> str:
    """
    >>> number(1.23456), number(float("nan")), number(-0.0), number(0.1234, digits=2)
    ('1.235', 'n/a', '0', '0.12')
    """
    return "n/a" if value != value else f"{value + 0.0:.{digits}g}"  # adding 0.0 turns -0 into 0
