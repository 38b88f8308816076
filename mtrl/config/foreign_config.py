"""Converts a configuration of EasyR1, verl or TRL to one of MTRL, and reports one line per key."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtrl.config.checks import find_conflicts
from mtrl.config.config_error import ConfigError
from mtrl.config.conversion_steps import MERGED, Converted, Lost
from mtrl.config.conversions import CONVERSIONS, KWARGS
from mtrl.config.foreign_defaults import DEFAULTS, IMPLIED, OFF, SameAs, why_unused
from mtrl.config.foreign_keys import find_counterpart
from mtrl.config.launch_words import read_flags, read_settings
from mtrl.config.load_config import build_config, escape_references
from mtrl.config.plain_values import find_endless_references, first_line, to_plain
from mtrl.config.program_keys import has_no_effect
from mtrl.config.tree import Config, known_leaves
from mtrl.config.trl_script import Script, read_script
from mtrl.config.yaml_io import BadYaml, YamlFile, read_text, read_value, write_yaml
from mtrl.utils.value_types import BadValue, format_key, format_value

MAPS, DIFFERS, LOST, DEFAULT = "maps", "another meaning", "no counterpart", "their default"
UNREAD = "could not be read"
_HYDRA = ("defaults", "hydra", "_target_", "_self_", "ray_init")
_MAPPINGS = ("reward_function_kwargs", "reward_kwargs", "engine_kwargs", "override_config")  # are values, not sections
_SELECT = re.compile(r"\$\{oc\.select:\s*([\w.]+)\s*(?:,\s*(.*?)\s*)?\}", re.DOTALL)
_ENVIRONMENT = re.compile(r"(?<!\\)\$\{\s*oc\.env\s*:[^{}]*\}")
_ESCAPED_ENVIRONMENT = re.compile(r"\\(\$\{\s*oc\.env\s*:[^{}]*\})")
MAX_REFERENCES = 500  # verl's own file has about fifty
_NEEDED = {"worker.actor.model.model_path": "model", "dataset.train_files": "training data"}
_FLAGS = {
    "EasyR1": {"model": "worker.actor.model.model_path=PATH", "training data": "data.train_files=FILE"},
    "verl": {"model": "actor_rollout_ref.model.path=PATH", "training data": "data.train_files=FILE"},
    "TRL": {"model": "--model_name_or_path PATH", "training data": "--dataset_name NAME"},
}


class ReportLine(NamedTuple):
    """The result for one foreign key."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class ConfigConverter:
    """Values of our keys, converted one by one, and a report line for each."""

    def __init__(self, project: str, flat: Mapping[str, Any], remarks: Mapping[str, str], devices: int) -> None:
        defaults = {key: _default(value, flat) for key, value in DEFAULTS[project].items() if not _is_set(key, flat)}
        self.project, self.remarks = project, remarks
        self.flat = {**flat, **defaults, "devices": devices}
        self.values: dict[str, Any] = {}
        self.lines: list[ReportLine] = []
        if devices > 1:
            self.values["training.n_gpus_per_node"] = devices
            self.lines.append(ReportLine(MAPS, f"--gpus = {devices} -> training.n_gpus_per_node = {devices}"))
        for key, value in defaults.items():
            if not why_unused(project, key, self.flat):
                self._convert(key, value, DEFAULT)
        for key, value in flat.items():
            self._convert(key, value, MAPS)
        for key, value in IMPLIED[project].items():
            if key not in self.values:
                self.values[key] = value
                self.lines.append(ReportLine(DEFAULT, f"no foreign key -> {key} = {format_value(value)}"))
        self._drop_conflicts()

    def yaml(self) -> str:
        tree: dict[str, Any] = {}
        for key in known_leaves():
            if key in self.values:
                *path, name = key.split(".")
                node = tree
                for step in path:
                    node = node.setdefault(step, {})
                node[name] = self.values[key]
        return f"# From a configuration of {self.project}.\n{write_yaml(_keep_environment(escape_references(tree)))}"

    def find_missing(self) -> list[str]:
        """What a run cannot do without: with no model or data, it would train on the embedded ones."""
        return [
            f"no {what} could be read, so nothing is written; add -- {_FLAGS[self.project][what]} to mtrl convert"
            for key, what in _NEEDED.items()
            if not self.values.get(key)
        ]

    def _report(self, kind: str, key: str, value: Any, text: str) -> None:
        self.lines.append(ReportLine(kind, f"{format_key(key)} = {format_value(value)}{text}"))

    def _convert(self, key: str, value: Any, kind: str) -> None:
        try:
            if why := why_unused(self.project, key, self.flat):
                self._report(kind, key, value, f" -> nothing: {why}")
                return
            converted = self._convert_value(key, value)
            ours = {name: self._validate(name, item) for name, item in converted.values.items()}
        except (Lost, BadValue) as error:
            self._report(LOST, key, value, f": {error}")
            return
        except _Unknown as error:
            self._report(UNREAD, key, value, f": {error}")
            return
        except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError):
            self._report(UNREAD, key, value, f": {_describe_unread(value)}")
            return
        for name, item in ours.items():
            if name.startswith(f"{KWARGS}."):
                self.values[KWARGS] = {**self.values.get(KWARGS, {}), name.removeprefix(f"{KWARGS}."): item}
            else:
                self.values[name] = item
        nothing = "merged with other keys" if converted is MERGED else "nothing to set"
        target = ", ".join(f"{name} = {format_value(item)}" for name, item in ours.items()) or nothing
        remark = converted.remark or self.remarks.get(key, "")
        self._report(DIFFERS if remark else kind, key, value, f" -> {target}{f': {remark}' if remark else ''}")

    def _convert_value(self, key: str, value: Any) -> Converted:
        if key in CONVERSIONS[self.project]:
            if value is None:  # unset there, unset here
                return Converted({})
            return CONVERSIONS[self.project][key](value, self.flat)
        entry = find_counterpart(self.project, key)
        if has_no_effect(key) or (value in (None, {}, [], "") and (entry is None or entry.startswith("none: "))):
            return Converted({})
        if entry is None and value is False and key.rpartition(".")[2] in ("enable", "enabled"):
            return Converted({})  # a feature that is off
        if entry is None:
            raise _Unknown(f"unknown key of {self.project}")
        target, _, remark = entry.partition("; ")
        if target.startswith("none: "):
            if value in (False, "", [], {}) or value in OFF.get(key, ()) or target.startswith("none: leave it out"):
                return Converted({})
            raise Lost(entry.removeprefix("none: "))
        if target == KWARGS:
            return Converted({f"{KWARGS}.{remark.removeprefix('as ')}": value})
        return Converted({} if value is None and not _takes_none(target) else {target: value})

    def _validate(self, key: str, value: Any) -> Any:
        leaf = known_leaves().get(key)
        value = value if isinstance(value, str) else to_plain(value)  # references are resolved: a `${` left is text
        try:
            return value if leaf is None else leaf.validate(value)
        except BadValue:
            if _has_environment(value):
                raise BadValue(f"{_describe_unread(value)}; set {key}") from None
            raise

    def _drop_conflicts(self) -> None:
        """Leave out values that contradict each other here, so that the result loads."""
        while conflict := next(find_conflicts(build_config(Config, self.values)), None):
            dropped = [key for key in conflict.keys if key in self.values]
            settings = " with ".join(f"{key} = {format_value(self.values.pop(key))}" for key in dropped)
            self.lines.append(ReportLine(LOST, f"{settings}: {conflict.why} (left out)"))
            if not dropped:
                raise ConfigError([f"{' with '.join(conflict.keys)}: {conflict.why}"])


class _Unknown(Exception):
    """A key that the tables do not have."""


def convert(path: str | Path, devices: int = 1, words: Sequence[str] = ()) -> ConfigConverter:
    """Convert the file to a configuration of MTRL; raise `ConfigError` if it is not one of EasyR1, verl or TRL.

    `words` is the command line of the other program: `--name value` of TRL, `key=value` of EasyR1 and verl.
    """
    try:
        text = read_text(Path(path))
        if Path(path).suffix == ".py":
            script = _check_values(read_script(text, str(path), read_flags(words)))
            project = "TRL"
        else:
            flat = dict(_flat(YamlFile(text).content, ""))
            project = _detect_project(flat)
            given = read_flags(words) if project == "TRL" else dict(_flat(read_settings(words), ""))
            script = _resolve({**flat, **given})
    except BadYaml as error:
        raise ConfigError([f"{format_key(str(path))}{error}"]) from None
    if devices > 1 and project != "TRL":
        raise ConfigError(
            [f"--gpus {devices}: {format_key(str(path))} is a file of {project}, which contains the number of GPUs"]
        )
    converter = ConfigConverter(project, script.values, script.remarks, devices)
    converter.lines += [ReportLine(UNREAD, f"{format_key(key)}: {why}") for key, why in script.unread.items()]
    return converter


def _check_values(script: Script) -> Script:
    """The script without the values that no configuration can hold."""
    for key, value in list(script.values.items()):
        try:
            if not isinstance(value, str):  # in Python, `${` is text
                to_plain(value)
        except BadValue as error:
            del script.values[key]
            script.unread[key] = str(error)
    return script


def _flat(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key. Empty mappings, and those that our key takes as a value, are leaves."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name in _HYDRA:
            continue
        if isinstance(value, dict) and value and name not in _MAPPINGS:
            yield from _flat(value, key + ".")
        else:
            yield key, value


def _detect_project(flat: Mapping[str, Any]) -> str:
    """The project that has most of the keys; verl is recognised by its section."""
    if not flat:
        raise BadYaml(": the file is empty")
    known = {name: sum(find_counterpart(name, key) is not None for key in flat) for name in CONVERSIONS}
    if any(key in known_leaves() and not key.startswith("worker.") for key in flat):
        raise BadYaml(": this is already a configuration of MTRL")
    best = max(known, key=lambda name: known[name])
    if not known[best]:
        raise BadYaml(": it contains no key of EasyR1, verl or TRL")
    return "verl" if any(key.startswith("actor_rollout_ref.") for key in flat) else best


def _resolve(flat: Mapping[str, Any]) -> Script:
    """Resolve `${a.b}` and hydra's `${oc.select:a.b,default}` within the file.

    `${oc.env:NAME}` is left as it is: its value may be secret and must not be written to a file.
    """
    flat = {key: _mask_environment(_resolve_select(key, value, flat)) for key, value in flat.items()}
    if endless := next(find_endless_references(flat, MAX_REFERENCES), None):
        raise BadYaml(f": {format_key(endless)}: its references to other keys, and theirs to others, are too many")
    tree, script = OmegaConf.create({}), Script({}, {}, {})
    for key, value in flat.items():
        try:
            OmegaConf.update(tree, key, to_plain(value), force_add=True)
        except (BadValue, OmegaConfBaseException) as error:
            script.unread[key] = first_line(error)
    for key in flat:
        if key in script.unread:
            continue
        try:
            value = OmegaConf.select(tree, key)
            is_tree = OmegaConf.is_config(value)
            script.values[key] = _unmask(OmegaConf.to_container(value, resolve=True) if is_tree else value)
        except (OmegaConfBaseException, RecursionError) as error:
            script.unread[key] = f"cannot be resolved: {first_line(error)}"
    return script


def _resolve_select(key: str, value: Any, flat: Mapping[str, Any]) -> Any:
    """The reference or the default of `${oc.select:a.b,default}`, where the default may be another one."""
    for _ in range(8):
        match = _SELECT.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            break
        name = f"{key.rpartition('.')[0]}{match[1]}" if match[1].startswith(".") else match[1]
        if name in flat:
            return f"${{{name}}}"
        default = match[2] or "null"
        value = default if "${" in default else read_value(default)
    return value


_MASK = "\ue000", "\ue001"  # private characters around the `${oc.env:..}` that OmegaConf must not resolve


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _map_texts(item, change) for name, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _mask_environment(value: Any) -> Any:
    return _map_texts(value, lambda text: _ENVIRONMENT.sub(lambda m: f"{_MASK[0]}{m[0][2:-1]}{_MASK[1]}", text))


def _unmask(value: Any) -> Any:
    return _map_texts(value, lambda text: text.replace(_MASK[0], "${").replace(_MASK[1], "}"))


def _keep_environment(value: Any) -> Any:
    """Undo the escape of `${oc.env:..}`, which a run resolves when it starts."""
    return _map_texts(value, lambda text: _ESCAPED_ENVIRONMENT.sub(r"\1", text))


def _has_environment(value: Any) -> bool:
    return isinstance(value, str) and _ENVIRONMENT.search(value) is not None


def _describe_unread(value: Any) -> str:
    return "the value is in the environment, not in the file" if _has_environment(value) else "the value is unknown"


def _default(value: Any, flat: Mapping[str, Any]) -> Any:
    return flat.get(value.key, value.otherwise) if isinstance(value, SameAs) else value


def _is_set(key: str, flat: Mapping[str, Any]) -> bool:
    """Whether the file sets the key, or another key with the same meaning."""
    others = {
        "worker.actor.optim.lr_warmup_ratio": ("worker.actor.optim.lr_warmup_steps",),
        "worker.critic.optim.lr_warmup_ratio": ("worker.critic.optim.lr_warmup_steps",),
        "critic.optim.lr_warmup_steps": ("critic.optim.lr_warmup_steps_ratio",),
        "actor_rollout_ref.actor.optim.lr_warmup_steps": ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",),
        "trainer.total_epochs": ("trainer.total_episodes",),
        "warmup_steps": ("warmup_ratio",),
    }
    return any(flat.get(name) is not None for name in (key, *others.get(key, ())))


def _takes_none(key: str) -> bool:
    leaf = known_leaves()[key]
    try:
        leaf.validate(None)
    except BadValue:
        return False
    return True
