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

from mtrl.rewards.choices import ANSWER, THINKING

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
EXPONENT = re.compile(r"(?<=\d)[eE]([+-]?\d+)")  # 1e3; in LaTeX that would be a product with e
MATH_IN_WORDS = re.compile(r"\$[^$]+\$|\\\(.+\\\)|\\\[.+\\\]", re.DOTALL)
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
    text = THINKING.sub(" ", response)
    answers = ANSWER.findall(text)
    answer = last_box(answers[-1]) or answers[-1] if answers else last_box(text)
    return answer.strip() or None if answer else None


def true_answer(truth: str) -> str:
    """Datasets give a bare answer, a box, or (GSM8K) a solution that ends in #### and the answer."""
    return (last_box(truth) or truth.rpartition("####")[2]).strip()


def last_box(text: str) -> str | None:
    """What the last box holds, braces matched; the outer one counts where a box is in a box."""
    held, end = None, 0
    for box in BOX.finditer(text):
        if box.start() >= end and (close := closing_brace(text, box.end())) is not None:
            held, end = text[box.end() : close], close
    return held


def closing_brace(text: str, start: int) -> int | None:
    """Where the brace that was opened before `start` closes; an escaped one is a sign of a set."""
    depth = 1
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return brace.start()
    return None


def expressions(answer: str) -> list[Any]:
    """What math-verify reads in an answer: all of it as LaTeX, or the formula among words."""
    answer = EXPONENT.sub(r"\\times 10^{\1}", answer.rstrip("."))
    text = answer if MATH_IN_WORDS.search(answer) else rf"\boxed{{{answer}}}"
    return parse(text, LATEX, parsing_timeout=None)


def tiny_and_apart(wanted: Any, given: Any) -> bool:
    """math-verify compares decimals to six places, where 1.6e-19 and 2e-19 are both zero."""
    try:
        a, b = float(wanted), float(given)
    except (TypeError, ValueError, OverflowError):
        return False
    return max(abs(a), abs(b)) < TINY and abs(a - b) > TINY * max(abs(a), abs(b))
