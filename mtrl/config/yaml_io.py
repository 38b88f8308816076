"""Reads and writes YAML. Numbers like `5e-7` are floats here (text in YAML 1.1), and dates stay text.

Input that would cost time or memory is rejected early: large files, deep nesting, anchors that expand without end,
Python tags.
"""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from mtrl.utils.files import regular_file

MAX_BYTES = 256 * 1024
MAX_NODES = 10_000  # with anchors expanded
MAX_DEPTH = 50
MAX_DIGITS = 100  # longer numbers overflow, or take long to parse
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_YAML = "tag:yaml.org,2002:"
_AS_TEXT = (f"{_YAML}timestamp", f"{_YAML}value")  # `2024-01-01` and `=` stay text
_TAGS = {_YAML + kind for kind in ("map", "seq", "str", "int", "float", "bool", "null")}
_MERGE = f"{_YAML}merge"


class BadYaml(Exception):
    """The text is not YAML, or not a mapping. The message starts with `:line: ` if the line is known."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _AS_TEXT]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth, nodes = 0, 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth, self.nodes = self.depth + 1, self.nodes + 1
        _limit(self.depth, self.nodes, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag not in _TAGS:
            name = node.tag.replace(_YAML, "!!")
            raise _yaml_error(f"the tag {_cut(name)} is not supported; remove it", node.start_mark)
        number = node.tag in (f"{_YAML}int", f"{_YAML}float")
        if number and len(node.value) > MAX_DIGITS:
            raise _yaml_error(f"a number of {len(node.value)} characters is too long", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            kind = node.tag.removeprefix(_YAML)
            raise _yaml_error(f"{_cut(repr(node.value))} cannot be read as !!{kind}", node.start_mark) from None


def _yaml_error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _limit(depth: int, nodes: int, mark: Any) -> None:
    if depth > MAX_DEPTH:
        raise _yaml_error(f"nested more than {MAX_DEPTH} levels deep", mark)
    if nodes > MAX_NODES:
        raise _yaml_error(f"more than {MAX_NODES} values with anchors expanded; no configuration is that large", mark)


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_list(dumper: yaml.SafeDumper, items: Any) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_representer(tuple, _write_list)
_Dumper.add_representer(list, _write_list)


def write_yaml(content: dict[str, Any]) -> str:
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def to_inline_yaml(value: Any) -> str:
    """The value as YAML on one line."""
    style = {"default_flow_style": True, "width": float("inf")}
    text = yaml.dump({"value": value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)
    return text.strip().removeprefix("{value: ").removesuffix("}")


def read_value(text: str) -> Any:
    """Parse one value of the command line as in a file."""
    try:
        document = _Document(text)
    except BadYaml as error:
        raise BadYaml(re.sub(r"^(:\d+)?: not valid YAML", "", str(error))) from None
    if document.repeated:
        raise BadYaml(f": {document.repeated[0][0]}: set twice; remove one of the two")
    return document.content


def read_text(path: Path) -> str:
    """Read a text file, or raise `BadYaml`. Only regular files are opened: a pipe or a device could be endless."""
    try:
        with regular_file(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise BadYaml(f": cannot read the file: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > MAX_BYTES:
        raise BadYaml(
            f": cannot read the file: it is larger than {MAX_BYTES // 1024} KiB; no configuration is that large"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadYaml(": cannot read the file: it is not UTF-8 text") from None


class _Document:
    """The content of a text, the line of each (dotted) key, the keys that are set twice, and those that are null."""

    def __init__(self, text: str) -> None:
        self.content: Any = None
        self.repeated: list[tuple[str, int]] = []
        self.nulls: frozenset[str] = frozenset()  # keys with an explicit null, unlike those without a value
        self._lines: dict[str, int] = {}
        self._nodes = 0
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            if node is not None:
                self._walk(node, "", ())
                self.content = loader.construct_document(node)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise BadYaml(f"{line}: not valid YAML: {problem}") from None

    def line(self, key: str) -> int:
        """The line of a key, or of its section if the key comes from an anchor."""
        while key and key not in self._lines:
            key = key.rpartition(".")[0]
        return self._lines.get(key, 1)

    def _walk(self, node: yaml.Node, prefix: str, above: tuple[yaml.Node, ...]) -> None:
        """Visit every value with anchors expanded, to count them and to find anchors that contain themselves."""
        self._nodes += 1
        if node in above:
            raise _yaml_error("an anchor contains itself", node.start_mark)
        _limit(len(above) + 1, self._nodes, node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._walk(item, f"{prefix}{index}.", (*above, node))
        elif isinstance(node, yaml.MappingNode):
            self._walk_mapping(node, prefix, (*above, node))

    def _walk_mapping(self, node: yaml.MappingNode, prefix: str, above: tuple[yaml.Node, ...]) -> None:
        for name, value in node.value:
            mark = name.start_mark
            if name.tag != f"{_YAML}str" and name.tag != _MERGE:
                is_scalar = isinstance(name, yaml.ScalarNode)
                text = (name.value or "null") if is_scalar else f"a {name.id}"
                hint = "; put it in quotes" if is_scalar else ""
                raise _yaml_error(f"a key must be text, got {_cut(text)}{hint}", mark)
            key = prefix + name.value
            if key in self._lines:
                self.repeated.append((key, mark.line + 1))
            self._lines[key] = mark.line + 1
            if value.tag == f"{_YAML}null" and value.value:
                self.nulls |= {key}
            self._walk(value, key + ".", above)


class YamlFile(_Document):
    """The content of a YAML file, which is a mapping or empty."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        if self.content is None:
            self.content = {}
        elif not isinstance(self.content, dict):
            kind = "sequence" if isinstance(self.content, list) else "scalar"
            raise BadYaml(f":1: expected `key: value` lines, got a {kind}")
