"""Letters A to J in running text: which stand alone, which are joined, which are denied, which are words.

A letter counts where it stands alone: "B", "(b)", "选B", never the one inside "Both". Letters that are joined are one
group: "B or C", "A、C". One that is denied does not count ("not A", "A is wrong", "不选A"), nor do "A" and "I" where
they are words ("A cat sits there", "I think"); small "a" and "i" count only where something shows that they are no
words: in brackets, alone on a line, after a word of choice ("option a").

A response may be hostile: every repetition in a pattern has a bound, so that all patterns are linear.
"""

from __future__ import annotations

import re
import unicodedata

LETTERS = "ABCDEFGHIJ"
WIDE = [0x3000, *range(0x2460, 0x2500), *range(0xFF01, 0xFFE7), *range(0x1D400, 0x1D800)]  # Ｂ, ：, Ⓑ, 𝐁
HALF_WIDTH = {code: unicodedata.normalize("NFKC", chr(code)) for code in WIDE if chr(code) != "，"}

IN_WORD = r"[0-9A-Za-zÀ-\u1fff]"  # accents that stand alone among them
LONE = (
    rf"[A-Ja-j](?<!{IN_WORD}.)(?<!{IN_WORD}['’-].)(?<![A-Za-z]\..)(?!{IN_WORD}|['’][A-Za-z]|-[a-z]|\.[A-Za-z]\b)"
    r"(?!(?<=I)\s{1,9}(?!(?:is|because|since|and|or|not)\b)[a-z])"  # the pronoun
)
VERBS = "is|was|are|has|seems|looks|appears|shows|matches|fits"
OTHERS = "and|or|nor|but|not|because|since|as|for|from|with|in|on|at|by|to|that|which|so|if|then|than|the|it|instead"
WORD_AFTER = rf"\s{{1,9}}(?!(?:{VERBS}|{OTHERS}|only|rather)\b)[a-z]"  # it makes an article of an "a" before it

# ---- what joins letters
OPEN, CLOSE = r"""[(\[{【「《"'“‘*_`$]{0,4}""", r"""[)\]}】」》"'”’*_`$]{0,4}"""
SPACE = r"[ \t]{0,9}"
MAYBE = rf"(?:(?:maybe|perhaps|possibly|even|option|choice|也?可能是?|选项?){SPACE})?"
BETWEEN = (
    rf",?{SPACE}(?:and/or|or|and|nor|vs|maybe|possibly|perhaps)\b|[/、&|+]|或者?|还是|以?及|和|与|跟"
    "|[,，]?也?可能是?"
)
FIRMLY = rf"{CLOSE}{SPACE}[(]?(?:{BETWEEN}){SPACE}{MAYBE}{OPEN}{LONE}(?!(?<=a){WORD_AFTER})"
LOOSELY = (  # "A, B", "A B"; but "B, A is wrong", "B (A is wrong)" and "B，A不对" go on with another sentence
    rf"{CLOSE}{SPACE}(?:[,;]?{SPACE}{OPEN}{LONE}(?![一-鿿](?<![和与或及都]))|，{OPEN}{LONE}(?![一-鿿]))"
    r"(?!\s{1,9}(?!(?:and|or|nor|because|since|as|are|both)\b)[A-Za-z]{2})"
)
LETTER = re.compile(LONE)
GROUP = re.compile(rf"{LONE}(?:{FIRMLY}|{LOOSELY}){{0,9}}")

# ---- what stands around a group, in a few characters before and after it
BEFORE, AFTER = 60, 40
ARTICLE = re.compile(WORD_AFTER)
SENTENCE_START = re.compile(r"(?:\A|[.!?:\n。…])[\s\"'“‘(*]*\Z")
WORD = re.compile(r"[^\W_]")
CHOICE_WORD = re.compile(
    r"(?:\b(?:answer|option|choice|choose|pick|select|letter)|答案|选项|选择|选)\W{0,9}(?:is\b|为|是)?\W{0,9}\Z",
    re.IGNORECASE,
)
DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|cannot be|except|excluding|excludes?|eliminat(?:e|es|ing)|rejects?|rul(?:e|es|ing) out"
    r"|rather than|instead of)|n['’]t(?: be)?|不应?该?(?:是|选择?|为)|不会是|不可能是|并?非|排除|除了)"
    r"[\s(\"'*]{0,4}(?:(?:be|the|option|choice|answer|letter)[\s(\"'*]{1,4}){0,3}(?:选项|答案)?[\s(\"'*]{0,4}\Z",
    re.IGNORECASE,
)
DENIED_AFTER = re.compile(
    rf"{CLOSE}{SPACE}(?:(?:option|choice|选项|项){SPACE})?(?:"
    r"(?:is|are|was|were|looks?|seems?)(?: \w{1,12})? (?:not|wrong|incorrect|false|impossible|out)\b"
    r"|(?:is|are|does|do|can|could|would)n['’]t\b|cannot\b|(?:does|do|can|is|are) not\b|can be (?:ruled|excluded|elim)"
    r"|都?(?:是|明显|显然)?(?:错|不对|不正确|不是|不符|不成立|不选|不行|不合|有误))",
    re.IGNORECASE,
)


def half_width(text: str) -> str:
    """Full-width and circled signs as plain ones. Not Unicode's normal form: that takes quadratic time. A Chinese comma
    stays, for it begins a sentence where others go on with a list."""
    return text.translate(HALF_WIDTH)


def letter_runs(group: str) -> list[list[str]]:
    """The letters of a group; nobody lists one twice, so a letter that comes again begins anew.

    >>> runs_of("A and C, C")
    [['A', 'C'], ['C']]
    """
    runs: list[list[str]] = [[]]
    for letter in (found[0].upper() for found in LETTER.finditer(group)):
        if letter in runs[-1]:
            runs.append([])
        runs[-1].append(letter)
    return runs


def counts(text: str, group: re.Match[str], *, leads: bool = False) -> bool:
    """Whether a group is a choice: not denied, and no word where a word looks the same. `leads`: it begins an answer,
    where a small "a" needs no mark."""
    at, end = group.span()
    before, after = text[max(0, at - BEFORE) : at], text[end : end + AFTER]
    if DENIED_BEFORE.search(before) or DENIED_AFTER.match(after):
        return False
    if text[at] in "Aai" and end == at + 1 and ARTICLE.match(after):
        return text[at] == "A" and not SENTENCE_START.search(before)
    return leads or text[at] not in "ai" or is_marked(before, after)


def is_marked(before: str, after: str) -> bool:
    """Whether an "a" or "i" is shown to be a letter: in brackets, alone on its line or after a word of choice."""
    opener, closer = before.rstrip()[-1:], after.lstrip()[:1]
    if opener and closer and opener in "([{【「《\"'*" and closer in ")]}】」》\"'*":
        return True
    line = before.rpartition("\n")[2] + after.partition("\n")[0]
    return not WORD.search(line) or CHOICE_WORD.search(before) is not None
