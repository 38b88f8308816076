"""The words after `--` of `mtrl convert`: the command line that starts the other program."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mtrl.config.plain_values import to_plain
from mtrl.config.yaml_io import BadYaml, YamlFile, read_text, read_value
from mtrl.utils.value_types import BadValue, format_key


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--name a b` (a list) and `--name` (true), as TrlParser reads them."""
    flags: dict[str, Any] = {}
    for name, values in _group(words):
        if name in flags:
            raise BadYaml(f": --{format_key(name)}: given 2 times, keep one")
        read = [_read(f"--{name}", value.removesuffix(",")) for value in values]
        flags[name] = True if not read else read[0] if len(read) == 1 else read
    if isinstance(file := flags.pop("config", None), str):  # TrlParser: the flags win over the file
        try:
            content = YamlFile(read_text(Path(file))).content
        except BadYaml as error:
            raise BadYaml(f": --config {format_key(file)}{error}") from None
        return {**{name: value for name, value in content.items() if name != "env"}, **flags}
    return flags


def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """`a.b=value` of hydra and OmegaConf; `+a.b=value` there adds a key that their file does not have."""
    settings: dict[str, Any] = {}
    for word in words:
        key, is_setting, value = word.partition("=")
        key = key.lstrip("+")
        if not is_setting or not key or key.startswith(("-", "~")):
            raise BadYaml(f": {format_key(word)}: expected key=value after --")
        settings[key] = _read(key, value)
    return settings


def _group(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    name, values = None, []  # type: str | None, list[str]
    for word in words:
        is_flag = word.startswith("--") and len(word) > 2
        if is_flag and name is not None:
            yield name, values
        if is_flag:
            text, has_value, value = word[2:].partition("=")
            name, values = text.replace("-", "_"), [value] if has_value else []
        elif name is None:
            raise BadYaml(f": {format_key(word)}: expected --name value after --")
        else:
            values.append(word)
    if name is not None:
        yield name, values


def _read(name: str, text: str) -> Any:
    """The value as in a file; text that is no YAML is kept as it is."""
    try:
        return to_plain(read_value(text)) if text else ""
    except BadYaml:
        return text
    except BadValue as error:
        raise BadYaml(f": {format_key(name)}: {error}") from None
