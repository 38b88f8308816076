"""Options, letters and image marks: from the forms of the datasets to ours."""

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


class SkipRow(Exception):
    """Why a row does not become a question; rows with the same reason are counted together."""


def parse_options(value: Any) -> list[str]:
    """Read a list, or a list written as text.

    >>> parse_options("['$6', \\"its mother's\\"]")
    ['$6', "its mother's"]
    """
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise SkipRow("its options are text that is not a list") from None
    if not isinstance(value, (list, tuple)):
        raise SkipRow("it has no options")
    return [str(option).strip() for option in value]


def strip_labels(options: Sequence[str]) -> list[str]:
    """Remove the labels if every option has its own, and placeholders at the end.

    >>> strip_labels(["A) a rise", "B) a fall", "-"])
    ['a rise', 'a fall']
    """
    texts = list(options)
    while texts and texts[-1].strip() in ("", "-"):
        texts.pop()
    labels = [LABEL.fullmatch(option) for option in texts]
    if all(label and label[1] == letter for label, letter in zip(labels, LETTERS, strict=False)):
        return [label[2].strip() for label in labels if label]
    return texts


def check_options(options: Sequence[str]) -> list[str]:
    if not 2 <= len(options) <= len(LETTERS):
        raise SkipRow(f"it has {len(options)} options, not 2 to {len(LETTERS)}")
    return list(options)


def option_letter(answer: Any, options: Sequence[str]) -> str:
    """Return the letter of an answer that is a letter, a 0-based index or an option's text.

    >>> option_letter("B. a fall", ["a rise", "a fall"]), option_letter(0, ["a rise", "a fall"])
    ('B', 'A')
    """
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise SkipRow("it has no answer")
    if isinstance(answer, int):
        if 0 <= answer < len(options):
            return LETTERS[answer]
    else:
        text = str(answer).strip()
        if text in options:
            return LETTERS[list(options).index(text)]
        match = LEADING_LETTER.match(text)
        if match and LETTERS.index(match[1]) < len(options):
            return match[1]
    raise SkipRow("its answer is none of its options")


def place_marks(question: str, options: Sequence[str], images: Mapping[int, Any]) -> tuple[str, list[str], list[Any]]:
    """Replace `<image 2>` by `<image>` and sort the images by their order in the text, question before options. A
    repeated mark becomes the number of its image; an image without a mark comes first.

    >>> place_marks("See <image 2>.", ["like <image 1>", "<image 2>"], {1: "a", 2: "b"})
    ('See <image>.', ['like <image>', 'image 1'], ['b', 'a'])
    """
    texts = [question, *options]
    marks = [number for text in texts for number in NUMBERED_MARK.findall(text)]
    named = [int(number) for number in marks if number]
    free = [number for number in images if number not in named]  # for marks without a number, else to come first
    unnumbered = marks.count("")
    first, free = free[unnumbered:], free[:unnumbered]
    order = list(first)

    def replace_mark(mark: re.Match[str]) -> str:
        if not mark[1] and not free:
            raise RowError("it has more <image> marks than images")
        number = int(mark[1]) if mark[1] else free.pop(0)
        if number not in images:
            raise RowError(f"its text shows <image {number}>, and the column of that image is empty")
        if number in order:
            return f"image {order.index(number) + 1}"
        order.append(number)
        return "<image>"

    prompt, *new_options = [NUMBERED_MARK.sub(replace_mark, text) for text in texts]
    return "<image>" * len(first) + prompt, new_options, [images[number] for number in order]
