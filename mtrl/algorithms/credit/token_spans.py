"""Maps the tokens of a response to the characters of its text."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]  # first character, and one past the last


def token_spans(pieces: Sequence[str], text: str) -> list[Span]:
    """The characters that each token holds. If several tokens make one character (their pieces are empty except the
    last), each holds all of it; a token that the text leaves out, such as the end token, holds none."""
    spans: list[Span] = []
    position, pending = 0, 0
    for piece in pieces:
        pending += 1
        if piece:
            end = position + len(piece) if text.startswith(piece, position) else position
            spans += [(position, end)] * pending
            position, pending = end, 0
    if position < len(text):
        raise ValueError(f"the decoded tokens end after {position} of {len(text)} characters of the response")
    return spans + [(position, position)] * pending
