"""Multiple choice: which letters did the response choose (SPEC 3, `accuracy`), in English and Chinese."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from mtrl.rewards.letters import GROUP, LETTERS, LONE, OPEN, WORD, WORD_AFTER, counts, half_width, letter_runs
from mtrl.rewards.tags import last_answer, without_thoughts

NONE: frozenset[str] = frozenset()
MOST_GROUPS = 1000  # groups of letters that are looked at; nobody denies more of them
MOST_TEXT = 100_000  # characters of an answer, or of the end of a response, in which letters are looked for
LONGEST_NORMALIZED = 4096  # characters; Unicode's normal form takes quadratic time

# A key word with a colon always counts, without one ("答案是B", "the answer is B") where a letter follows at once.
VERB = "(?i:is|(?:should|must|would|will) be)|(?:应该?|就|只能)?是|应?为|选择?"
FILLER = r"(?:(?:clearly|therefore|thus|definitely|probably|either|option|choice|letter|选项)\s{0,9}){0,2}"
KEY_WORD = re.compile(
    r"(?:(?<![A-Za-z])(?i:answer|option|choice)|答案|选项)[\s*_】\])]{0,9}(?:"
    rf"(?:{VERB})?[\s*_]{{0,9}}:|(?:{VERB}|(?<=】))\s{{0,9}}{FILLER}(?={OPEN}{LONE}(?!(?<=[Aa]){WORD_AFTER})))"
)
REASON = re.compile(r"(?:\b(?:because|since)\b|因为|由于)(?:(?!所以|因此|故|\bso\b|\btherefore\b)[^.,，;!?\n。])*")
LISTED = r"[,，;、&+]|\band\b|以?及|和|与"
SET = re.compile(f" ?(?:{LISTED}) ?")
HELD_OPEN = re.compile(rf" ?(?:{LISTED}|/|\bor\b|或者?) ?", re.IGNORECASE)

WHOLE = re.compile(r"[\W_]*([A-Ja-j])[\W_]*")
LABELLED = re.compile(r"[\W_]*([A-Ja-j])(?: ?[.):,，、\]] ?| )(.+)", re.DOTALL)
SOLID = re.compile(r"[\W_]*([A-Ja-j]{2,10})[\W_]*")
EDGES = " \t\r\n.,;:!?。，；：！？、\"'“”‘’()[]【】「」《》*_`"


def chosen_letter(response: str, options: Any = None) -> str | None:
    """The one letter a response chose, or None."""
    letters = chosen(response, options)
    return next(iter(letters)) if len(letters) == 1 else None


def chosen(response: str, options: Any = None) -> frozenset[str]:
    """The letters that a response names as its choice: none, one, or those it holds open ("B or C").

    >>> sorted(chosen("<think>B?</think><answer>A because B is wrong</answer>")), sorted(chosen("答案：A、C"))
    (['A'], ['A', 'C'])
    """
    text, answer = spoken(response)
    return last_choice(text) if answer is None else leading_choice(answer, option_list(options))


def spoken(response: str) -> tuple[str, str | None]:
    """A response without its thoughts; and what stands in its last <answer>, else after the last key word."""
    text = without_thoughts(half_width(response))
    answer = last_answer(text)
    return text, after_key_word(text) if answer is None else answer


def after_key_word(text: str) -> str | None:
    """The rest of the last line with a key word; the next line with words where nothing follows on that one."""
    last = deque(KEY_WORD.finditer(text), maxlen=1)
    return text[last[0].end() :].lstrip(" \t\r\n*_#>").partition("\n")[0] if last else None


def leading_choice(answer: str, options: Sequence[str] | None) -> frozenset[str]:
    """The choice in a short answer: "B", "(B) red", "option b", an option's own words, "A because B is wrong"."""
    answer = " ".join(answer.split())[:MOST_TEXT]
    if named := named_choice(answer, options) or listed_choices(HELD_OPEN.split(answer, 10), options):
        return named
    groups = list(islice(GROUP.finditer(answer), MOST_GROUPS))
    begin = WORD.search(answer)
    if groups and begin and groups[0].start() == begin.start() and counts(answer, groups[0], leads=True):
        return frozenset(letter_runs(groups[0][0])[0])
    if rest := after_key_word(answer):
        return leading_choice(rest, options)
    return next((frozenset(letter_runs(group[0])[0]) for group in groups if counts(answer, group)), NONE)


def last_choice(text: str) -> frozenset[str]:
    """The last letters that stand alone and are neither words nor denied; those in a reason count if no others do."""
    text = text.strip()[-MOST_TEXT:]
    if together := solid_letters(text.rpartition("\n")[2]):
        return together
    for part in (REASON.sub("…", text), text):
        for group in reversed(deque(GROUP.finditer(part), maxlen=MOST_GROUPS)):
            if counts(part, group):
                return frozenset(letter_runs(group[0])[-1])
    return NONE


# -------------------------------------------------------------------------------------------- a choice and nothing more
def named_choice(text: str, options: Sequence[str] | None) -> frozenset[str]:
    """What a text names that is nothing but a choice: a letter, an option's words, both, or letters in one ("AC")."""
    found = WHOLE.fullmatch(text)
    if found and is_within(found[1], options) and len(plain(text)) == 1:
        return frozenset(found[1].upper())
    if options is not None and (place := option_index(text, options)) is not None:
        return frozenset(LETTERS[place])
    if found:
        return frozenset(found[1].upper())
    if options is not None and (found := LABELLED.fullmatch(text)):
        place = LETTERS.index(found[1].upper())
        if option_index(found[2], options[place : place + 1]) == 0:
            return frozenset(LETTERS[place])
    return solid_letters(text)


def listed_choices(parts: Iterable[str], options: Sequence[str] | None) -> frozenset[str]:
    """The choices that these parts name, if each of them names one and nothing more."""
    named = [named_choice(part, options) for part in parts if part.strip()]
    return NONE.union(*named) if all(len(each) == 1 for each in named) else NONE


def solid_letters(text: str) -> frozenset[str]:
    """Letters in one, in the order of the alphabet: "AC", "ABD"; "BAD" is a word."""
    found = SOLID.fullmatch(text)
    letters = found[1].upper() if found else ""
    return frozenset(letters) if "".join(sorted(set(letters))) == letters else NONE


# ------------------------------------------------------------------------------------------------------------- options
def option_list(options: Any) -> Sequence[str] | None:
    """The options' texts in order; None where there are none, or they are in a form that does not show them."""
    if isinstance(options, str):
        lines = [line for line in options.splitlines() if line.strip()]
        return lines[: len(LETTERS)] if len(lines) > 1 else None
    if isinstance(options, Mapping):
        letters = list(LETTERS[: len(options)])
        return [str(options[letter]) for letter in letters] if sorted(options, key=str) == letters else None
    return list(map(str, options[: len(LETTERS)])) if options else None


def is_within(letter: str, options: Sequence[str] | None) -> bool:
    """Whether there is such an option; "e" is none of four, but may be the text of one."""
    return options is None or LETTERS.index(letter.upper()) < len(options)


def option_index(text: str, options: Sequence[str]) -> int | None:
    """Which option these words are, case, width, closing marks and the option's own label ("B. red") aside."""
    wanted = plain(text)
    texts = [plain(option) for option in options]
    if wanted in texts:
        return texts.index(wanted)
    labels = [LABELLED.fullmatch(option) for option in options]
    bare = [plain(label[2]) if label and label[1] == LETTERS[i] else None for i, label in enumerate(labels)]
    return bare.index(wanted) if wanted in bare else None


def plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text) if len(text) <= LONGEST_NORMALIZED else half_width(text)
    return text.casefold().strip(EDGES)
