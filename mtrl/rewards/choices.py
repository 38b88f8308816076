"""Multiple choice: which letter did the response choose, and which was right (SPEC 3, `accuracy`).

English and Chinese, half and full width. A letter counts where it stands alone: "B", "(b)", "Ｂ．", "选B", never the
one inside "Both". In running text a small letter counts only in brackets, alone on a line or after a word of choice
("option b"), and "A" and "I" not where they are words: "A cat sits there", "I think", "it is a cat".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

LETTERS = "ABCDEFGHIJ"

THINKING = re.compile(r"<think>.*?(?:</think>|\Z)|\A(?:(?!<think>).)*</think>", re.DOTALL | re.IGNORECASE)
ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
KEY_WORD = re.compile(r"(?:answer|option|choice|答案|选项)[\s*_]*(?:is|为|是)?[\s*_]*:", re.IGNORECASE)
LETTER = r"(?<![A-Za-z0-9À-ɏ])([A-Ja-j])(?![A-Za-z0-9À-ɏ]|['’][A-Za-z])"
LONE = re.compile(LETTER)
WHOLE = re.compile(r"\W*([A-Ja-j])\W*")
LEADING = re.compile(r"\W*([A-Ja-j])\s*[.):,、。\]]\s*\S")
LETTER_AND_WORDS = re.compile(r"\W*([A-Ja-j])\s+(.+)", re.DOTALL)
MARKED = re.compile(
    rf"[(\[{{【「《\"'*]+\s*{LETTER}\s*[)\]}}】」》\"'*]+"  # in brackets
    rf"|^\W*{LETTER}\W*$"  # alone on a line
    r"|(?:(?i:answer|option|choice|choose|pick|select)|答案|选项|选择|选)\W*(?:(?i:is)\b|为|是)?\W*"
    rf"{LETTER}(?!(?<=[ai])\s+\w)",  # after a word of choice
    re.MULTILINE,
)
GOES_ON = r"(?=\s+(?!(?:is|because|since|and|or)\b)[a-z])"
WORD = re.compile(rf"(?:\A|[.!?:\n]\s*)A{GOES_ON}|(?:\A|\s)I{GOES_ON}")  # an article, a pronoun


def chosen_letter(response: str, options: Sequence[str] | None = None) -> str | None:
    """The letter a response chose, or None. What stands in <think> does not count."""
    text = THINKING.sub(" ", unicodedata.normalize("NFKC", response))
    answers = ANSWER.findall(text)
    if answers:
        return letter_in(answers[-1], options)
    key_words = list(KEY_WORD.finditer(text))
    if key_words:
        return letter_in(first_line(text[key_words[-1].end() :]), options)
    return last_lone_letter(text)


def letter_in(answer: str, options: Sequence[str] | None = None) -> str | None:
    """The letter in a short answer: "B", "(B) red", "B: red", "B red", "option b", or an option's own words."""
    answer = answer.strip()
    if (found := WHOLE.fullmatch(answer)) and within(found[1], options):
        return found[1].upper()
    if options is not None and (place := option_index(answer, options)) is not None:
        return LETTERS[place]
    if found := LEADING.match(answer) or WHOLE.fullmatch(answer):
        return found[1].upper()
    if options is not None and (found := LETTER_AND_WORDS.fullmatch(answer)):
        place = LETTERS.index(found[1].upper())
        if option_index(found[2], options[place : place + 1]) == 0:
            return LETTERS[place]
    return last_lone_letter(answer)


def last_lone_letter(text: str) -> str | None:
    """The last letter that stands alone and is no word."""
    places = {found.start(found.lastindex or 0) for found in MARKED.finditer(text)}
    words = {found.end() - 1 for found in WORD.finditer(text)}
    places |= {found.start() for found in LONE.finditer(text) if found[1].isupper()} - words
    return text[max(places)].upper() if places else None


def true_letter(truth: Any, options: Sequence[str] | None = None) -> str | None:
    """The right letter, from a letter, an option's text or a 0-based index; None where it is none of these.

    Digits in a text are an index only beside options: alone they are an answer like "3".
    """
    if truth is None or isinstance(truth, bool):
        return None
    if isinstance(truth, float) and truth.is_integer():
        truth = int(truth)
    if isinstance(truth, int):
        return LETTERS[truth] if 0 <= truth < len(LETTERS) else None
    text = unicodedata.normalize("NFKC", str(truth)).strip()
    found = WHOLE.fullmatch(text)
    if found and within(found[1], options):
        return found[1].upper()
    if options is not None and (place := option_index(text, options)) is not None:
        return LETTERS[place]
    if options is not None and text.isdigit():
        return true_letter(int(text))
    return None


def within(letter: str, options: Sequence[str] | None) -> bool:
    """Whether there is such an option; "e" is none of four, but may be the text of one."""
    return options is None or LETTERS.index(letter.upper()) < len(options)


def option_index(text: str, options: Sequence[str]) -> int | None:
    """Which option these words are, case, width and closing marks aside."""
    wanted = plain(text)
    return next((i for i, option in enumerate(options[: len(LETTERS)]) if plain(str(option)) == wanted), None)


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().strip(" \t\r\n.,;:!?。，；：！？\"'()[]")
