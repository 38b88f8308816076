"""Reads YAML and overrides into a `Config`, or reports all errors at once.

Overrides win over the file, and the file over the defaults. OmegaConf resolves `${...}` between keys
(`worker.actor.global_batch_size: ${dataset.rollout_batch_size}`); a literal `${` is written `\\${`.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException, UnsupportedInterpolationType

from mtrl.config.checks import Conflict, find_conflicts
from mtrl.config.command_line import read_arguments
from mtrl.config.config_error import ConfigError
from mtrl.config.nearest import list_section, suggest
from mtrl.config.packaged import find_config, similar_names
from mtrl.config.paths import resolve_paths
from mtrl.config.plain_values import ESCAPE_HINT, find_endless_references, first_line, has_reference, to_plain
from mtrl.config.tree import RENAMED_KEYS, Config, known_leaves, known_sections
from mtrl.config.value_types import BadValue, format_key, format_value, validate
from mtrl.config.yaml_io import BadYaml, YamlFile, read_text, write_yaml

Node = TypeVar("Node")
Where = Callable[[str], str]  # dotted key -> the file and line that set it, or "command line"
MAX_LEVELS = 10  # nested sections; the tree has fewer
MAX_SUGGESTIONS = 20  # with more errors, unknown keys get no suggestions: the search is slow

logger = logging.getLogger(__name__)


class Setting(NamedTuple):
    """One key that a file or an override sets: a leaf of the tree, or a key inside a free-form mapping."""

    leaf: str
    key: str
    value: Any
    where: str
    old_name: str | None = None  # set if the key was given by its former name


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = (), *, saved: bool = False
) -> Config:
    """Return the complete, checked configuration of a run, or raise `ConfigError` with everything that is wrong.

    `path` may be the name of a packaged configuration (`experiments/dapo`). Overrides are command-line arguments
    (`a.b=c`, `--a.b c`, `--a.b=c`) or, from Python, a mapping of dotted keys. Paths in the file are relative to it if
    they exist there; those in a file that a run has `saved` are taken as they are.
    """
    errors: list[str] = []
    settings = [] if path is None else _file_settings(find_config(path), errors, saved)
    settings += _override_settings(overrides, errors)
    for setting in settings:
        if setting.old_name is not None and not saved:
            logger.warning("%s: %s is now called %s", setting.where, setting.old_name, setting.key)
    where = {setting.leaf: setting.where for setting in settings}
    values = _validate_values(_merge(settings), where, errors)
    config = build_config(Config, values)
    unusable = where.keys() - values.keys()
    conflicts = (conflict for conflict in find_conflicts(config) if unusable.isdisjoint(conflict.keys))
    errors += [_format_conflict(conflict, values, where) for conflict in conflicts]
    if errors:
        raise ConfigError(errors)
    return config


def read_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that overrides set, unchecked; `load_config` reports errors in them."""
    return {setting.leaf: setting.value for setting in _override_settings(overrides, [])}


def to_dict(config: Any) -> dict[str, Any]:
    """The tree as nested dictionaries."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    return {name: to_dict(value) if is_dataclass(value) else value for name, value in values.items()}


def to_yaml(config: Config) -> str:
    """YAML that loads to an equal `Config`."""
    return write_yaml(escape_references(to_dict(config)))


def _file_settings(path: Path, errors: list[str], saved: bool) -> list[Setting]:
    try:
        file = YamlFile(read_text(path))
    except BadYaml as error:
        errors.append(f"{format_key(str(path))}{error}{_packaged_hint(path, error.__cause__)}")
        return []

    def where(key: str) -> str:
        return f"{format_key(str(path))}:{file.line(key)}"

    errors += [f"{where(key)}: {format_key(key)}: set twice; remove one of the two" for key, _ in file.repeated]
    settings = _read_settings(file.content.items(), where, errors)
    return settings if saved else [_resolve_paths(setting, path.absolute().parent) for setting in settings]


def _packaged_hint(path: Path, error: BaseException | None) -> str:
    if not isinstance(error, FileNotFoundError) or path.is_absolute():
        return ""
    if names := similar_names(path):
        return f"; did you mean the packaged {' or '.join(names)}?"
    return "; mtrl config --list shows the packaged configurations"


def _override_settings(overrides: Sequence[str] | Mapping[str, Any], errors: list[str]) -> list[Setting]:
    from_python = isinstance(overrides, Mapping)
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else read_arguments(overrides, errors))
    settings = _read_settings(pairs, lambda key: "overrides" if from_python else "command line", errors)
    return [_resolve_paths(setting, None) for setting in settings]


def _resolve_paths(setting: Setting, folder: Path | None) -> Setting:
    kind = known_leaves()[setting.leaf].path_kind
    return setting if kind is None else setting._replace(value=resolve_paths(setting.value, kind, folder))


def _read_settings(pairs: Iterable[tuple[Any, Any]], where: Where, errors: list[str]) -> list[Setting]:
    settings = [setting for key, value in pairs for setting in _flatten(key, value, where, errors)]
    new_names = {setting.key for setting in settings if setting.old_name is None}
    for setting in settings:
        if setting.old_name is not None and setting.key in new_names:
            errors.append(
                f"{setting.where}: {setting.old_name}: the old name of {setting.key}, which is set too; remove "
                f"{setting.old_name}"
            )
    return settings


def _flatten(key: Any, value: Any, where: Where, errors: list[str]) -> Iterator[Setting]:
    """The leaves that `key: value` sets, section by section; unknown keys are reported."""
    if not isinstance(key, str):
        errors.append(f"{where('')}: {format_value(key)}: a key must be text, got {type(key).__name__}")
        return
    new_name = RENAMED_KEYS.get(key, key)
    leaf, is_section, prefix = find_leaf(new_name), key in known_sections(), f"{where(key)}: {format_key(key)}"
    if leaf is not None:
        try:
            yield Setting(leaf, new_name, to_plain(value), where(key), None if new_name == key else key)
        except BadValue as error:
            errors.append(f"{prefix}: cannot be used: {error}")
    elif isinstance(value, Mapping) and (is_section or value) and key.count(".") < MAX_LEVELS:
        # An unknown section is reported key by key.
        for name, inner in value.items():
            yield from _flatten(f"{key}.{name}", inner, where, errors)
    elif not is_section:
        errors.append(f"{prefix}: unknown key{suggest(key) if len(errors) < MAX_SUGGESTIONS else ''}")
    elif value is not None:  # a section whose keys are all commented out is fine
        errors.append(f"{prefix}: this is a section, got {format_value(value)}; {list_section(key + '.')}")


def find_leaf(key: str) -> str | None:
    """The key itself, or the free-form mapping that contains it (`worker.rollout.engine_kwargs.dtype`)."""
    if key in known_leaves():
        return key
    mappings = (name for name, leaf in known_leaves().items() if get_origin(leaf.annotation) is Mapping)
    return next((name for name in mappings if key.startswith(name + ".") and "" not in key.split(".")), None)


def _merge(settings: Sequence[Setting]) -> dict[str, Any]:
    """The defaults with the settings applied in order; `${...}` is not resolved yet."""
    tree = to_dict(Config())
    for setting in settings:
        *path, name = setting.key.split(".")
        node = tree
        for step in path:
            if not isinstance(node.get(step), dict):  # only inside a free-form mapping
                node[step] = {}
            node = node[step]
        node[name] = setting.value
    return tree


def _validate_values(layers: dict[str, Any], where: Mapping[str, str], errors: list[str]) -> dict[str, Any]:
    """The typed values of the keys that are set; unusable values are reported and left out."""
    if endless := next(find_endless_references(layers), None):
        source = next((source for key, source in where.items() if endless.startswith(key)), "configuration")
        errors.append(f"{source}: {endless}: its references to other keys, and theirs to others, are too many")
        return {}
    tree: DictConfig | None = None
    values = {}
    for key, source in where.items():
        leaf = known_leaves()[key]
        value: Any = reduce(getitem, key.split("."), layers)
        try:
            if has_reference(value):  # building the OmegaConf tree takes longer than everything else here
                tree = OmegaConf.create(layers) if tree is None else tree
                value = OmegaConf.select(tree, key, throw_on_missing=True)
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            values[key] = validate(value, leaf.annotation, leaf.within)
        except BadValue as error:
            errors.append(f"{source}: {key}: {error}")
        except (OmegaConfBaseException, RecursionError) as error:
            is_unknown = isinstance(error, (InterpolationKeyError, UnsupportedInterpolationType))
            hint = f"; {ESCAPE_HINT}" if is_unknown else ""
            errors.append(f"{source}: {key}: cannot be resolved: {first_line(error)}{hint}")
    return values


def build_config(cls: type[Node], values: Mapping[str, Any], prefix: str = "") -> Node:
    """Build the tree from the values of some leaves; the others keep their defaults."""
    arguments = {}
    for name, hint in get_type_hints(cls).items():
        key = prefix + name
        if key in known_sections():
            arguments[name] = build_config(hint, values, key + ".")
        elif key in values:
            arguments[name] = values[key]
    return cls(**arguments)


def _format_conflict(conflict: Conflict, values: Mapping[str, Any], where: Mapping[str, str]) -> str:
    def setting(key: str) -> str:
        if key in where:
            return f"{key} = {format_value(values[key])}"
        return f"{key} = {format_value(known_leaves()[key].default)} (default)"

    sources = dict.fromkeys(where[key] for key in conflict.keys if key in where)
    return f"{' and '.join(sources)}: {' with '.join(map(setting, conflict.keys))}: {conflict.why}"


def escape_references(value: Any) -> Any:
    """Escape each `${` in the value, so that it is read as text again."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    if isinstance(value, Mapping):
        return {name: escape_references(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [escape_references(item) for item in value]
    return value
