"""What the conversions of `mtrl convert` are made of: their result and the simple ones, by key."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Flat = Mapping[str, Any]


class Lost(Exception):
    """The value has no counterpart here; the message says why or what to do."""


class Converted(NamedTuple):
    """Values of our keys, and a remark if their meaning differs."""

    values: Mapping[str, Any]
    remark: str = ""


Conversion = Callable[[Any, Flat], Converted]
MERGED = Converted({})  # the conversion of another key has used this one


def replace_words(key: str, words: Mapping[Any, Any]) -> Conversion:
    """Replace their words by ours; other values are kept, and our key rejects those it does not know."""
    return lambda value, flat: Converted({key: words.get(value, value) if isinstance(value, (str, bool)) else value})


def unset_if(key: str, *values: Any) -> Conversion:
    return lambda value, flat: Converted({} if value in values else {key: value})


def with_remark(key: str, remark: str) -> Conversion:
    return lambda value, flat: Converted({key: value}, remark)


def reject(why: str) -> Conversion:
    def convert(value: Any, flat: Flat) -> Converted:
        raise Lost(why)

    return convert


def merge(value: Any, flat: Flat) -> Converted:
    return MERGED


def join_texts(key: str) -> Conversion:
    return lambda value, flat: Converted({key: ",".join(value) if isinstance(value, list) else value})


def round_up(key: str) -> Conversion:
    def convert(value: Any, flat: Flat) -> Converted:
        whole = -int(-value // 1)
        return Converted({key: max(1, whole)}, "" if whole == value else "rounded up to whole passes")

    return convert
