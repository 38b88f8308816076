"""YAML in and out. Numbers like `5e-7` are floats here (YAML 1.1 takes them for text), and dates stay text."""

import re
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class BadYaml(Exception):
    """The text is not YAML, or not a mapping. The message starts with `:line: ` where the line is known."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


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
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise BadYaml(": " + _problem(error)) from None


class YamlFile:
    """The content of a YAML file, the line of each (dotted) key, and the keys that are set twice."""

    def __init__(self, text: str) -> None:
        self.content: dict[Any, Any] = {}
        self.repeated: list[tuple[str, int]] = []
        self._lines: dict[str, int] = {}
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            if node is None or node.tag == "tag:yaml.org,2002:null":
                return
            if not isinstance(node, yaml.MappingNode):
                raise BadYaml(f":{node.start_mark.line + 1}: expected `key: value` lines, got a {node.id}")
            self._walk(node, "")
            self.content = loader.construct_document(node)
        except (yaml.YAMLError, ValueError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            raise BadYaml(f"{line}: not valid YAML: {_problem(error)}") from None
        except RecursionError:
            raise BadYaml(": not usable: an anchor contains itself") from None

    def line(self, key: str) -> int:
        """The line of a key, or of the section above it where the key came in through an anchor."""
        while key and key not in self._lines:
            key = key.rpartition(".")[0]
        return self._lines.get(key, 1)

    def _walk(self, node: yaml.Node, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for name, value in node.value:
            key, line = f"{prefix}{name.value}", name.start_mark.line + 1
            if key in self._lines:
                self.repeated.append((key, line))
            self._lines[key] = line
            self._walk(value, key + ".")


def _problem(error: Exception) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]
