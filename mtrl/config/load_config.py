"""Reads YAML and overrides into a `Config`, or reports all errors at once.

Overrides win over the file, the file over those that it inherits from (config_layers.py), and these over the defaults.
OmegaConf resolves `${...}` between keys (`worker.actor.global_batch_size: ${dataset.rollout_batch_size}`); a literal
`${` is written `\\${`.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException, UnsupportedInterpolationType

from mtrl.config.checks import Conflict, find_conflicts
from mtrl.config.config_error import ConfigError
from mtrl.config.config_layers import Setting, apply_resets, file_settings, merge_mappings, override_settings
from mtrl.config.packaged import find_config
from mtrl.config.plain_values import ESCAPE_HINT, find_endless_references, first_line, has_reference
from mtrl.config.tree import Config, known_leaves, known_sections
from mtrl.config.yaml_io import write_yaml
from mtrl.utils.value_types import BadValue, format_value

Node = TypeVar("Node")

logger = logging.getLogger(__name__)


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = (), *, saved: bool = False
) -> Config:
    """Return the complete, checked configuration of a run, or raise `ConfigError` with everything that is wrong.

    `path` may be the name of a packaged configuration (`experiments/dapo`). Overrides are command-line arguments
    (`a.b=c`, `--a.b c`, `--a.b=c`) or, from Python, a mapping of dotted keys. Paths in the file are relative to it if
    they exist there; those in a file that a run has `saved` are taken as they are.
    """
    errors: list[str] = []
    settings = _read_layers(path, overrides, saved, errors)
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


def find_origins(path: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> dict[str, str]:
    """The file and line, or the command line, that each set leaf has its value from; the others have their defaults."""
    return {setting.leaf: setting.where for setting in _read_layers(path, overrides, saved=False, errors=[])}


def _read_layers(
    path: str | Path | None, overrides: Sequence[str] | Mapping[str, Any], saved: bool, errors: list[str]
) -> list[Setting]:
    layers = [] if path is None else file_settings(find_config(path), errors, saved)
    return apply_resets(layers) + override_settings(overrides, errors)


def read_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that overrides set, unchecked; `load_config` reports errors in them."""
    return {setting.leaf: setting.value for setting in override_settings(overrides, [])}


def to_dict(config: Any) -> dict[str, Any]:
    """The tree as nested dictionaries."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    return {name: to_dict(value) if is_dataclass(value) else value for name, value in values.items()}


def to_yaml(config: Config) -> str:
    """YAML that loads to an equal `Config`."""
    return write_yaml(escape_references(to_dict(config)))


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
        node[name] = merge_mappings(node.get(name), setting.value) if setting.merges else setting.value
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
            values[key] = leaf.validate(value)
        except BadValue as error:
            errors.append(f"{source}: {key}: {error}")
        except (OmegaConfBaseException, RecursionError) as error:
            is_unknown = isinstance(error, (InterpolationKeyError, UnsupportedInterpolationType))
            hint = f"; {ESCAPE_HINT}" if is_unknown else ""
            errors.append(f"{source}: {key}: cannot be resolved: {first_line(error)}{hint}")
    return values


@cache
def _type_hints(cls: Any) -> Mapping[str, Any]:
    """Cached, since evaluating the annotations takes most of the time of a load."""
    return get_type_hints(cls)


def build_config(cls: type[Node], values: Mapping[str, Any], prefix: str = "") -> Node:
    """Build the tree from the values of some leaves; the others keep their defaults."""
    arguments = {}
    for name, hint in _type_hints(cls).items():  # type: ignore[arg-type]
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
