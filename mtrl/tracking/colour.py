"""Colours on a terminal, and text that cannot play tricks with it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TextIO

CODES = {
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36",
    "praised": "30;42", "blamed": "30;41",  # black on green, black on red
}  # fmt: skip
UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # control characters except the line break


@dataclass(frozen=True)
class Paint:
    """
    >>> Paint(on=True)("8", "green"), Paint(on=False)("8", "green")
    ('\\x1b[32m8\\x1b[0m', '8')
    """

    on: bool = False

    def __call__(self, text: str, *styles: str) -> str:
        if not self.on or not text:
            return text
        code = ";".join(CODES[style] for style in styles)
        return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def wants_colour(stream: TextIO, asked: bool = True) -> bool:
    """Whether to write colours: on a terminal that can, unless the user said NO_COLOR."""
    return asked and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def sanitize(text: str) -> str:
    """The text with control characters spelled out: what a model says must not move the cursor."""
    return UNPRINTABLE.sub(lambda sign: repr(sign.group())[1:-1], text)


def shorten(text: str, limit: int) -> str:
    """Beginning and end of a text, `limit` characters in all, and how much is left out between them."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    return f"{text[:head]} [.. {len(text) - limit} characters ..] {text[len(text) - (limit - head) :]}"
