"""Every key with its default and meaning, as YAML that loads as it stands. `docs/config-reference.yaml` is this text:

python -m mtrl.config.key_reference > docs/config-reference.yaml
"""

import types
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from mtrl.config.tree import Leaf, known_leaves
from mtrl.config.yaml_io import write_yaml

HEADER = "# Every key with its default. Written by `make reference` from mtrl/config/tree.py, where a key is changed.\n"
HEADER += "# *: paths in a YAML are relative to that file where they exist there, else to the working directory.\n"


class KeyLine(NamedTuple):
    """A key, or the name of a section, in which case there is no comment."""

    section: str
    text: str
    comment: str = ""


def reference() -> str:
    """The whole tree, its main sections apart from each other."""
    blocks = [
        "\n".join(section_lines(name)) + "\n" for name in dict.fromkeys(key.split(".")[0] for key in known_leaves())
    ]
    return HEADER + "\n".join(blocks)


def section_lines(section: str) -> list[str]:
    """A section as it stands in the reference: one line a key, the comments of neighbours aligned."""
    lines: list[str] = []
    for _, block in groupby(_lines(section), key=lambda line: (line.section, line.comment == "")):
        lines += _aligned(list(block))
    return lines


def _lines(wanted: str) -> Iterable[KeyLine]:
    open_sections: list[str] = []
    for key, leaf in known_leaves().items():
        if not key.startswith(wanted + "."):
            continue
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                yield KeyLine(".".join(sections[:depth]), f"{'  ' * depth}{section}:")
        open_sections = sections
        yield KeyLine(".".join(sections), f"{'  ' * len(sections)}{name}: {written(leaf.default)}", comment(leaf))


def _aligned(block: list[KeyLine]) -> list[str]:
    width = max(len(line.text) for line in block)
    return [f"{line.text:<{width}}  # {line.comment}" if line.comment else line.text for line in block]


def comment(leaf: Leaf) -> str:
    allowed = ", ".join(choices(leaf.annotation))
    return leaf.meaning + (f" ({allowed})" if allowed else "") + (" *" if leaf.names else "")


def choices(annotation: Any) -> list[str]:
    """The words that a key, or each item of its list, may be; empty where it takes other values too."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is tuple and args[-1] is Ellipsis:
        return choices(args[0])
    members = args if origin in (Union, types.UnionType) else (annotation,)
    if all(member in (bool, types.NoneType) or get_origin(member) is Literal for member in members):
        words = {bool: ("true", "false"), types.NoneType: ("null",)}
        found = [word for member in members for word in words.get(member) or get_args(member)]
        return found if found != ["true", "false"] else []
    return []


def written(value: Any) -> str:
    """A value as YAML on one line."""
    return write_yaml({"value": value}).removeprefix("value: ").strip()


if __name__ == "__main__":
    print(reference(), end="")
