"""Parse <think> and <answer> in one pass over a response of any length."""

from __future__ import annotations

import re

THINK = re.compile(r"<(/?)think>", re.IGNORECASE)
ANSWER = re.compile(r"<(/?)answer>", re.IGNORECASE)


def strip_thoughts(text: str) -> str:
    """Return the text outside <think>..</think>. A thought without an end reaches to the end of the text; one without
    a beginning begins with the text, since a template may open it in the prompt.

    >>> strip_thoughts("<think>A?</think>B"), strip_thoughts("A?</think>B"), strip_thoughts("B<think>A?")
    (' B', 'B', 'B ')
    """
    pieces: list[str] = []
    start, inside, opened = 0, False, False
    for tag in THINK.finditer(text):
        if not tag[1] and not inside:
            pieces += [text[start : tag.start()], " "]
            inside = opened = True
        elif tag[1] and (inside or not opened):
            start, inside = tag.end(), False
    return "".join(pieces) if inside else "".join(pieces) + text[start:]


def last_answer(text: str) -> str | None:
    """Return the content of the last <answer>, up to its end tag or the end of the text, or None.

    >>> last_answer("<answer>A</answer>, no: <answer>B</answer>.")
    'B'
    """
    span: tuple[int, int] | None = None
    for tag in ANSWER.finditer(text):
        if not tag[1]:
            span = tag.end(), len(text)
        elif span and span[1] == len(text):
            span = span[0], tag.start()
    return None if span is None else text[slice(*span)]
