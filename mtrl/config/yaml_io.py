"""YAML in and out. Numbers like `5e-7` are floats here (YAML 1.1 takes them for text), and dates stay text.

What no configuration is, is refused before it costs time or memory: large files, deep nesting, anchors that grow
without end, tags of Python.
"""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from mtrl.utils.files import regular_file

MAX_BYTES = 256 * 1024
MAX_NODES = 10_000  # after anchors are written out
MAX_DEPTH = 50
MAX_DIGITS = 100  # longer numbers overflow, or take long to be read
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_YAML = "tag:yaml.org,2002:"
_AS_TEXT = (f"{_YAML}timestamp", f"{_YAML}value")  # `2024-01-01` and `=` are what they look like
_TAGS = {_YAML + kind for kind in ("map", "seq", "str", "int", "float", "bool", "null")}
_MERGE = f"{_YAML}merge"


class BadYaml(Exception):
    """The text is not YAML, or not a mapping. The message starts with `:line: ` where the line is known."""


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
            raise _refused(f"the tag {_cut(name)} is none of a configuration; leave it out", node.start_mark)
        number = node.tag in (f"{_YAML}int", f"{_YAML}float")
        if number and len(node.value) > MAX_DIGITS:
            raise _refused(f"a number of {len(node.value)} characters; no key takes one", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            kind = node.tag.removeprefix(_YAML)
            raise _refused(f"{_cut(repr(node.value))} cannot be read as !!{kind}", node.start_mark) from None


def _refused(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _limit(depth: int, nodes: int, mark: Any) -> None:
    if depth > MAX_DEPTH:
        raise _refused(f"nested over {MAX_DEPTH} levels deep", mark)
    if nodes > MAX_NODES:
        raise _refused(f"over {MAX_NODES} values, anchors written out; no configuration is that large", mark)


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


def read_value(text: str) -> Any:
    """One value of the command line, as it would be read in a file."""
    try:
        document = _Document(text)
    except BadYaml as error:
        raise BadYaml(re.sub(r"^(:\d+)?: not valid YAML", "", str(error))) from None
    if document.repeated:
        raise BadYaml(f": {document.repeated[0][0]}: set a second time; keep one of the two")
    return document.content


def read_text(path: Path) -> str:
    """The text of a file, or `BadYaml`. What is no file (a pipe, a device) is not opened: it could be endless."""
    try:
        with regular_file(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise BadYaml(f": cannot read the file: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > MAX_BYTES:
        raise BadYaml(f": cannot read the file: it is over {MAX_BYTES // 1024} KiB, no configuration is that large")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadYaml(": cannot read the file: it is not UTF-8 text") from None


class _Document:
    """What a text holds, the line of each (dotted) key, and the keys that are set twice."""

    def __init__(self, text: str) -> None:
        self.content: Any = None
        self.repeated: list[tuple[str, int]] = []
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
            raise BadYaml(f"{line}: not valid YAML: {_problem(error)}") from None

    def line(self, key: str) -> int:
        """The line of a key, or of the section above it where the key came in through an anchor."""
        while key and key not in self._lines:
            key = key.rpartition(".")[0]
        return self._lines.get(key, 1)

    def _walk(self, node: yaml.Node, prefix: str, above: tuple[yaml.Node, ...]) -> None:
        """Through every value as if anchors were written out: so they can be counted, and cannot contain themselves."""
        self._nodes += 1
        if node in above:
            raise _refused("an anchor contains itself", node.start_mark)
        _limit(len(above) + 1, self._nodes, node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            for place, item in enumerate(node.value):
                self._walk(item, f"{prefix}{place}.", (*above, node))
        elif isinstance(node, yaml.MappingNode):
            self._walk_mapping(node, prefix, (*above, node))

    def _walk_mapping(self, node: yaml.MappingNode, prefix: str, above: tuple[yaml.Node, ...]) -> None:
        for name, value in node.value:
            mark = name.start_mark
            if name.tag != f"{_YAML}str" and name.tag != _MERGE:
                raise _refused(f"a key is text, got {_cut(_named(name))}{_quotes(name)}", mark)
            key = prefix + name.value
            if key in self._lines:
                self.repeated.append((key, mark.line + 1))
            self._lines[key] = mark.line + 1
            self._walk(value, key + ".", above)


def _named(key: yaml.Node) -> str:
    return (key.value or "null") if isinstance(key, yaml.ScalarNode) else f"a {key.id}"


def _quotes(key: yaml.Node) -> str:
    return "; put it in quotes" if isinstance(key, yaml.ScalarNode) else ""


class YamlFile(_Document):
    """The content of a YAML file: a mapping, or nothing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        if self.content is None:
            self.content = {}
        elif not isinstance(self.content, dict):
            kind = "sequence" if isinstance(self.content, list) else "scalar"
            raise BadYaml(f":1: expected `key: value` lines, got a {kind}")


def _problem(error: Exception) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]
