"""Colours on a terminal."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TextIO

CODES = {
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36",
    "praised": "30;46", "blamed": "30;43",  # black on cyan and on yellow: green and red mean right and wrong
}  # fmt: skip


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


def wants_colour(stream: TextIO, enabled: bool = True) -> bool:
    """Whether to write colours: on a terminal that can show them, unless NO_COLOR is set."""
    return enabled and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
