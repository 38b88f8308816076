"""Options, letters and image marks, as datasets spell them and as a run reads them."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mtrl.data.row_settings import RowError

LETTERS = "ABCDEFGHIJ"
NUMBERED_MARK = re.compile(r"<image\s*(\d*)\s*>", re.IGNORECASE)
LABEL = re.compile(r"\s*[(\[]?([A-J])[)\].:]\s*(.*)", re.DOTALL)
LEADING_LETTER = re.compile(r"\s*[(\[]?([A-J])(?![A-Za-z])")


class LeftOut(Exception):
    """Why a row does not become a question, in words that many rows share."""


def option_list(value: Any) -> list[str]:
    """A list, or a list written as text.

    >>> option_list("['$6', \\"its mother's\\"]")
    ['$6', "its mother's"]
    """
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise LeftOut("its options are text that is no list") from None
    if not isinstance(value, (list, tuple)):
        raise LeftOut("it has no options")
    return [str(option).strip() for option in value]


def without_labels(options: Sequence[str]) -> list[str]:
    """Labels of their own go where each option has its own; placeholders at the end go too.

    >>> without_labels(["A) a rise", "B) a fall", "-"])
    ['a rise', 'a fall']
    """
    kept = list(options)
    while kept and kept[-1].strip() in ("", "-"):
        kept.pop()
    labels = [LABEL.fullmatch(option) for option in kept]
    if all(found and found[1] == letter for found, letter in zip(labels, LETTERS, strict=False)):
        return [found[2].strip() for found in labels if found]
    return kept


def checked_options(options: Sequence[str]) -> list[str]:
    if not 2 <= len(options) <= len(LETTERS):
        raise LeftOut(f"it has {len(options)} options, and 2 to {len(LETTERS)} are wanted")
    return list(options)


def option_letter(answer: Any, options: Sequence[str]) -> str:
    """The letter of an answer that is a letter, a place from 0, or an option's text.

    >>> letter_of("B. a fall", ["a rise", "a fall"]), letter_of(0, ["a rise", "a fall"])
    ('B', 'A')
    """
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise LeftOut("it has no answer")
    if isinstance(answer, int):
        if 0 <= answer < len(options):
            return LETTERS[answer]
    else:
        text = str(answer).strip()
        if text in options:
            return LETTERS[list(options).index(text)]
        found = LEADING_LETTER.match(text)
        if found and LETTERS.index(found[1]) < len(options):
            return found[1]
    raise LeftOut("its answer is none of its options")


def place_marks(question: str, options: Sequence[str], images: Mapping[int, Any]) -> tuple[str, list[str], list[Any]]:
    """`<image 2>` becomes `<image>`, and the images come in the order in which the text shows them, question before
    options. One that is named again is called by its place; one that is never named comes first.

    >>> place_marks("See <image 2>.", ["like <image 1>", "<image 2>"], {1: "a", 2: "b"})
    ('See <image>.', ['like <image>', 'image 1'], ['b', 'a'])
    """
    texts = [question, *options]
    named = [int(number) for text in texts for number in NUMBERED_MARK.findall(text) if number]
    free = [number for number in images if number not in named]  # for marks without a number, else to come first
    bare = sum(number == "" for text in texts for number in NUMBERED_MARK.findall(text))
    first, free = free[bare:], free[:bare]
    order = list(first)

    def replaced(found: re.Match[str]) -> str:
        if not found[1] and not free:
            raise RowError("it has more <image> marks than images")
        number = int(found[1]) if found[1] else free.pop(0)
        if number not in images:
            raise RowError(f"its text shows <image {number}>, and the column of that image is empty")
        if number in order:
            return f"image {order.index(number) + 1}"
        order.append(number)
        return "<image>"

    asked, *shown = [NUMBERED_MARK.sub(replaced, text) for text in texts]
    return "<image>" * len(first) + asked, shown, [images[number] for number in order]
