"""Output to the terminal: control characters are escaped, and closed streams are replaced by the null device."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

# Control characters except the line break, marks that reverse the writing direction, and surrogates (bytes of a file
# name that are not UTF-8).
UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
PROGRESS = re.compile("\r|(\x1b\\[A)+$")  # the start of a write by a progress bar (tqdm), or all of it


def sanitize(text: str) -> str:
    """Escape control characters: text of a model, a file or a reward must not move the cursor.

    >>> print(sanitize("red\x1b[2J"))
    red\\x1b[2J
    """
    return UNPRINTABLE.sub(lambda sign: repr(sign.group())[1:-1], text)


def say_at_once(text: str) -> None:
    """Write to stderr unbuffered: a signal may interrupt sys.stderr in the middle of a line."""
    with suppress(OSError):  # stderr is closed
        os.write(2, f"{sanitize(text)}\n".encode())


class SanitizedStream:
    """A stream that escapes control characters. Only tqdm, whose bars return to the start of the line, may move."""

    def __init__(self, wrapped: TextIO) -> None:
        self.wrapped = wrapped

    def write(self, text: str) -> int:
        by_bar = sys._getframe(1).f_globals.get("__name__", "").startswith("tqdm.")
        moves = PROGRESS.match(text) if by_bar else None
        start = moves.end() if moves else 0
        with self._name_errors():
            self.wrapped.write(text[:start] + sanitize(text[start:]))
        return len(text)

    def isatty(self) -> bool:
        """Whether it is a terminal, for tqdm and for us. Others (wandb, rich) hear that it is none: their colours and
        moves of the cursor would be escaped and shown."""
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.startswith(("tqdm.", "mtrl.")) and self.wrapped.isatty()

    def flush(self) -> None:
        with self._name_errors():
            self.wrapped.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    @contextmanager
    def _name_errors(self) -> Iterator[None]:
        """Give an OSError the name of the stream: a full disk alone would not say what could not be written."""
        try:
            yield
        except OSError as error:
            error.filename = getattr(self.wrapped, "name", None)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


def unwrap_stream(stream: TextIO) -> TextIO:
    """The raw stream, for a writer that moves the cursor and sanitizes foreign text itself."""
    return stream.wrapped if isinstance(stream, SanitizedStream) else stream


@contextmanager
def sanitized_streams() -> Iterator[None]:
    """Sanitize stdout and stderr."""
    _reopen_closed_streams()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = SanitizedStream(sys.stdout), SanitizedStream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _reopen_closed_streams() -> None:
    """Streams that the caller closed (`>&-`) lead to the null device: otherwise the next file opened, perhaps a
    checkpoint, would get their number and the text written there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 (it stays open)


def separate_log() -> TextIO | None:
    """stdout if it is a separate log, neither a terminal nor the file of stderr: on a cluster users expect progress
    there. None if something replaced it, as notebooks do."""
    try:
        if (sys.stdout.fileno(), sys.stderr.fileno()) != (1, 2) or sys.stdout.isatty():
            return None
        return None if os.path.samestat(os.fstat(1), os.fstat(2)) else sys.stdout
    except (AttributeError, OSError, ValueError):
        return None
