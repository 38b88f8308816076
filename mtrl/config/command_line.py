"""Overrides on the command line: `a.b=c`, `--a.b=c`, `--a.b c`."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mtrl.config.tree import known_leaves
from mtrl.config.yaml_io import BadYaml, read_value
from mtrl.utils.value_types import format_key, is_text

_ASSIGNMENT = re.compile(r"(?:--)?([^=/\\\s]+)=(.*)", re.DOTALL)  # not a path that contains `=`


def take_file(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split the configuration file (`FILE` or `config=FILE`) from the other command-line arguments. A key without a
    value is not a file."""
    others, file = list(arguments), None
    for span, key, text in _parse(arguments):
        if file is None and key in (None, "config") and text not in known_leaves():
            file = text
            del others[span]
    return file, others


def read_arguments(arguments: Sequence[str], errors: list[str]) -> Iterator[tuple[str, Any]]:
    """The key and value of each override."""
    for _, key, text in _parse(arguments):
        if key is None:
            errors.append(f"command line: {format_key(str(text))}: not an override; write key=value")
        elif text is None:
            name = format_key(key or "--")
            errors.append(f"command line: {name}: no value given; write {name if key else 'key'}=value")
        else:
            try:
                yield key, _value(key, text)
            except BadYaml as error:
                errors.append(f"command line: {format_key(key)}: the value cannot be read{error}")


def _parse(arguments: Sequence[str]) -> Iterator[tuple[slice, str | None, str | None]]:
    """(indices, key, text) of each override; key is None for a plain word, text for a `--key` without a value."""
    index = 0
    while index < len(arguments):
        start, word = index, arguments[index]
        index += 1
        if match := _ASSIGNMENT.fullmatch(word):
            yield slice(start, index), match[1], match[2]
        elif not word.startswith("--"):
            yield slice(start, index), None, word
        elif index < len(arguments) and not arguments[index].startswith("--"):
            index += 1
            yield slice(start, index), word[2:], arguments[start + 1]
        else:
            yield slice(start, index), word[2:], None


def _value(key: str, text: str) -> Any:
    """Parse YAML, but take the value of a text key as typed: `experiment_name=007`, `system_prompt=Think: ...`."""
    leaf = known_leaves().get(key)
    quoted = "\"'{" if leaf is not None and leaf.names else "\"'"
    plain_text = text == "" or (leaf is not None and is_text(leaf.annotation) and text[0] not in quoted)
    if plain_text and text not in ("null", "~"):
        return text
    return read_value(text)
