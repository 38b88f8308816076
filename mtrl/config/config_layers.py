"""The layers of a configuration: the files that a file inherits from, the file itself, and the overrides.

`base: grpo.yaml`, or `base: [grpo.yaml, small.yaml]`, inherits from files next to the YAML or from packaged ones. Later
layers win key by key: mappings are merged, lists are replaced. In a file with a base, an explicit `null` resets a
section, or a key that cannot be null, to its default. A file that is inherited twice counts once, at its first place.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from mtrl.config.command_line import read_arguments
from mtrl.config.nearest import list_section, suggest
from mtrl.config.packaged import PREFIX, find_packaged, similar_names
from mtrl.config.paths import resolve_paths
from mtrl.config.plain_values import to_plain
from mtrl.config.tree import RENAMED_KEYS, known_leaves, known_sections
from mtrl.config.yaml_io import BadYaml, YamlFile, read_text
from mtrl.utils.value_types import BadValue, allows_null, format_key, format_value

Where = Callable[[str], str]  # dotted key -> the file and line that set it, or "command line"
BASE = "base"
RESET = object()  # the value of a setting that drops those of the layers below
MAX_LEVELS = 10  # nested sections; the tree has fewer
MAX_SUGGESTIONS = 20  # with more errors, unknown keys get no suggestions: the search is slow


class Setting(NamedTuple):
    """One key that a layer sets: a leaf of the tree, or a key inside a free-form mapping."""

    leaf: str
    key: str
    value: Any
    where: str
    old_name: str | None = None  # set if the key was given by its former name
    merges: bool = False  # whether a mapping is merged into that of the layer below


def file_settings(
    path: Path, errors: list[str], saved: bool, above: tuple[Path, ...] = (), read: set[Path] | None = None
) -> list[Setting]:
    """The settings of a file and of all that it inherits from. `above` are the files that inherit from this one,
    `read` are those that were read before. Paths in a file that a run has `saved` are taken as they are."""
    try:
        file = YamlFile(read_text(path))
    except BadYaml as error:
        errors.append(f"{format_key(str(path))}{error}{_packaged_hint(path, error.__cause__)}")
        return []

    def where(key: str) -> str:
        return f"{format_key(str(path))}:{file.line(key)}"

    read = {path.resolve()} if read is None else read
    errors += [f"{where(key)}: {format_key(key)}: set twice; remove one of the two" for key, _ in file.repeated]
    inherited: list[Setting] = []
    has_base, names = BASE in file.content, file.content.pop(BASE, None)
    for base in _find_bases(names, path, f"{where(BASE)}: {BASE}", errors) if has_base else ():
        if base.resolve() in {each.resolve() for each in (*above, path)}:
            chain = " -> ".join(format_key(str(each)) for each in (*above, path, base))
            errors.append(f"{where(BASE)}: {BASE}: the file inherits from itself: {chain}")
        elif base.resolve() not in read:
            read.add(base.resolve())
            inherited += file_settings(base, errors, saved, (*above, path), read)
    settings = read_settings(file.content.items(), where, errors, file.nulls if has_base else frozenset())
    if not saved:
        settings = [_resolve_paths(setting, path.absolute().parent) for setting in settings]
    return inherited + [setting._replace(merges=True) for setting in settings]


def override_settings(overrides: Sequence[str] | Mapping[str, Any], errors: list[str]) -> list[Setting]:
    from_python = isinstance(overrides, Mapping)
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else read_arguments(overrides, errors))
    settings = read_settings(pairs, lambda key: "overrides" if from_python else "command line", errors)
    return [_resolve_paths(setting, None) for setting in settings]


def apply_resets(settings: Iterable[Setting]) -> list[Setting]:
    """The settings without those that a later layer resets."""
    kept: list[Setting] = []
    for setting in settings:
        if setting.value is RESET:
            kept = [each for each in kept if each.leaf != setting.leaf]
        else:
            kept.append(setting)
    return kept


def merge_mappings(below: Any, above: Any) -> Any:
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{name: merge_mappings(below.get(name), value) for name, value in above.items()}}


def find_leaf(key: str) -> str | None:
    """The key itself, or the free-form mapping that contains it (`worker.rollout.engine_kwargs.dtype`)."""
    if key in known_leaves():
        return key
    mappings = (name for name, leaf in known_leaves().items() if get_origin(leaf.annotation) is Mapping)
    return next((name for name in mappings if key.startswith(name + ".") and "" not in key.split(".")), None)


def _find_bases(names: Any, path: Path, prefix: str, errors: list[str]) -> Iterator[Path]:
    names = names if isinstance(names, list) else [names]
    if not names or not all(isinstance(name, str) and name for name in names):
        errors.append(f"{prefix}: expected the name of a file, or a list of names; got {format_value(names)}")
        return
    for name in names:
        neighbour = path.parent / os.path.expanduser(name)
        candidates = () if name.startswith(PREFIX) else (neighbour, Path(f"{neighbour}.yaml"))
        # os.path: a name that is too long for a file is none, where Path.is_file() raises
        base = next((each for each in candidates if os.path.isfile(each)), None) or find_packaged(name)
        if base is not None:
            yield base
            continue
        similar = similar_names(name)
        hint = f"did you mean {' or '.join(similar)}?" if similar else "mtrl config --list shows the packaged ones"
        errors.append(f"{prefix}: {format_key(name)}: no such file next to this one, nor a packaged one; {hint}")


def _packaged_hint(path: Path, error: BaseException | None) -> str:
    if not isinstance(error, FileNotFoundError) or path.is_absolute():
        return ""
    if names := similar_names(path):
        return f"; did you mean the packaged {' or '.join(names)}?"
    return "; mtrl config --list shows the packaged configurations"


def _resolve_paths(setting: Setting, folder: Path | None) -> Setting:
    kind = known_leaves()[setting.leaf].path_kind
    if kind is None or setting.value is RESET:
        return setting
    return setting._replace(value=resolve_paths(setting.value, kind, folder))


def read_settings(
    pairs: Iterable[tuple[Any, Any]], where: Where, errors: list[str], nulls: frozenset[str] = frozenset()
) -> list[Setting]:
    """The settings of one layer; `nulls` are the keys with an explicit `null`, which reset what has no such value."""
    settings = [setting for key, value in pairs for setting in _flatten(key, value, where, errors, nulls)]
    new_names = {setting.key for setting in settings if setting.old_name is None}
    for setting in settings:
        if setting.old_name is not None and setting.key in new_names:
            errors.append(
                f"{setting.where}: {setting.old_name}: the old name of {setting.key}, which is set too; remove "
                f"{setting.old_name}"
            )
    return settings


def _flatten(key: Any, value: Any, where: Where, errors: list[str], nulls: frozenset[str]) -> Iterator[Setting]:
    """The leaves that `key: value` sets, section by section; unknown keys are reported."""
    if not isinstance(key, str):
        errors.append(f"{where('')}: {format_value(key)}: a key must be text, got {type(key).__name__}")
        return
    new_name = RENAMED_KEYS.get(key, key)
    leaf, is_section, prefix = find_leaf(new_name), key in known_sections(), f"{where(key)}: {format_key(key)}"
    if key in nulls and is_section:
        for name in known_leaves():
            if name.startswith(key + "."):
                yield Setting(name, name, RESET, where(key))
    elif leaf is not None:
        resets = key in nulls and leaf == new_name and not allows_null(known_leaves()[leaf].annotation)
        try:
            plain = RESET if resets else to_plain(value)
            yield Setting(leaf, new_name, plain, where(key), None if new_name == key else key)
        except BadValue as error:
            errors.append(f"{prefix}: cannot be used: {error}")
    elif isinstance(value, Mapping) and (is_section or value) and key.count(".") < MAX_LEVELS:
        # An unknown section is reported key by key.
        for name, inner in value.items():
            yield from _flatten(f"{key}.{name}", inner, where, errors, nulls)
    elif not is_section:
        errors.append(f"{prefix}: unknown key{suggest(key) if len(errors) < MAX_SUGGESTIONS else ''}")
    elif value is not None:  # a section whose keys are all commented out is fine
        errors.append(f"{prefix}: this is a section, got {format_value(value)}; {list_section(key + '.')}")
