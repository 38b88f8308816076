"""Multiple choice: find the letters that a response chooses (SPEC 3, `accuracy`), in English and Chinese."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from mtrl.rewards.letters import (
    BEFORE,
    CLOSE,
    GROUP,
    LETTERS,
    LONE,
    OPEN,
    WORD,
    WORD_AFTER,
    chosen_after_denial,
    half_width,
    is_choice,
    letter_runs,
)
from mtrl.rewards.tags import last_answer, strip_thoughts

NONE: frozenset[str] = frozenset()
MAX_GROUPS = 1000  # groups of letters that are examined
MAX_TEXT = 100_000  # characters of an answer, or of the end of a response, that are searched for letters
MAX_NORMALIZED = 4096  # characters; Unicode normalization takes quadratic time

# A keyword with a colon always counts; without one ("答案是B", "the answer is B") only if a letter follows at once.
VERB = "(?i:is|(?:should|must|would|will) be)|(?:应该?|就|只能)?是|应?为|选择?"
FILLER = r"(?:(?:clearly|therefore|thus|definitely|probably|either|option|choice|letter|选项)\s{0,9}){0,2}"
KEYWORD = re.compile(
    r"(?:(?<![A-Za-z])(?i:answer|option|choice)|答案|选项)[\s*_】\])]{0,9}(?:"
    rf"(?:{VERB})?[\s*_]{{0,9}}:|(?:{VERB}|(?<=】))\s{{0,9}}{FILLER}(?={OPEN}{LONE}(?!(?<=[Aa]){WORD_AFTER})))"
)
REASON = re.compile(r"(?:\b(?:because|since)\b|因为|由于)(?:(?!所以|因此|故|\bso\b|\btherefore\b)[^.,，;!?\n。])*")
NO_WAIT = r"(?:no|wait)\s{0,9}[,.:;!]{1,3}\s{0,9}"
CORRECTED = re.compile(  # after a first letter: ", no, B", "? Wait, it is B", ", or rather B", "？不，是B"
    rf"{CLOSE}[\s.,，;:?!…]{{1,5}}(?:{NO_WAIT}(?:{NO_WAIT})?|or rather\s{{1,9}}|不对?[,，]\s{{0,9}})"
    rf"(?:it['’]s |it is |是)?{OPEN}({LONE})\W{{0,9}}\Z",
    re.IGNORECASE,
)
DECIDING = re.compile(  # before the letter that decides between several: "A or B? B", "A or B, it's B", "A或B，我选B"
    r"(?:[.,，;:?!…。]|\b(?:is|be|it['’]s|so|but|probably|likely|definitely|choose|pick|select|say|leaves|option)|是|为|选择?)"
    rf"\s{{0,9}}{OPEN}\Z",
    re.IGNORECASE,
)
LISTED = r"[,，;、&+]|\band\b|以?及|和|与"
SET = re.compile(f" ?(?:{LISTED}) ?")
ALTERNATIVES = re.compile(rf" ?(?:{LISTED}|/|\bor\b|或者?) ?", re.IGNORECASE)

ONE_LETTER = re.compile(r"[\W_]*([A-Ja-j])[\W_]*")
LABELED = re.compile(r"[\W_]*([A-Ja-j])(?: ?[.):,，、\]] ?| )(.+)", re.DOTALL)
JOINED = re.compile(r"[\W_]*([A-Ja-j]{2,10})[\W_]*")
EDGES = " \t\r\n.,;:!?。，；：！？、\"'“”‘’()[]【】「」《》*_`"


def chosen_letter(response: str, options: Any = None) -> str | None:
    """Return the one letter that a response chooses, or None."""
    letters = find_choices(response, options)
    return next(iter(letters)) if len(letters) == 1 else None


def find_choices(response: str, options: Any = None) -> frozenset[str]:
    """Return the letters that a response chooses: none, one, or several ("B or C").

    >>> sorted(find_choices("<think>B?</think><answer>A because B is wrong</answer>"))
    ['A']
    """
    text, answer = split_answer(response)
    return last_choice(text) if answer is None else leading_choice(answer, option_list(options))


def split_answer(response: str) -> tuple[str, str | None]:
    """Return a response without its thoughts, and its last <answer>, else the text after its last keyword."""
    text = strip_thoughts(half_width(response))
    answer = last_answer(text)
    return text, after_keyword(text) if answer is None else answer


def after_keyword(text: str) -> str | None:
    """Return the rest of the last line with a keyword, or the next nonempty line if that rest is empty."""
    last = deque(KEYWORD.finditer(text), maxlen=1)
    return text[last[0].end() :].lstrip(" \t\r\n*_#>").partition("\n")[0] if last else None


def leading_choice(answer: str, options: Sequence[str] | None) -> frozenset[str]:
    """Find the choice in a short answer: "B", "(B) red", "option b", an option's text, "A because B is wrong"."""
    answer = " ".join(answer.split())[:MAX_TEXT]
    if named := named_choice(answer, options) or listed_choices(ALTERNATIVES.split(answer, 10), options):
        return named
    groups = list(islice(GROUP.finditer(answer), MAX_GROUPS))
    begin = WORD.search(answer)
    if groups and begin and groups[0].start() == begin.start() and is_choice(answer, groups[0], leads=True):
        return decided_choice(answer, groups[0])
    if rest := after_keyword(answer):
        return leading_choice(rest, options)
    if chosen := next((group for group in groups if is_choice(answer, group)), None):
        return decided_choice(answer, chosen)
    return after_denial(answer, groups)


def decided_choice(answer: str, group: re.Match[str]) -> frozenset[str]:
    """The choice of a group in a short answer. The last word of the answer may decide between several letters ("A or B?
    It's B") or correct a single one ("A, no, B")."""
    first, *others = letter_runs(group[0])
    if len(first) == 1:
        corrected = CORRECTED.match(answer, group.end())
        return frozenset(corrected[1].upper() if corrected else first)
    after = REASON.sub("…", answer[group.end() :])
    later = [each for each in islice(GROUP.finditer(after), MAX_GROUPS) if is_choice(after, each)]
    named = {letter for run in (*others, *(run for each in later for run in letter_runs(each[0]))) for letter in run}
    ends = not WORD.search(after, later[-1].end() if later else 0)
    decides = not later or DECIDING.search(after[: later[-1].start()][-BEFORE:]) is not None
    return frozenset(named if len(named) == 1 and named <= set(first) and ends and decides else first)


def after_denial(text: str, groups: Sequence[re.Match[str]]) -> frozenset[str]:
    """The letter that follows a denied one ("not A, B"), unless the text names it elsewhere too: there it is denied."""
    candidates = [letter for group in groups if (letter := chosen_after_denial(text, group))]
    named = Counter(letter for group in groups for run in letter_runs(group[0]) for letter in run)
    return next((frozenset(letter) for letter in candidates if named[letter] == 1), NONE)


def last_choice(text: str) -> frozenset[str]:
    """Find the last standalone letters that are neither words nor denied; those in a reason only if there are no
    others."""
    text = text.strip()[-MAX_TEXT:]
    if together := joined_letters(text.rpartition("\n")[2]):
        return together
    for part in (REASON.sub("…", text), text):
        groups = deque(GROUP.finditer(part), maxlen=MAX_GROUPS)
        for group in reversed(groups):
            if is_choice(part, group):
                return frozenset(letter_runs(group[0])[-1])
        if chosen := after_denial(part, list(reversed(groups))):
            return chosen
    return NONE


# ----------------------------------------------------------------------------------------- texts that are only a choice
def named_choice(text: str, options: Sequence[str] | None) -> frozenset[str]:
    """Return the choice of a text that is only a choice: a letter, an option's text, both, or letters ("AC")."""
    match = ONE_LETTER.fullmatch(text)
    if match and is_within(match[1], options) and len(normalize_text(text)) == 1:
        return frozenset(match[1].upper())
    if options is not None and (index := option_index(text, options)) is not None:
        return frozenset(LETTERS[index])
    if match:
        return frozenset(match[1].upper())
    if options is not None and (match := LABELED.fullmatch(text)):
        index = LETTERS.index(match[1].upper())
        if option_index(match[2], options[index : index + 1]) == 0:
            return frozenset(LETTERS[index])
    return joined_letters(text)


def listed_choices(parts: Iterable[str], options: Sequence[str] | None) -> frozenset[str]:
    """Return the choices of these parts, if each of them is exactly one choice."""
    named = [named_choice(part, options) for part in parts if part.strip()]
    return NONE.union(*named) if all(len(each) == 1 for each in named) else NONE


def joined_letters(text: str) -> frozenset[str]:
    """Return letters without separators in alphabetical order: "AC", "ABD"; "BAD" is a word."""
    match = JOINED.fullmatch(text)
    letters = match[1].upper() if match else ""
    return frozenset(letters) if "".join(sorted(set(letters))) == letters else NONE


# ------------------------------------------------------------------------------------------------------------- options
def option_list(options: Any) -> Sequence[str] | None:
    """Return the options' texts in order; None if there are none, or in an unknown form."""
    if isinstance(options, str):
        lines = [line for line in options.splitlines() if line.strip()]
        return lines[: len(LETTERS)] if len(lines) > 1 else None
    if isinstance(options, Mapping):
        letters = list(LETTERS[: len(options)])
        return [str(options[letter]) for letter in letters] if sorted(options, key=str) == letters else None
    return list(map(str, options[: len(LETTERS)])) if options else None


def is_within(letter: str, options: Sequence[str] | None) -> bool:
    """Whether there is such an option: with four options "e" is not one, but may be the text of one."""
    return options is None or LETTERS.index(letter.upper()) < len(options)


def option_index(text: str, options: Sequence[str]) -> int | None:
    """Return the index of the option with this text, ignoring case, width, punctuation and its label ("B. red")."""
    wanted = normalize_text(text)
    texts = [normalize_text(option) for option in options]
    if wanted in texts:
        return texts.index(wanted)
    labels = [LABELED.fullmatch(option) for option in options]
    bare = [normalize_text(label[2]) if label and label[1] == LETTERS[i] else None for i, label in enumerate(labels)]
    return bare.index(wanted) if wanted in bare else None


def normalize_text(text: str) -> str:
    text = unicodedata.normalize("NFKC", text) if len(text) <= MAX_NORMALIZED else half_width(text)
    return text.casefold().strip(EDGES)
