"""Letters A to J in running text: standalone, joined into groups, denied, or words.

A letter counts if it stands alone: "B", "(b)", "选B", but not in "Both". Joined letters are a group: "B or C", "A、C".
A denied letter does not count ("not A", "A is wrong", "不选A"), nor do the words "A" and "I" ("A cat sits there",
"I see A cat", "I think"); small "a" and "i" count only if marked as letters: in brackets, alone on a line, or after a
word of choice ("option a").

A response may be hostile: every repetition in a pattern is limited, so that all patterns take linear time.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

LETTERS = "ABCDEFGHIJ"
WIDE = [0x3000, *range(0x2460, 0x2500), *range(0xFF01, 0xFFE7), *range(0x1D400, 0x1D800)]  # Ｂ, ：, Ⓑ, 𝐁
HALF_WIDTH = {code: unicodedata.normalize("NFKC", chr(code)) for code in WIDE if chr(code) != "，"}

IN_WORD = r"[0-9A-Za-zÀ-\u1fff]"  # includes combining accents
LONE = (
    rf"[A-Ja-j](?<!{IN_WORD}.)(?<!{IN_WORD}['’-].)(?<![A-Za-z]\..)(?!{IN_WORD}|['’][A-Za-z]|-[a-z]|\.[A-Za-z]\b)"
    r"(?!(?<=I)\s{1,9}(?!(?:is|because|since|and|or|not)\b)[a-z])"  # the pronoun
)
VERBS = "is|was|are|has|seems|looks|appears|shows|matches|fits"
OTHERS = "and|or|nor|but|not|because|since|as|for|from|with|in|on|at|by|to|that|which|so|if|then|than|the|it|instead"
WORD_AFTER = rf"\s{{1,9}}(?!(?:{VERBS}|{OTHERS}|only|rather)\b)[a-z]"  # an "a" before it is an article

# ---- groups of joined letters
OPEN, CLOSE = r"""[(\[{【「《"'“‘*_`$]{0,4}""", r"""[)\]}】」》"'”’*_`$]{0,4}"""
SPACE = r"[ \t]{0,9}"
MAYBE = rf"(?:(?:maybe|perhaps|possibly|even|option|choice|也?可能是?|选项?){SPACE})?"
BETWEEN = (
    rf",?{SPACE}(?:and/or|or|and|nor|vs|maybe|possibly|perhaps)\b|[/、&|+]|或者?|还是|以?及|和|与|跟"
    "|[,，]?(?:也?可能是?|要么)"
)
FIRMLY = rf"{CLOSE}{SPACE}[(]?(?:{BETWEEN}){SPACE}{MAYBE}{OPEN}{LONE}(?!(?<=a){WORD_AFTER})"
LOOSELY = (  # "A, B", "A B"; but in "B, A is wrong", "B (A is wrong)" and "B，A不对" the A begins another clause
    rf"{CLOSE}{SPACE}(?:[,;]?{SPACE}{OPEN}{LONE}(?![一-鿿](?<![和与或及都]))|，{OPEN}{LONE}(?![一-鿿]))"
    r"(?!\s{1,9}(?!(?:and|or|nor|because|since|as|are|both)\b)[A-Za-z]{2})"
)
LETTER = re.compile(LONE)
GROUP = re.compile(rf"{LONE}(?:{FIRMLY}|{LOOSELY}){{0,9}}")

# ---- context of a group
BEFORE, AFTER = 60, 40  # characters
ARTICLE = re.compile(WORD_AFTER)
# Within a sentence an "A" is an article only before a noun or an adjective: "I see A cat", but "I think A shows it".
NO_NOUN = (
    "about|above|after|again|all|alone|also|although|among|any|based|be|before|below|best|both|can|could|did|do|due|each"
    "|even|given|had|have|he|here|how|just|may|might|must|my|no|now|of|over|please|she|should|still|there|they|this|though"
    "|today|too|under|unless|until|via|we|were|what|when|where|whereas|whether|while|who|whom|whose|why|will|within|without|would|you|your"
)
THIRD_PERSON = r"[a-z]{1,20}(?:ly|(?<![su])s)\b"  # or an adverb: "A contains", "A clearly shows"
NOUN = re.compile(rf"\s{{1,9}}(?!(?:{NO_NOUN})\b|{THIRD_PERSON})[a-z]")
SENTENCE_START = re.compile(r"(?:\A|[.!?:\n。…])[\s\"'“‘(*]*\Z")
WORD = re.compile(r"[^\W_]")
CHOICE_WORD = re.compile(
    r"(?:\b(?:answer|option|choice|choose|pick|select|letter)|答案|选项|选择|选)\W{0,9}(?:is\b|为|是)?\W{0,9}\Z",
    re.IGNORECASE,
)
GONE_WITH = re.compile(r"\b(?:go|goes|going|went) with\W{0,9}\Z", re.IGNORECASE)
NOT = (
    r"\b(?:not|never|neither|cannot be|rather than|instead of)|n['’]t(?: be)?|不应?该?(?:是|选择?|为)|不会是|不可能是"
    "|并?非"
)
EXCLUDED = r"\b(?:except|excluding|excludes?|eliminat(?:e|es|ing)|rejects?|rul(?:e|es|ing) out)|排除|除了"
DENIED = r"[\s(\"'*]{0,4}(?:(?:be|the|option|choice|answer|letter)[\s(\"'*]{1,4}){0,3}(?:选项|答案)?[\s(\"'*]{0,4}\Z"
DENIED_BEFORE = re.compile(rf"(?:{NOT}|{EXCLUDED}){DENIED}", re.IGNORECASE)
NOT_BEFORE = re.compile(rf"(?:{NOT}){DENIED}", re.IGNORECASE)
COMMA = re.compile(rf"{CLOSE}{SPACE}[,;，]{SPACE}{OPEN}")
DENIED_AFTER = re.compile(
    rf"{CLOSE}{SPACE}(?:(?:option|choice|选项|项){SPACE})?(?:"
    r"(?:is|are|was|were|looks?|seems?)(?: \w{1,12})? (?:not|wrong|incorrect|false|impossible|out)\b"
    r"|(?:is|are|does|do|can|could|would)n['’]t\b|cannot\b|(?:does|do|can|is|are) not\b|can be (?:ruled|excluded|elim)"
    r"|都?(?:是|明显|显然)?(?:错|不对|不正确|不是|不符|不成立|不选|不行|不合|有误))",
    re.IGNORECASE,
)


def half_width(text: str) -> str:
    """Replace full-width and circled characters by plain ones, without Unicode normalization, which takes quadratic
    time. A Chinese comma stays: it separates sentences rather than items of a list."""
    return text.translate(HALF_WIDTH)


def letter_runs(group: str) -> list[list[str]]:
    """Split the letters of a group into runs; a repeated letter begins a new run.

    >>> letter_runs("A and C, C")
    [['A', 'C'], ['C']]
    """
    runs: list[list[str]] = [[]]
    for letter in (match[0].upper() for match in LETTER.finditer(group)):
        if letter in runs[-1]:
            runs.append([])
        runs[-1].append(letter)
    return runs


def is_choice(text: str, group: re.Match[str], *, leads: bool = False) -> bool:
    """Whether a group is a choice: neither denied nor a word. `leads`: it begins an answer, where a small "a" needs no
    mark."""
    start, end = group.span()
    before, after = text[max(0, start - BEFORE) : start], text[end : end + AFTER]
    if DENIED_BEFORE.search(before) or DENIED_AFTER.match(after):
        return False
    if text[start] in "Aai" and end == start + 1 and ARTICLE.match(after):
        if text[start] != "A" or SENTENCE_START.search(before):
            return False
        return not NOUN.match(after) or bool(CHOICE_WORD.search(before) or GONE_WITH.search(before))
    return leads or text[start] not in "ai" or is_marked(before, after)


def chosen_after_denial(text: str, group: re.Match[str]) -> str | None:
    """The last letter of a denied group if a comma separates it from the rest: B in "not A, B", C in "not A or B, C".
    In "not A, B or C", as in a list of excluded letters, all are denied."""
    before, after = text[max(0, group.start() - BEFORE) : group.start()], text[group.end() : group.end() + AFTER]
    letters = list(LETTER.finditer(group[0]))
    between = [group[0][left.end() : right.start()] for left, right in pairwise(letters)]
    if not between or not NOT_BEFORE.search(before) or DENIED_AFTER.match(after):
        return None
    *others, last = between
    return letters[-1][0].upper() if COMMA.fullmatch(last) and not any(map(COMMA.fullmatch, others)) else None


def is_marked(before: str, after: str) -> bool:
    """Whether an "a" or "i" is marked as a letter: in brackets, alone on its line or after a word of choice."""
    opener, closer = before.rstrip()[-1:], after.lstrip()[:1]
    if opener and closer and opener in "([{【「《\"'*" and closer in ")]}】」》\"'*":
        return True
    line = before.rpartition("\n")[2] + after.partition("\n")[0]
    return not WORD.search(line) or CHOICE_WORD.search(before) is not None
