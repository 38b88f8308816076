"""What a rule answers, checked: a run must not go on with a wrong shape, NaN or a negative weight."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import TypeVar, get_args

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Filter, Key, Rule, Target, Weight
from mtrl.types import Experience
from mtrl.utils.errors import RunError

Answer = TypeVar("Answer")


def asked(rule: Rule, question: Callable[[], Answer]) -> Answer:
    """What a rule answers; whatever it raises ends the run with one line that names it and the place in its file."""
    try:
        return question()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunError(f"credit rule {type(rule).__name__} failed: {told} ({place.filename}:{place.lineno})") from error


def applied(rule: Rule, experience: Experience, key: Key) -> Tensor:
    """The rule's answer. A weight alone may answer None."""
    value = asked(rule, partial(rule.apply, experience, key))
    if value is None and isinstance(rule, Weight):
        return value  # type: ignore[return-value]
    if wrong := fault(rule, value, experience.rollouts.mask):
        raise RunError(f"credit rule {type(rule).__name__} {wrong}")
    assert value is not None
    return value if isinstance(rule, Filter) else value.float()


def covered_rows(rule: Filter, experience: Experience) -> Tensor:
    """[N] bool: the rows that a filter speaks for."""
    rows = asked(rule, partial(rule.applies_to, experience))
    if not isinstance(rows, Tensor) or rows.shape != (len(experience),) or rows.dtype != torch.bool:
        told = f"speaks_for must return a bool for each of {len(experience)} responses"
        raise RunError(f"credit rule {type(rule).__name__}: {told}")
    return rows


def fault(rule: Rule, value: object, mask: Tensor) -> str | None:
    """What is wrong with an answer, and what it should be."""
    rows, width = mask.shape
    kind = "a bool" if isinstance(rule, Filter) else "a number"
    shapes = [(rows, width), (rows,)] if isinstance(rule, Weight) else [(rows, width)]
    wanted = f"a tensor of {' or '.join(str(list(shape)) for shape in shapes)}, {kind} each"
    if not isinstance(value, Tensor):
        return f"returned {type(value).__name__}; it must return {wanted}"
    fits = (value.dtype == torch.bool) == isinstance(rule, Filter) and not value.is_complex()
    if tuple(value.shape) not in shapes or not fits:
        return f"returned {value.dtype} of {list(value.shape)}; it must return {wanted}"
    if isinstance(rule, Weight) and rule.target not in get_args(Target):
        return f"has the target {rule.target!r}; there are {' and '.join(get_args(Target))}"
    known = value[mask] if value.ndim == 2 else value[mask.any(1)]
    if not known.isfinite().all():
        count = int((~known.isfinite()).sum())
        return f"returned {count} of {known.numel()} values that are not finite (NaN or infinity); guard its division"
    if isinstance(rule, Weight) and (known < 0).any():
        return f"returned the weight {float(known.min()):g}; a weight is at least 0, a Term may be negative"
    return None
