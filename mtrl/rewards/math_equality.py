r"""Mathematical equality (SPEC 3, `math`): 1/2 is 0.5, 2\sqrt{2} is \sqrt{8}, {1, 2} is {2, 1}.

The answer is what stands in <answer>..</answer> or in the last \boxed{..}, outside <think>; math-verify compares it
with the truth. SymPy can think for hours about a hostile answer, so this runs in a sandbox, whose time limit is the
only one: math-verify's own works by signals and is off.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

from mtrl.rewards.tags import last_answer, without_thoughts

BRACE = re.compile(r"\\{1,2}(?:boxed|fbox)\s*(\{)|\\.|[{}]", re.DOTALL)  # a box's, an escaped one, any other
EXPONENT = re.compile(r"(?<=\d)[eE]([+-]?\d+)")  # 1e3; in LaTeX that would be a product with e
DOLLARS = re.compile(r"\$[^$]+\$")
TINY = 1e-4
LATEX = [LatexExtractionConfig(boxed_match_priority=0)]

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off


def math(data: Mapping[str, Any]) -> float | None:
    """1 where the response's answer equals the truth, 0 where it does not or there is none; None without a truth."""
    if data["ground_truth"] is None:
        return None
    answer, truth = given_answer(data["response"]), true_answer(str(data["ground_truth"]))
    if answer is None:
        return 0.0
    if "".join(answer.split()) == "".join(truth.split()):  # holds for answers that are no formula, too
        return 1.0
    wanted, given = expressions(truth), expressions(answer)
    return float(verify(wanted, given, timeout_seconds=None) and not tiny_and_apart(wanted[0], given[0]))


def given_answer(response: str) -> str | None:
    r"""The text of the last <answer>, or of the \boxed{} in it; without the tag, of the last \boxed{}."""
    text = without_thoughts(response)
    held = last_answer(text)
    answer = last_box(text) if held is None else last_box(held) or held
    return answer.strip() or None if answer else None


def true_answer(truth: str) -> str:
    """Datasets give a bare answer, a box, or (GSM8K) a solution that ends in #### and the answer."""
    return (last_box(truth) or truth.rpartition("####")[2]).strip()


def last_box(text: str) -> str | None:
    """What the last box holds, braces matched; the outer one counts where a box is in a box, for it closes last."""
    held: tuple[int, int] | None = None
    opened: list[int | None] = []  # where the contents of each open box begin; None for other braces
    for brace in BRACE.finditer(text):
        if brace[1] or brace[0] == "{":
            opened.append(brace.end() if brace[1] else None)
        elif brace[0] == "}" and opened and (start := opened.pop()) is not None:
            held = start, brace.start()
    return None if held is None else text[held[0] : held[1]]


def expressions(answer: str) -> list[Any]:
    """What math-verify reads in an answer: all of it as LaTeX, or the formula among words."""
    answer = EXPONENT.sub(r"\\times 10^{\1}", answer.rstrip("."))
    text = answer if has_formula(answer) else rf"\boxed{{{answer}}}"
    return parse(text, LATEX, parsing_timeout=None)


def has_formula(answer: str) -> bool:
    r"""Whether a formula stands among words: $..$, \(..\) or \[..\]."""
    pairs = ((r"\(", r"\)"), (r"\[", r"\]"))
    return bool(DOLLARS.search(answer)) or any(-1 < answer.find(a) < answer.rfind(b) - 2 for a, b in pairs)


def tiny_and_apart(wanted: Any, given: Any) -> bool:
    """math-verify compares decimals to six places, where 1.6e-19 and 2e-19 are both zero."""
    try:
        a, b = float(wanted), float(given)
    except (TypeError, ValueError, OverflowError):
        return False
    return max(abs(a), abs(b)) < TINY and abs(a - b) > TINY * max(abs(a), abs(b))
