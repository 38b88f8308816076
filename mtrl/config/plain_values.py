"""Checks for every value, whatever its key: plain types, limited size, references that end."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtrl.config.yaml_io import MAX_DEPTH, MAX_NODES
from mtrl.utils.value_types import BadValue

MAX_INT = 2**63 - 1
MAX_REFERENCES = 50  # per value, direct and indirect; also the maximum number of values with references
MAX_CHAIN = 8
_REFERENCE = re.compile(r"\$\{\s*([^${}:]*?)\s*\}")
_RESOLVER = re.compile(r"\$\{\s*([^${}:]*?)\s*:")
ESCAPE_HINT = "write \\${ for a literal ${"


def to_plain(value: Any) -> Any:
    """Copy the value into dictionaries and lists; raise `BadValue` for anything a configuration cannot hold."""
    return _copy(value, [], 1)


def _copy(value: Any, count: list[None], depth: int) -> Any:
    count.append(None)
    if depth > MAX_DEPTH:
        raise BadValue(f"nested more than {MAX_DEPTH} levels deep, or contains itself")
    if len(count) > MAX_NODES:
        raise BadValue(f"more than {MAX_NODES} values; no key takes that many")
    if isinstance(value, Mapping):
        wrong = next((name for name in value if not isinstance(name, str)), "")
        if wrong != "":
            raise BadValue(f"a key must be text, got {_describe_type(wrong)}; put it in quotes")
        return {_check_text(name): _copy(item, count, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item, count, depth + 1) for item in value]
    return _check_scalar(value)


def _check_scalar(value: Any) -> Any:
    if isinstance(value, str):
        return _check_reference(_check_text(value))
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise BadValue(f"a whole number of {value.bit_length()} bits; no key takes more than 63")
    if value is not None and not isinstance(value, (bool, int, float)):
        raise BadValue(f"{_describe_type(value)} cannot be stored in a configuration")
    return value


def _describe_type(value: Any) -> str:
    return f"{value!r}" if value is None or isinstance(value, (bool, float)) else f"a Python {type(value).__name__}"


def _check_text(text: str) -> str:
    """Reject text that would make paths and prompts fail later."""
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise BadValue("the text contains a zero byte or half a character (U+0000, a lone surrogate)")
    return text


def _check_reference(text: str) -> str:
    if "${" not in text:
        return text
    if re.search(r"\$\{[^}]*\$\{", re.sub(r"\\+\$\{", "", text)):
        raise BadValue(f"a reference inside a reference, or a ${{ that is not closed; {ESCAPE_HINT}")
    if text.count("${") > MAX_REFERENCES:
        raise BadValue(f"${{ occurs more than {MAX_REFERENCES} times; {ESCAPE_HINT}")
    if resolver := next((name for name in _RESOLVER.findall(text) if name != "oc.env"), None):
        raise BadValue(f"${{{resolver}:..}} is unknown, only ${{oc.env:NAME}} is supported; {ESCAPE_HINT}")
    try:
        OmegaConf.create({"value": text})
    except OmegaConfBaseException:
        raise BadValue(f"no key follows ${{; ${{a.b}} is the value of a.b; {ESCAPE_HINT}") from None
    return text


def has_reference(value: Any) -> bool:
    """Whether OmegaConf must resolve the value: a reference, an escaped one, or its marker for missing values."""
    if isinstance(value, Mapping):
        return any(map(has_reference, value.values()))
    if isinstance(value, list):
        return any(map(has_reference, value))
    return isinstance(value, str) and ("${" in value or value == "???")


def find_endless_references(values: Mapping[str, Any], max_values: int = MAX_REFERENCES) -> Iterator[str]:
    """Keys with too many direct and indirect references. Circular ones are left to OmegaConf, which names them."""
    references = {key: _references(text, key) for key, text in _texts(values, "")}
    counts: dict[str, int] = {}
    too_many = MAX_REFERENCES + 1

    def count(key: str, parents: Sequence[str]) -> int:
        if key in parents:
            return 0
        if len(parents) > MAX_CHAIN or len(references) > max_values:
            return too_many
        if key not in counts:
            inner = [name for target in references[key] for name in references if f"{name}.".startswith(f"{target}.")]
            counts[key] = min(too_many, sum(1 + count(name, (*parents, key)) for name in inner))
        return counts[key]

    return (key for key in references if count(key, ()) > MAX_REFERENCES)


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, str) and "${" in value:
        yield key, value
    for name, item in items:
        yield from _texts(item, f"{key}.{name}" if key else str(name))


def _references(text: str, key: str) -> list[str]:
    """The dotted keys that a text refers to; `${.x}` is relative to the section of its key."""
    keys = []
    for name in _REFERENCE.findall(text):
        dots = len(name) - len(name.lstrip("."))
        section = key.split(".")[:-dots] if dots else []
        keys.append(re.sub(r"\[(\w+)\]", r".\1", ".".join([*section, name[dots:]])))
    return keys


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
