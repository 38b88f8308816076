"""Multiple choice: which letter did the response choose, and which was right (SPEC 3, `accuracy`).

English and Chinese, half and full width. A letter counts where it stands alone: "B", "(b)", "Ｂ．", "选B", never the
one inside "Both". In running text "a" and "I" are words, so there they count only in brackets or alone on a line.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

LETTERS = "ABCDEFGHIJ"

THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL | re.IGNORECASE)
ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
KEY_WORD = re.compile(r"(?:final answer|answer|option|choice|答案|选项)\s*(?:is|为|是)?\s*:\s*(.*)", re.IGNORECASE)
LONE = re.compile(r"(?<![A-Za-z0-9])([A-Ja-j])(?![A-Za-z0-9'])")
BRACKETED = re.compile(r"[(\[{<【「《\"'*]+\s*([A-Ja-j])\s*[)\]}>】」》\"'*]+")
WHOLE = re.compile(r"\W*([A-Ja-j])\W*")
LEADING = re.compile(r"\W*([A-Ja-j])\s*[.):,、。)\]]\s*\S")
WORDS_OF_ONE_LETTER = ("a", "A", "I")


def chosen_letter(response: str, options: Sequence[str] | None = None) -> str | None:
    """The letter a response chose, or None. What stands in <think> does not count."""
    text = THINKING.sub(" ", unicodedata.normalize("NFKC", response))
    answers = ANSWER.findall(text)
    if answers:
        return letter_in(answers[-1], options)
    for line in reversed(text.splitlines()):
        if found := KEY_WORD.search(line):
            return letter_in(found[1], options)
    return last_lone_letter(text)


def letter_in(answer: str, options: Sequence[str] | None = None) -> str | None:
    """The letter in a short answer: "B", "(B) red", "B: red", "option b", or an option's own words."""
    answer = answer.strip()
    if found := WHOLE.fullmatch(answer) or LEADING.match(answer):
        return found[1].upper()
    if options is not None and (place := option_index(answer, options)) is not None:
        return LETTERS[place]
    if found := KEY_WORD.search(answer):
        return letter_in(found[1], options)
    return last_lone_letter(answer)


def last_lone_letter(text: str) -> str | None:
    last, place = None, -1
    for found in BRACKETED.finditer(text):
        last, place = found[1], found.start(1)
    for found in LONE.finditer(text):
        alone_on_line = text[: found.start()].rpartition("\n")[2] + text[found.end() :].partition("\n")[0]
        is_word = found[1] in WORDS_OF_ONE_LETTER and re.search(r"\w", alone_on_line)
        if found.start() > place and not is_word and (found[1].isupper() or not re.search(r"\w", alone_on_line)):
            last, place = found[1], found.start()
    return None if last is None else last.upper()


def true_letter(truth: Any, options: Sequence[str] | None = None) -> str | None:
    """The right letter, from a letter, a 0-based index or an option's text; None where it is none of these."""
    if truth is None or isinstance(truth, bool):
        return None
    if isinstance(truth, float) and truth.is_integer():
        truth = int(truth)
    if isinstance(truth, int):
        return LETTERS[truth] if 0 <= truth < len(LETTERS) else None
    text = unicodedata.normalize("NFKC", str(truth)).strip()
    if options is not None and (place := option_index(text, options)) is not None:
        return LETTERS[place]
    if found := WHOLE.fullmatch(text):
        return found[1].upper()
    if text.isdigit():
        return true_letter(int(text))
    return None


def option_index(text: str, options: Sequence[str]) -> int | None:
    """Which option these words are, case, width and closing marks aside."""
    wanted = plain(text)
    return next((i for i, option in enumerate(options[: len(LETTERS)]) if plain(str(option)) == wanted), None)


def plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().strip(" \t\r\n.,;:!?。，；：！？\"'()[]")
