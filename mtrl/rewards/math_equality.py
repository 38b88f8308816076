r"""Mathematical equality (SPEC 3, `math`): 1/2 is 0.5, 2\sqrt{2} is \sqrt{8}, {1, 2} is {2, 1}.

The answer is the text in <answer>..</answer> or in the last \boxed{..}, outside <think>; math-verify compares it with
the truth. SymPy can take hours for a hostile answer, so this runs in a sandbox with a time limit; math-verify's own
limit needs signals and is off.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

from mtrl.rewards.tags import last_answer, strip_thoughts

BRACE = re.compile(r"\\{1,2}(?:boxed|fbox)\s*(\{)|\\.|[{}]", re.DOTALL)  # opens a box, is escaped, any other
EXPONENT = re.compile(r"(?<=\d)[eE]([+-]?\d+)")  # 1e3; in LaTeX that would be a product with e
DOLLARS = re.compile(r"\$[^$]+\$")
TINY = 1e-4
LATEX = [LatexExtractionConfig(boxed_match_priority=0)]

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off


def math(data: Mapping[str, Any]) -> float | None:
    """1 if the response's answer equals the truth, 0 if not or if there is none; None without a truth."""
    if data["ground_truth"] is None:
        return None
    answer, truth = extract_answer(data["response"]), extract_truth(str(data["ground_truth"]))
    if answer is None:
        return 0.0
    if "".join(answer.split()) == "".join(truth.split()):  # also for answers that are not formulas
        return 1.0
    wanted, given = expressions(truth), expressions(answer)
    return float(verify(wanted, given, timeout_seconds=None) and not differ_when_tiny(wanted[0], given[0]))


def extract_answer(response: str) -> str | None:
    r"""Return the text of the last <answer>, or of the \boxed{} in it; without the tag, of the last \boxed{}."""
    text = strip_thoughts(response)
    tagged = last_answer(text)
    answer = extract_last_box(text) if tagged is None else extract_last_box(tagged) or tagged
    return answer.strip() or None if answer else None


def extract_truth(truth: str) -> str:
    """Return the answer of a truth: plain, in a box, or (GSM8K) after #### at the end of a solution."""
    return (extract_last_box(truth) or truth.rpartition("####")[2]).strip()


def extract_last_box(text: str) -> str | None:
    """Return the content of the box that closes last, with matching braces; of nested boxes that is the outer one."""
    span: tuple[int, int] | None = None
    opened: list[int | None] = []  # start of the content of each open box; None for other braces
    for brace in BRACE.finditer(text):
        if brace[1] or brace[0] == "{":
            opened.append(brace.end() if brace[1] else None)
        elif brace[0] == "}" and opened and (start := opened.pop()) is not None:
            span = start, brace.start()
    return None if span is None else text[slice(*span)]


def expressions(answer: str) -> list[Any]:
    """Parse an answer by math-verify: all of it as LaTeX, or the formula among words."""
    answer = EXPONENT.sub(r"\\times 10^{\1}", answer.rstrip("."))
    text = answer if has_formula(answer) else rf"\boxed{{{answer}}}"
    return parse(text, LATEX, parsing_timeout=None)


def has_formula(answer: str) -> bool:
    r"""Whether the text contains a formula: $..$, \(..\) or \[..\]."""
    pairs = ((r"\(", r"\)"), (r"\[", r"\]"))
    return bool(DOLLARS.search(answer)) or any(-1 < answer.find(a) < answer.rfind(b) - 2 for a, b in pairs)


def differ_when_tiny(wanted: Any, given: Any) -> bool:
    """Whether tiny numbers differ: math-verify compares six decimal places, where 1.6e-19 and 2e-19 are both zero."""
    try:
        a, b = float(wanted), float(given)
    except (TypeError, ValueError, OverflowError):
        return False
    return max(abs(a), abs(b)) < TINY and abs(a - b) > TINY * max(abs(a), abs(b))
