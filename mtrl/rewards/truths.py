"""The right answer of a multiple-choice row, in the many forms that datasets give it (SPEC 3, `accuracy`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mtrl.rewards.choices import NONE, SET, is_within, listed_choices, named_choice, option_list
from mtrl.rewards.letters import LETTERS, half_width
from mtrl.rewards.tags import last_answer


def is_absent(truth: Any) -> bool:
    """Whether a row has no truth: nothing, an empty text or list, or the NaN that tables put there."""
    if isinstance(truth, str):
        return not truth.strip()
    return truth is None or (isinstance(truth, (list, tuple)) and not truth) or is_nan(truth)


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def row_truth(answer: Any, columns: Mapping[str, Any]) -> tuple[Any, frozenset[str]]:
    """A row's truth, its answer or else its `label_idx`, and the letters that are right by it, if it names options."""
    by_index = is_absent(answer)
    truth = columns.get("label_idx") if by_index else answer
    right = NONE if is_absent(truth) else true_choices(truth, columns.get("options"), index=by_index)
    return truth, right


def names_no_option(answer: Any, columns: Mapping[str, Any]) -> bool:
    """Whether the truth ought to name options and does not, so that no response can be right: it stands beside options,
    is an index, or is a list."""
    truth, right = row_truth(answer, columns)
    ought = option_list(columns.get("options")) is not None or is_absent(answer) or isinstance(truth, (list, tuple))
    return ought and not right and not is_absent(truth)


def true_choices(truth: Any, options: Any = None, *, index: bool = False) -> frozenset[str]:
    """The right letters, from a letter, an option's text, a 0-based index beside options, or a set of these; none where
    it is something else, and so a value.

    `index`: integers count as one without options, too. In a text, letters with something between them ("A, C") are a
    set, letters in one ("AC") only beside options.
    """
    options = option_list(options)
    if isinstance(truth, (list, tuple, set, frozenset)):
        each = [true_choices(one, options, index=index) for one in truth]
        return NONE.union(*each) if all(len(one) == 1 for one in each) else NONE
    text = truth_text(truth)
    if not isinstance(truth, str) and is_index(text, options, index):
        return frozenset(LETTERS[int(text)])
    named = named_choice(text, options)
    if not named and is_index(text, options, index):
        return frozenset(LETTERS[int(text)])
    if len(named) != 1 and options is None:
        named = NONE
    if not named and (options is not None or all(len(part) == 1 for part in SET.split(text))):
        named = listed_choices(SET.split(text), options)
    return named if all(is_within(letter, options) for letter in named) else NONE


def is_index(text: str, options: Any, without_options: bool) -> bool:
    wanted = options is not None or without_options
    return wanted and text.isdecimal() and len(text) <= 2 and int(text) < len(options or LETTERS)


def truth_text(truth: Any) -> str:
    """A truth as text, out of its <answer> tags if it has some.

    >>> truth_text("<think>..</think><answer> B </answer>"), truth_text(3.0)
    ('B', '3')
    """
    if isinstance(truth, float) and truth.is_integer():
        truth = int(truth)
    text = half_width(str(truth))
    held = last_answer(text)
    return (text if held is None else held).strip()
