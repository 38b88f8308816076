"""Where the tokens of a response stand in its text."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]  # first character, and the one after the last


def token_places(pieces: Sequence[str], text: str) -> list[Span]:
    """Which characters of a response each of its tokens holds. Tokens that are parts of one character hold all of it
    (their pieces are empty but for the last); a token that the text leaves out, such as the end, holds none."""
    places: list[Span] = []
    at, parts = 0, 0
    for piece in pieces:
        parts += 1
        if piece:
            end = at + len(piece) if text.startswith(piece, at) else at
            places += [(at, end)] * parts
            at, parts = end, 0
    if at < len(text):
        raise ValueError(f"the pieces of the tokens end after {at} of {len(text)} characters of the response")
    return places + [(at, at)] * parts
