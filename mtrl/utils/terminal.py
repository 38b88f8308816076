"""The door to the terminal: nothing passes that could move the cursor, and what is closed leads nowhere."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# Control characters except the line break, marks that reverse the direction of writing, and the surrogates that stand
# for bytes which are no UTF-8, as in names of files.
UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
PROGRESS = re.compile("\r|(\x1b\\[A)+$")  # what a progress bar (tqdm) begins a write with, or all that it writes


def sanitize(text: str) -> str:
    """The text with control characters spelled out: what a model, a file or a reward says must not move the cursor.

    >>> print(sanitize("red\x1b[2J"))
    red\\x1b[2J
    """
    return UNPRINTABLE.sub(lambda sign: repr(sign.group())[1:-1], text)


class SanitizedStream:
    """A stream that spells control characters out. Only tqdm, whose bars return to where they began, may move so."""

    def __init__(self, behind: TextIO) -> None:
        self.behind = behind

    def write(self, text: str) -> int:
        by_bar = sys._getframe(1).f_globals.get("__name__", "").startswith("tqdm.")
        moves = PROGRESS.match(text) if by_bar else None
        start = moves.end() if moves else 0
        with self._named():
            self.behind.write(text[:start] + sanitize(text[start:]))
        return len(text)

    def flush(self) -> None:
        with self._named():
            self.behind.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Gives an error the name of the stream: a full disk alone would not say what could not be written."""
        try:
            yield
        except OSError as error:
            error.filename = getattr(self.behind, "name", None)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


def behind_door(stream: TextIO) -> TextIO:
    """The stream itself, for a writer who paints and who sanitizes all that is not its own."""
    return stream.behind if isinstance(stream, SanitizedStream) else stream


@contextmanager
def doors() -> Iterator[None]:
    """stdout and stderr behind doors."""
    open_closed()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = SanitizedStream(sys.stdout), SanitizedStream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def open_closed() -> None:
    """Streams that the caller closed (`>&-`) lead nowhere: else the next file that is opened, perhaps a checkpoint,
    would get their number, and with it what is written there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 (it stays open)


def separate_log() -> TextIO | None:
    """stdout where it is a log of its own, neither a terminal nor where stderr goes: on a cluster people look for a run
    there. None too where somebody has put something else in its place, as notebooks do."""
    try:
        if (sys.stdout.fileno(), sys.stderr.fileno()) != (1, 2) or sys.stdout.isatty():
            return None
        return None if os.path.samestat(os.fstat(1), os.fstat(2)) else sys.stdout
    except (AttributeError, OSError, ValueError):
        return None
