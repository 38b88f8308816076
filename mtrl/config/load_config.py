"""From YAML and overrides to a `Config`, or to one report of everything that is wrong.

The layers are defaults, file, overrides; a later one wins. OmegaConf holds them and resolves `${...}` between keys
(`worker.actor.global_batch_size: ${dataset.rollout_batch_size}`); a literal `${` is written `\\${`.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException, UnsupportedInterpolationType

from mtrl.config.checks import conflicts
from mtrl.config.command_line import read_arguments
from mtrl.config.config_error import ConfigError
from mtrl.config.nearest import keys_there, suggestion
from mtrl.config.packaged import find, near_names
from mtrl.config.paths import placed
from mtrl.config.plain_values import LITERAL, endless, first_line, plain, refers
from mtrl.config.tree import RENAMED_KEYS, Config, known_leaves, known_sections
from mtrl.config.value_types import BadValue, printable, shown, typed
from mtrl.config.yaml_io import BadYaml, YamlFile, read_text, write_yaml

Node = TypeVar("Node")
Where = Callable[[str], str]  # dotted key -> the place that sets it
MOST_LEVELS = 10  # of sections; the tree has fewer
logger = logging.getLogger(__name__)

MANY = 20  # errors after which no more nearest keys are looked for


class Setting(NamedTuple):
    """One key that a file or an override sets: a leaf of the tree, or a key inside a free-form mapping."""

    leaf: str
    key: str
    value: Any
    where: str
    old_name: str | None = None  # the name the key had in 0.1.0, if it was set by that


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = (), *, saved: bool = False
) -> Config:
    """The configuration of a run, complete and checked; `ConfigError` names all that is wrong with it.

    The file may be one of the package by its name there (`experiments/dapo`). Overrides are command-line arguments
    (`a.b=c`, `--a.b c`, `--a.b=c`) or, from Python, a mapping of dotted keys. Paths in the file are relative to it
    where they exist there, but in one that a run has `saved` they are as the run used them.
    """
    errors: list[str] = []
    settings = [] if path is None else _file_settings(find(path), errors, saved)
    settings += _override_settings(overrides, errors)
    if not saved:
        warn_of_old_names(settings)
    where = {setting.leaf: setting.where for setting in settings}
    values = _typed_values(_merged(settings), where, errors)
    config = build(Config, values)
    unusable = where.keys() - values.keys()
    errors += [_conflict_line(keys, why, values, where) for keys, why in conflicts(config) if unusable.isdisjoint(keys)]
    if errors:
        raise ConfigError(errors)
    return config


def warn_of_old_names(settings: Sequence[Setting]) -> None:
    for setting in settings:
        if setting.old_name is not None:
            logger.warning("%s: %s is now called %s", setting.where, setting.old_name, setting.key)


def given_keys(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """What overrides alone set, unchecked: what is wrong with it `load_config` says."""
    return {setting.leaf: setting.value for setting in _override_settings(overrides, [])}


def to_dict(config: Any) -> dict[str, Any]:
    """The tree as plain nested dictionaries."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    return {name: to_dict(value) if is_dataclass(value) else value for name, value in values.items()}


def to_yaml(config: Config) -> str:
    """YAML that loads to an equal `Config`."""
    return write_yaml(without_interpolation(to_dict(config)))


def _file_settings(path: Path, errors: list[str], saved: bool) -> list[Setting]:
    try:
        file = YamlFile(read_text(path))
    except BadYaml as error:
        errors.append(f"{printable(str(path))}{error}{_packaged_hint(path, error.__cause__)}")
        return []

    def where(key: str) -> str:
        return f"{printable(str(path))}:{file.line(key)}"

    errors += [f"{where(key)}: {printable(key)}: set a second time; keep one of the two" for key, _ in file.repeated]
    found = [setting for name, value in file.content.items() for setting in _settings(name, value, where, errors)]
    return found if saved else [_placed(setting, path.absolute().parent) for setting in found]


def _packaged_hint(path: Path, error: BaseException | None) -> str:
    if not isinstance(error, FileNotFoundError) or path.is_absolute():
        return ""
    if near := near_names(path):
        return f"; did you mean {' or '.join(near)} of the package?"
    return "; mtrl config --list names those of the package"


def _placed(setting: Setting, folder: Path | None) -> Setting:
    names = known_leaves()[setting.leaf].names
    return setting if names is None else setting._replace(value=placed(setting.value, names, folder))


def _override_settings(overrides: Sequence[str] | Mapping[str, Any], errors: list[str]) -> list[Setting]:
    from_python = isinstance(overrides, Mapping)
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else read_arguments(overrides, errors))

    def where(key: str) -> str:
        return "overrides" if from_python else "command line"

    return [_placed(setting, None) for key, value in pairs for setting in _settings(key, value, where, errors)]


def _settings(key: Any, value: Any, where: Where, errors: list[str]) -> Iterator[Setting]:
    """The leaves that `key: value` sets, a section being opened; what is no key of the tree is reported."""
    if not isinstance(key, str):
        errors.append(f"{where('')}: {shown(key)}: a key is text, got {type(key).__name__}")
        return
    name = RENAMED_KEYS.get(key, key)
    leaf, is_section, told = find_leaf(name), key in known_sections(), f"{where(key)}: {printable(key)}"
    if leaf is not None:
        try:
            yield Setting(leaf, name, plain(value), where(key), None if name == key else key)
        except BadValue as error:
            errors.append(f"{told}: cannot be used: {error}")
    elif isinstance(value, Mapping) and (is_section or value) and key.count(".") < MOST_LEVELS:
        # An unknown section is reported key by key.
        for name, inner in value.items():
            yield from _settings(f"{key}.{name}", inner, where, errors)
    elif not is_section:
        errors.append(f"{told}: unknown key{suggestion(key) if len(errors) < MANY else ''}")
    elif value is not None:  # a section whose keys are all commented out is fine
        errors.append(f"{told}: a section, got {shown(value)}; {keys_there(key + '.')}")


def find_leaf(key: str) -> str | None:
    """The key itself, or the free-form mapping it reaches into (`worker.rollout.engine_kwargs.dtype`)."""
    if key in known_leaves():
        return key
    mappings = (name for name, leaf in known_leaves().items() if get_origin(leaf.annotation) is Mapping)
    return next((name for name in mappings if key.startswith(name + ".") and "" not in key.split(".")), None)


def _merged(settings: Sequence[Setting]) -> dict[str, Any]:
    """The settings over the defaults, later ones winning, with `${...}` still to be resolved."""
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


def _typed_values(layers: dict[str, Any], where: Mapping[str, str], errors: list[str]) -> dict[str, Any]:
    """Typed values of the keys that are set; values that cannot be used are reported and left out."""
    if too_many := next(endless(layers), None):
        place = next((place for key, place in where.items() if too_many.startswith(key)), "configuration")
        errors.append(f"{place}: {too_many}: refers to other keys, and those to others, too often to be written out")
        return {}
    tree: DictConfig | None = None
    values = {}
    for key, place in where.items():
        leaf = known_leaves()[key]
        value: Any = reduce(getitem, key.split("."), layers)
        try:
            if refers(value):  # only then OmegaConf is asked: a whole tree of it takes longer than all the rest
                tree = OmegaConf.create(layers) if tree is None else tree
                value = OmegaConf.select(tree, key, throw_on_missing=True)
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            values[key] = typed(value, leaf.annotation, leaf.within)
        except BadValue as error:
            errors.append(f"{place}: {key}: {error}")
        except (OmegaConfBaseException, RecursionError) as error:
            literal = f"; {LITERAL}" if isinstance(error, (InterpolationKeyError, UnsupportedInterpolationType)) else ""
            errors.append(f"{place}: {key}: cannot be resolved: {first_line(error)}{literal}")
    return values


def build(cls: type[Node], values: Mapping[str, Any], prefix: str = "") -> Node:
    """The tree from the values of some leaves; the others keep their defaults."""
    parts = {}
    for name, hint in get_type_hints(cls).items():
        key = prefix + name
        if key in known_sections():
            parts[name] = build(hint, values, key + ".")
        elif key in values:
            parts[name] = values[key]
    return cls(**parts)


def _conflict_line(keys: Sequence[str], why: str, values: Mapping[str, Any], where: Mapping[str, str]) -> str:
    places = dict.fromkeys(where[key] for key in keys if key in where)
    told = [f"{key} = {shown(values[key])}" if key in where else _default_told(key) for key in keys]
    return f"{' and '.join(places)}: {' with '.join(told)}: {why}"


def _default_told(key: str) -> str:
    return f"{key} = {shown(known_leaves()[key].default)} (default)"


def without_interpolation(value: Any) -> Any:
    """The value with each `${` escaped, so that it is read as text again."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    if isinstance(value, Mapping):
        return {name: without_interpolation(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_interpolation(item) for item in value]
    return value
