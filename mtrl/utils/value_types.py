"""Checks one value against its annotation and range.

Types are strict: `true` is not 1, `"3"` is not 3, `3.0` is not a whole number. Only a whole number is accepted for a
float, and a list for a tuple.
"""

import math
import types
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin

MAX_VALUE_CHARS = 200
_UNIONS = (Union, types.UnionType)


class BadValue(Exception):
    """The value does not fit; the message is written for the user."""


def validate(value: Any, annotation: Any, within: str | None) -> Any:
    """Return the value as the tree stores it (lists become tuples, whole numbers floats), or raise `BadValue`."""
    try:
        return _fit(value, annotation, within)
    except _Misfit:
        expected = describe(annotation, within)
        raise BadValue(f"expected {expected}, got {format_value(value)}{_hint(value, annotation)}") from None


def check_names(value: Any, names: tuple[str, ...]) -> None:
    """Check that a name, or each in a list, is one of these or a user's (`file.py:Name`), unless there are none."""
    for spec in (value if isinstance(value, tuple) else (value,)) if names else ():
        name = spec.get("name") if isinstance(spec, Mapping) else spec
        if not isinstance(name, str):
            raise BadValue(f"expected {{name: .., and its arguments}}, got {format_value(spec)}")
        if name not in names and ":" not in name:
            close = get_close_matches(name, names, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise BadValue(f"expected {describe_names(names)}, got {format_value(name)}{hint}")


def describe_names(names: tuple[str, ...]) -> str:
    return f"one of {', '.join(names)}, or your own as file.py:Name"


def allows_null(annotation: Any) -> bool:
    return types.NoneType in get_args(annotation)


class _Misfit(Exception):
    pass


def _fit(value: Any, annotation: Any, within: str | None) -> Any:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in _UNIONS:
        return _fit_union(value, args, within)
    if origin is tuple:
        return _fit_tuple(value, args, within)
    if origin is Literal:
        ok = isinstance(value, str) and value in args
    elif annotation is int or annotation is float:
        allowed = int if annotation is int else (int, float)
        ok = isinstance(value, allowed) and not isinstance(value, bool) and _inside(value, within)
        value = annotation(value) if ok else value
    elif origin is Mapping:
        ok = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    else:  # str, bool, NoneType
        ok = isinstance(value, annotation)
    if not ok:
        raise _Misfit
    return value


def _fit_union(value: Any, members: tuple[Any, ...], within: str | None) -> Any:
    for member in members:
        try:
            return _fit(value, member, within)
        except _Misfit:
            continue
    raise _Misfit


def _fit_tuple(value: Any, members: tuple[Any, ...], within: str | None) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _Misfit
    if members[-1] is Ellipsis:
        members = members[:1] * len(value)
    if len(members) != len(value):
        raise _Misfit
    return tuple(_fit(item, member, within) for item, member in zip(value, members, strict=True))


def parse_interval(within: str | None) -> tuple[float, float, bool, bool]:
    """The ends of an interval and whether each belongs to it; None stands for all finite numbers."""
    text = within or "(-inf, inf)"
    low, high = text[1:-1].split(",")
    return float(low), float(high), text[0] == "[", text[-1] == "]"


def _inside(number: float, within: str | None) -> bool:
    low, high, low_belongs, high_belongs = parse_interval(within)
    return (number > low or (low_belongs and number == low)) and (number < high or (high_belongs and number == high))


def describe(annotation: Any, within: str | None) -> str:
    """Describe the values that a key takes: `a number in [0, 1] or null`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in _UNIONS:
        return " or ".join(describe(member, within) for member in args)
    if origin is Literal:
        return args[0] if len(args) == 1 else "one of " + ", ".join(args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"a list, each {describe(args[0], within)}"
        return f"a list of {len(args)}: " + ", then ".join(describe(member, within) for member in args)
    if origin is Mapping:
        return "a mapping {name: value}"
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _range_in_words(within)
    return {str: "text", bool: "true or false", type(None): "null"}[annotation]


def _range_in_words(within: str | None) -> str:
    low, high, low_belongs, _ = parse_interval(within)
    if math.isfinite(low) and math.isinf(high):
        return f" of at least {low:g}" if low_belongs else f" above {low:g}"
    return f" in {within}" if math.isfinite(low) and math.isfinite(high) else ""


def is_text(annotation: Any) -> bool:
    """Whether the key takes any text (not only certain words)."""
    return annotation is str or (get_origin(annotation) in _UNIONS and str in get_args(annotation))


def format_value(value: Any) -> str:
    """The value roughly as YAML would write it, on one line of limited length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[str(value)]
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."


def format_key(key: str) -> str:
    """A key or path on one line, without control characters for the terminal."""
    return key if key and key.isprintable() and len(key) <= MAX_VALUE_CHARS else format_value(key)


def _hint(value: Any, annotation: Any) -> str:
    if value in ("fp16", "float16", "half") and "bf16" in get_args(annotation):
        return "; without a loss scaler small gradients vanish in fp16, set bf16, which has the range of fp32"
    if isinstance(value, str) and value in ("None", "none", "NULL", "") and type(None) in get_args(annotation):
        return "; write null"
    if is_text(annotation) and isinstance(value, (bool, int, float)):
        return "; put it in quotes"
    wants_list = any(get_origin(member) is tuple for member in (annotation, *get_args(annotation)))
    if wants_list and isinstance(value, (str, int, float)) and len(str(value)) <= MAX_VALUE_CHARS:
        return f"; write [{format_key(str(value))}]"
    if wants_list and isinstance(value, Mapping) and "a mapping" in describe(annotation, None):
        return "; write [{name: .., ..}]"
    return ""
