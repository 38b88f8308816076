"""Every key with its default and meaning as valid YAML. `docs/config-reference.yaml` is written by

python -m mtrl.config.key_reference > docs/config-reference.yaml
"""

import types
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from mtrl.config.tree import Leaf, known_leaves
from mtrl.config.yaml_io import to_inline_yaml

HEADER = """\
# Every key with its default. `make reference` writes this file from mtrl/config/tree.py.
# +: or your own class, as file.py:Name or {name: file.py:Name, and its arguments}.
# *: paths are relative to the YAML file that sets them if they exist there, else to the working directory.
"""


class KeyLine(NamedTuple):
    """A key with its comment, or the name of a section without one."""

    section: str
    text: str
    comment: str = ""


def make_reference() -> str:
    """The whole tree, with an empty line between main sections."""
    sections = dict.fromkeys(key.split(".")[0] for key in known_leaves())
    blocks = ["\n".join(section_lines(name)) + "\n" for name in sections]
    return HEADER + "\n".join(blocks)


def section_lines(section: str) -> list[str]:
    """A section of the reference: one line per key, with aligned comments."""
    lines: list[str] = []
    for _, group in groupby(_lines(section), key=lambda line: (line.section, line.comment == "")):
        block = list(group)
        width = max(len(line.text) for line in block)
        lines += [f"{line.text:<{width}}  # {line.comment}" if line.comment else line.text for line in block]
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
        yield KeyLine(
            ".".join(sections), f"{'  ' * len(sections)}{name}: {to_inline_yaml(leaf.default)}", comment(leaf)
        )


def comment(leaf: Leaf) -> str:
    allowed = ", ".join(leaf.names or list_choices(leaf.annotation))
    mark = " +" if leaf.names else " *" if leaf.path_kind else ""
    return leaf.meaning + (f" ({allowed})" if allowed else "") + mark


def list_choices(annotation: Any) -> list[str]:
    """The words that a key, or each item of its list, accepts; empty if it accepts other values too."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is tuple and args[-1] is Ellipsis:
        return list_choices(args[0])
    members = args if origin in (Union, types.UnionType) else (annotation,)
    if all(member in (bool, types.NoneType) or get_origin(member) is Literal for member in members):
        words = {bool: ("true", "false"), types.NoneType: ("null",)}
        allowed = [word for member in members for word in words.get(member) or get_args(member)]
        return allowed if allowed != ["true", "false"] else []
    return []


if __name__ == "__main__":
    print(make_reference(), end="")
