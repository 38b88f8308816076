"""The outcome of a reward function on a response, read from any form of return value."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mtrl.sandbox.plain_text import sanitize_tail

TOTAL_KEYS = ("overall", "score")  # the total in a returned dict: EasyR1's key, verl's key
LARGEST = 3.4e38  # rewards become 32-bit floats
TOKEN_WEIGHTS = "token_weights"  # the extra value with token weights (SPEC 2.1)
MAX_EXTRAS = 100  # extra values of a function, and characters of their names
EXPECTED = "a reward function returns a number, None, (number, dict of extra values), or a dict with overall or score"


@dataclass(frozen=True)
class Outcome:
    """A number (None: not applicable) and extra values, or the reason of a failure. All of it is limited in size, since
    a step has thousands of outcomes."""

    value: float | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
    output: str = ""  # the end of what the sandboxed function printed
    seconds: float = 0.0  # duration of the call; a batch divides it evenly


def completed_future(outcome: Outcome) -> Future[Outcome]:
    """Return a future that has its outcome already."""
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


def read_outcome(answer: Any, seconds: float = 0.0, logged: Mapping[str, Any] | None = None) -> Outcome:
    """Parse a return value; an invalid one becomes a failure that says what to return instead.

    >>> read_outcome({"overall": 0.5, "format": 1.0})
    Outcome(value=0.5, extras={'format': 1.0}, failure=None, output='', seconds=0.0)
    """
    try:
        value, extras = _split(answer)
        return Outcome(_number(value), _checked_extras({**(logged or {}), **extras}), seconds=seconds)
    except Exception as error:  # such as an array of several numbers, or a key that JSON does not allow
        return Outcome(failure=sanitize_tail("".join(traceback.format_exception_only(error)).strip()), seconds=seconds)


def _split(answer: Any) -> tuple[Any, Mapping[str, Any]]:
    if isinstance(answer, tuple):
        if len(answer) != 2 or not isinstance(answer[1], Mapping):
            raise TypeError(f"{EXPECTED}; it returned a tuple of {', '.join(type(x).__name__ for x in answer[:10])}")
        return answer[0], answer[1]
    if isinstance(answer, Mapping):
        total = next((key for key in TOTAL_KEYS if key in answer), None)
        if total is None:
            raise TypeError(f"{EXPECTED}; its dict has {', '.join(map(str, answer))[:1000] or 'nothing'}")
        return answer[total], {key: value for key, value in answer.items() if key != total}
    return answer, {}


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{EXPECTED}; it returned {type(value).__name__}")
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError(f"a reward must be finite; it was {number} (it becomes a 32-bit float)")
    return number


def _checked_extras(extras: dict[str, Any]) -> dict[str, Any]:
    """Return the finite numbers and the token weights as JSON values; nothing else is logged or used."""
    if not extras:
        return extras
    plain: dict[str, Any] = json.loads(json.dumps(extras, default=lambda x: getattr(x, "tolist", lambda: None)()))
    used = {name: x for name, x in plain.items() if name == TOKEN_WEIGHTS or not math.isnan(logged_number(x))}
    check_extras(used)
    return used


def check_extras(extras: Mapping[str, Any]) -> None:
    """Raise ValueError if there are too many extra values or invalid ones."""
    if extras == {}:  # the usual case; this runs for every response
        return
    if len(extras) > MAX_EXTRAS or not all(name.isprintable() and 0 < len(name) <= MAX_EXTRAS for name in extras):
        raise ValueError(f"at most {MAX_EXTRAS} extra values, with printable names of at most {MAX_EXTRAS} characters")
    weights = extras.get(TOKEN_WEIGHTS)
    if weights is not None and not (
        isinstance(weights, list) and all(isinstance(each, (int, float)) and 0 <= each <= LARGEST for each in weights)
    ):
        raise ValueError(f"{TOKEN_WEIGHTS} must be a list of finite numbers, none below 0, one for each token")
    if any(math.isnan(logged_number(value)) for name, value in extras.items() if name != TOKEN_WEIGHTS):
        raise ValueError("an extra value must be a finite number")


def logged_number(value: Any) -> float:
    """Return an extra value as it is logged; NaN if it is not a finite number.

    >>> [logged_number(value) for value in (True, 2, "2", 10**400)]
    [1.0, 2.0, nan, nan]
    """
    return float(value) if isinstance(value, (int, float)) and abs(value) <= LARGEST else math.nan
