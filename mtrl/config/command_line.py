"""Overrides as people type them: `a.b=c`, `--a.b=c`, `--a.b c`."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mtrl.config.tree import known_leaves
from mtrl.config.value_types import is_text, printable
from mtrl.config.yaml_io import BadYaml, read_value

_ASSIGNMENT = re.compile(r"(?:--)?([^=/\\\s]+)=(.*)", re.DOTALL)  # a path with `=` in it has its slash first


def take_file(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration file among command-line arguments (`FILE` or `config=FILE`), and the others; a key that
    lacks its value is no file."""
    others, file = list(arguments), None
    for span, key, text in _parts(arguments):
        if file is None and key in (None, "config") and text not in known_leaves():
            file = text
            del others[span]
    return file, others


def read_arguments(arguments: Sequence[str], errors: list[str]) -> Iterator[tuple[str, Any]]:
    """Key and value of each override."""
    for _, key, text in _parts(arguments):
        if key is None:
            errors.append(f"command line: {printable(str(text))}: not an override; write key=value")
        elif text is None:
            name = printable(key or "--")
            errors.append(f"command line: {name}: no value given; write {name if key else 'key'}=value")
        else:
            try:
                yield key, _value(key, text)
            except BadYaml as error:
                errors.append(f"command line: {printable(key)}: cannot read the value{error}")


def _parts(arguments: Sequence[str]) -> Iterator[tuple[slice, str | None, str | None]]:
    """(place, key, text) of each override; no key for a plain word, no text for a `--key` without a value."""
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
    """YAML, except that a key which takes text gets it as typed: `experiment_name=007`, `system_prompt=Think: ...`."""
    leaf = known_leaves().get(key)
    plain_text = text == "" or (leaf is not None and is_text(leaf.annotation) and text[0] not in "\"'")
    if plain_text and text not in ("null", "~"):
        return text
    return read_value(text)
