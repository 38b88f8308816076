"""Replies as JSON. One odd value of a file must not make a whole reply impossible."""

from __future__ import annotations

import json
import math
from typing import Any

from mtrl.tracking.jsonl import LONE_SURROGATE

MAX_DEPTH = 32
TOO_DEEP = "(nested too deeply)"


def to_json(value: Any) -> str:
    """The value as JSON in ASCII; with what JSON cannot hold replaced, if there is any."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):
        return json.dumps(to_plain(value), allow_nan=False, separators=(",", ":"))


def to_plain(value: Any, depth: int = 0) -> Any:
    """The value with null for NaN and infinity, U+FFFD for lone surrogates, the text of other objects, and nothing
    nested deeper than MAX_DEPTH."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, (dict, list, tuple)) and depth >= MAX_DEPTH:
        return TOO_DEEP
    if isinstance(value, dict):
        return {to_plain(str(name)): to_plain(each, depth + 1) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(each, depth + 1) for each in value]
    return to_plain(str(value))
