"""What any value must be, whatever its key: plain, of a sane size, and with references that come to an end."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtrl.config.value_types import BadValue
from mtrl.config.yaml_io import MAX_DEPTH, MAX_NODES

LARGEST = 2**63 - 1
MAX_REFERENCES = 50  # what one value may refer to, with all that those refer to; as many values may refer
MAX_CHAIN = 8
_REFERENCE = re.compile(r"\$\{\s*([^${}:]*?)\s*\}")
_RESOLVER = re.compile(r"\$\{\s*([^${}:]*?)\s*:")
LITERAL = "for the text ${ write \\${"


def plain(value: Any) -> Any:
    """A copy in dictionaries and lists; `BadValue` for what a configuration cannot hold."""
    return _copied(value, [], 1)


def _copied(value: Any, count: list[None], depth: int) -> Any:
    count.append(None)
    if depth > MAX_DEPTH:
        raise BadValue(f"nested over {MAX_DEPTH} levels deep, or a value that contains itself")
    if len(count) > MAX_NODES:
        raise BadValue(f"over {MAX_NODES} values; no key takes that many")
    if isinstance(value, Mapping):
        wrong = next((name for name in value if not isinstance(name, str)), "")
        if wrong != "":
            raise BadValue(f"a key is text, got {_kind(wrong)}; put it in quotes")
        return {_checked_text(name): _copied(item, count, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item, count, depth + 1) for item in value]
    return _checked(value)


def _checked(value: Any) -> Any:
    if isinstance(value, str):
        return _checked_reference(_checked_text(value))
    if isinstance(value, int) and abs(value) > LARGEST:
        raise BadValue(f"a whole number of {value.bit_length()} bits; no key takes more than 63")
    if value is not None and not isinstance(value, (bool, int, float)):
        raise BadValue(f"{_kind(value)} is nothing a configuration can hold")
    return value


def _kind(value: Any) -> str:
    return f"{value!r}" if value is None or isinstance(value, (bool, float)) else f"a Python {type(value).__name__}"


def _checked_text(text: str) -> str:
    """Paths and prompts with a zero byte, or with half a character, would fail where nobody expects it."""
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise BadValue("a text with a zero byte or half a character in it (U+0000, a lone surrogate)")
    return text


def _checked_reference(text: str) -> str:
    if "${" not in text:
        return text
    if re.search(r"\$\{[^}]*\$\{", re.sub(r"\\+\$\{", "", text)):
        raise BadValue(f"a reference inside a reference, or an open ${{; {LITERAL}")
    if text.count("${") > MAX_REFERENCES:
        raise BadValue(f"over {MAX_REFERENCES} times ${{; {LITERAL}")
    if resolver := next((name for name in _RESOLVER.findall(text) if name != "oc.env"), None):
        raise BadValue(f"${{{resolver}:..}} is not known here, only ${{oc.env:NAME}} is; {LITERAL}")
    try:
        OmegaConf.create({"value": text})
    except OmegaConfBaseException:
        raise BadValue(f"what follows ${{ is no key; ${{a.b}} stands for the value of a.b, {LITERAL}") from None
    return text


def refers(value: Any) -> bool:
    """Whether OmegaConf has something to say about a value: a reference, an escaped one, or its word for missing."""
    if isinstance(value, Mapping):
        return any(map(refers, value.values()))
    if isinstance(value, list):
        return any(map(refers, value))
    return isinstance(value, str) and ("${" in value or value == "???")


def endless(values: Mapping[str, Any], most: int = MAX_REFERENCES) -> Iterator[str]:
    """Keys whose references, with all that those refer to, are too many to be written out. References in a circle are
    left to OmegaConf, which names them."""
    found = {key: _references(text, key) for key, text in _texts(values, "")}
    known: dict[str, int] = {}
    too_many = MAX_REFERENCES + 1

    def weight(key: str, above: Sequence[str]) -> int:
        if key in above:
            return 0
        if len(above) > MAX_CHAIN or len(found) > most:
            return too_many
        if key not in known:
            inner = [name for reference in found[key] for name in found if _holds(reference, name)]
            known[key] = min(too_many, sum(1 + weight(name, (*above, key)) for name in inner))
        return known[key]

    return (key for key in found if weight(key, ()) > MAX_REFERENCES)


def _holds(reference: str, key: str) -> bool:
    return key == reference or key.startswith(f"{reference}.")


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, str) and "${" in value:
        yield key, value
    for name, item in items:
        yield from _texts(item, f"{key}.{name}" if key else str(name))


def _references(text: str, key: str) -> list[str]:
    """Dotted keys; `${.x}` is relative to the section of its own key."""
    found = []
    for name in _REFERENCE.findall(text):
        dots = len(name) - len(name.lstrip("."))
        section = key.split(".")[:-dots] if dots else []
        found.append(re.sub(r"\[(\w+)\]", r".\1", ".".join([*section, name[dots:]])))
    return found


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
