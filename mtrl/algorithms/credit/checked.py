"""What a rule answers, checked: a run must not go on with a wrong shape, NaN or a negative weight."""

from __future__ import annotations

import traceback

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Filter, Key, Rule, Weight
from mtrl.errors import RunError
from mtrl.types import Experience


def applied(rule: Rule, experience: Experience, key: Key) -> Tensor:
    """The rule's answer. A weight alone may answer None."""
    name = type(rule).__name__
    try:
        value = rule.apply(experience, key)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        raise RunError(f"credit rule {name} failed: {what}") from error
    if value is None and isinstance(rule, Weight):
        return value  # type: ignore[return-value]
    if wrong := fault(rule, value, experience.rollouts.mask):
        raise RunError(f"credit rule {name} {wrong}")
    assert value is not None
    return value if isinstance(rule, Filter) else value.float()


def fault(rule: Rule, value: object, mask: Tensor) -> str | None:
    """What is wrong with an answer, and what it should be."""
    rows, width = mask.shape
    kind = "a bool" if isinstance(rule, Filter) else "a number"
    shapes = [(rows, width), (rows,)] if isinstance(rule, Weight) else [(rows, width)]
    wanted = f"a tensor of {' or '.join(str(list(shape)) for shape in shapes)}, {kind} each"
    if not isinstance(value, Tensor):
        return f"returned {type(value).__name__}; it must return {wanted}"
    if tuple(value.shape) not in shapes or (value.dtype == torch.bool) != isinstance(rule, Filter):
        return f"returned {value.dtype} of {list(value.shape)}; it must return {wanted}"
    known = value[mask] if value.ndim == 2 else value[mask.any(1)]
    if not known.isfinite().all():
        count = int((~known.isfinite()).sum())
        return f"returned {count} of {known.numel()} values that are not finite (NaN or infinity); guard its division"
    if isinstance(rule, Weight) and (known < 0).any():
        return f"returned the weight {float(known.min()):g}; a weight is at least 0, a Term may be negative"
    return None
