"""The right answer of a multiple-choice row, in the many forms of the datasets (SPEC 3, `accuracy`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mtrl.rewards.choices import NONE, SET, is_within, listed_choices, named_choice, option_list
from mtrl.rewards.letters import LETTERS, half_width
from mtrl.rewards.tags import last_answer


def is_absent(truth: Any) -> bool:
    """Whether a row has no truth: null, an empty text or list, or NaN, as tables store a missing value."""
    if isinstance(truth, str):
        return not truth.strip()
    return (
        truth is None
        or (isinstance(truth, (list, tuple)) and not truth)
        or (isinstance(truth, float) and math.isnan(truth))
    )


def row_truth(answer: Any, columns: Mapping[str, Any]) -> tuple[Any, frozenset[str]]:
    """Return a row's truth, its answer or else its `label_idx`, and the right letters, if the truth names options."""
    by_index = is_absent(answer)
    truth = columns.get("label_idx") if by_index else answer
    right = NONE if is_absent(truth) else true_choices(truth, columns.get("options"), index=by_index)
    return truth, right


def names_no_option(answer: Any, columns: Mapping[str, Any]) -> bool:
    """Whether no response can be right: the truth should name options (the row has options, or the truth is an index
    or a list), but does not."""
    truth, right = row_truth(answer, columns)
    expected = option_list(columns.get("options")) is not None or is_absent(answer) or isinstance(truth, (list, tuple))
    return expected and not right and not is_absent(truth)


def true_choices(truth: Any, options: Any = None, *, index: bool = False) -> frozenset[str]:
    """Return the right letters, from a letter, an option's text, a 0-based index if there are options, or a set of
    these; none for any other value.

    `index`: an integer is an index even without options. In a text, separated letters ("A, C") are a set; joined
    letters ("AC") only if there are options.
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
    """Return a truth as text, without <answer> tags.

    >>> truth_text("<think>..</think><answer> B </answer>"), truth_text(3.0)
    ('B', '3')
    """
    if isinstance(truth, float) and truth.is_integer():
        truth = int(truth)
    text = half_width(str(truth))
    answer = last_answer(text)
    return (text if answer is None else answer).strip()
