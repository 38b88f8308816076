"""What stands in <think> and <answer>, in one pass over a response of any length."""

from __future__ import annotations

import re

THINK = re.compile(r"<(/?)think>", re.IGNORECASE)
ANSWER = re.compile(r"<(/?)answer>", re.IGNORECASE)


def without_thoughts(text: str) -> str:
    """The text outside <think>..</think>. A thought without an end reaches to the end of the text. One without a
    beginning began before the text: templates may open it in the prompt.

    >>> without_thoughts("<think>A?</think>B"), without_thoughts("A?</think>B"), without_thoughts("B<think>A?")
    (' B', 'B', 'B ')
    """
    kept: list[str] = []
    start, inside, opened = 0, False, False
    for tag in THINK.finditer(text):
        if not tag[1] and not inside:
            kept += [text[start : tag.start()], " "]
            inside = opened = True
        elif tag[1] and (inside or not opened):
            start, inside = tag.end(), False
    return "".join(kept) if inside else "".join(kept) + text[start:]


def last_answer(text: str) -> str | None:
    """What the last <answer> holds, up to its end or that of the text; None where there is none.

    >>> last_answer("<answer>A</answer>, no: <answer>B</answer>.")
    'B'
    """
    held: tuple[int, int] | None = None
    for tag in ANSWER.finditer(text):
        if not tag[1]:
            held = tag.end(), len(text)
        elif held and held[1] == len(text):
            held = held[0], tag.start()
    return None if held is None else text[held[0] : held[1]]
