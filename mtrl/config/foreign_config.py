"""A configuration of EasyR1, verl or TRL as one of MTRL, and a line for each of its keys: what became of it."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtrl.config.checks import conflicts
from mtrl.config.config_error import ConfigError
from mtrl.config.conversions import CONVERSIONS, TAKEN, Converted, Lost
from mtrl.config.foreign_defaults import ALWAYS, DEFAULTS, OFF, Same, idle
from mtrl.config.foreign_keys import counterpart, without_effect
from mtrl.config.load_config import build, without_interpolation
from mtrl.config.plain_values import endless, first_line, plain
from mtrl.config.tree import Config, known_leaves
from mtrl.config.trl_script import Script, read_script
from mtrl.config.value_types import BadValue, printable, shown, typed
from mtrl.config.yaml_io import BadYaml, YamlFile, read_text, read_value, write_yaml

MAPS, DIFFERS, LOST, DEFAULT = "maps", "another meaning", "no counterpart", "their default"
KWARGS = "worker.rollout.engine_kwargs"
_HYDRA = ("defaults", "hydra", "_target_", "_self_", "ray_init")
_WHOLE = ("reward_function_kwargs", "reward_kwargs", "engine_kwargs", "override_config")  # mappings that are values
_SELECT = re.compile(r"\$\{oc\.select:\s*([\w.]+)\s*(?:,\s*([^{}]*?)\s*)?\}")
MOST_REFERENCES = 500  # verl's own file has some fifty


class ReportLine(NamedTuple):
    """What became of one key of theirs."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class ConfigConverter:
    """Values of our keys, filled key by key, and what is to be said of each."""

    def __init__(self, project: str, flat: Mapping[str, Any], remarks: Mapping[str, str], devices: int) -> None:
        defaults = {key: _default(value, flat) for key, value in DEFAULTS[project].items() if not _said(key, flat)}
        self.project, self.given, self.remarks = project, dict(flat), remarks
        self.flat = {**flat, **defaults, "devices": devices}
        self.values: dict[str, Any] = {}
        self.lines: list[ReportLine] = []
        if devices > 1:
            self.values["training.n_gpus_per_node"] = devices
            self.lines.append(ReportLine(MAPS, f"--gpus = {devices} -> training.n_gpus_per_node = {devices}"))
        for key, value in defaults.items():
            if not idle(project, key, self.flat):
                self._take(key, value, DEFAULT)
        for key, value in self.given.items():
            self._take(key, value, MAPS)
        for key, value in ALWAYS[project].items():
            if key not in self.values:
                self.values[key] = value
                self.lines.append(ReportLine(DEFAULT, f"no key for it -> {key} = {shown(value)}"))
        self._settle()

    def yaml(self) -> str:
        tree: dict[str, Any] = {}
        for key in known_leaves():
            if key in self.values:
                *path, name = key.split(".")
                node = tree
                for step in path:
                    node = node.setdefault(step, {})
                node[name] = self.values[key]
        return f"# From a configuration of {self.project}.\n{write_yaml(without_interpolation(tree))}"

    def _say(self, kind: str, key: str, value: Any, text: str) -> None:
        self.lines.append(ReportLine(kind, f"{printable(key)} = {shown(value)}{text}"))

    def _take(self, key: str, value: Any, kind: str) -> None:
        try:
            if why := idle(self.project, key, self.flat):
                self._say(kind, key, value, f" -> nothing: {why}")
                return
            found = self._converted(key, value)
            ours = {name: self._fitting(name, item) for name, item in found.values.items()}
        except (Lost, BadValue) as error:
            self._say(LOST, key, value, f": {error}")
            return
        except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError):
            self._say(LOST, key, value, ": the value is none that is known there")
            return
        for name, item in ours.items():
            self._set(name, item)
        nothing = "taken together with other keys" if found is TAKEN else "nothing to set"
        told = ", ".join(f"{name} = {shown(item)}" for name, item in ours.items()) or nothing
        remark = found.differs or self.remarks.get(key, "")
        self._say(DIFFERS if remark else kind, key, value, f" -> {told}{f': {remark}' if remark else ''}")

    def _converted(self, key: str, value: Any) -> Converted:
        if key in CONVERSIONS[self.project]:
            if value is None:  # what they leave unset is unset here
                return Converted({})
            return CONVERSIONS[self.project][key](value, self.flat)
        answer = counterpart(self.project, key)
        if without_effect(key) or (value in (None, {}, [], "") and (answer is None or answer.startswith("none: "))):
            return Converted({})
        if answer is None:
            raise Lost(f"no key of {self.project} that is known here")
        target, _, remark = answer.partition("; ")
        if target.startswith("none: "):
            if value in (False, "", [], {}) or value in OFF.get(key, ()) or target.startswith("none: leave it out"):
                return Converted({})
            raise Lost(answer.removeprefix("none: "))
        if target == KWARGS:
            return Converted({f"{KWARGS}.{remark.removeprefix('as ')}": value})
        return Converted({} if value is None and not _takes_none(target) else {target: value})

    def _fitting(self, key: str, value: Any) -> Any:
        leaf = known_leaves().get(key)
        value = _plain(value)
        return value if leaf is None else typed(value, leaf.annotation, leaf.within)

    def _set(self, key: str, value: Any) -> None:
        if key.startswith(f"{KWARGS}."):
            self.values[KWARGS] = {**self.values.get(KWARGS, {}), key.removeprefix(f"{KWARGS}."): value}
        else:
            self.values[key] = value

    def _settle(self) -> None:
        """What cannot stand together here is left out, so that the result loads."""
        while wrong := next(conflicts(build(Config, self.values)), None):
            dropped = [key for key in wrong.keys if key in self.values]
            told = " with ".join(f"{key} = {shown(self.values.pop(key))}" for key in dropped)
            self.lines.append(ReportLine(LOST, f"{told}: {wrong.why} (left out)"))
            if not dropped:
                raise ConfigError([f"{' with '.join(wrong.keys)}: {wrong.why}"])


def convert(path: str | Path, devices: int = 1) -> ConfigConverter:
    """The file as a configuration of MTRL; `ConfigError` where it is none of EasyR1, verl or TRL."""
    try:
        text = read_text(Path(path))
        if Path(path).suffix == ".py":
            script = read_script(text, str(path))
            project = "TRL"
        else:
            flat = dict(_flat(YamlFile(text).content, ""))
            project = _project(flat)
            script = _resolved(flat)
    except BadYaml as error:
        raise ConfigError([f"{printable(str(path))}{error}"]) from None
    if devices > 1 and project != "TRL":
        raise ConfigError([f"--gpus {devices}: {printable(str(path))} is one of {project}, which says that itself"])
    converter = ConfigConverter(project, script.values, script.remarks, devices)
    converter.lines += [ReportLine(LOST, f"{printable(key)}: {why}") for key, why in script.unread.items()]
    return converter


def _flat(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key. Empty mappings are leaves, and so are those that a key of ours takes whole."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name in _HYDRA:
            continue
        if isinstance(value, dict) and value and name not in _WHOLE:
            yield from _flat(value, key + ".")
        else:
            yield key, value


def _project(flat: Mapping[str, Any]) -> str:
    """The project that knows most of the keys; verl by its own section."""
    if not flat:
        raise BadYaml(": nothing is set in it")
    known = {name: sum(counterpart(name, key) is not None for key in flat) for name in CONVERSIONS}
    if any(key in known_leaves() and not key.startswith("worker.") for key in flat):
        raise BadYaml(": it is one of MTRL already")
    best = max(known, key=lambda name: known[name])
    if not known[best]:
        raise BadYaml(": no key of EasyR1, verl or TRL is in it")
    return "verl" if any(key.startswith("actor_rollout_ref.") for key in flat) else best


def _resolved(flat: Mapping[str, Any]) -> Script:
    """`${a.b}` and `${oc.select:a.b,default}` of hydra, in the words of the file itself."""
    flat = {key: _selected(value, flat) for key, value in flat.items()}
    if wrong := next(endless(flat, MOST_REFERENCES), None):
        raise BadYaml(f": {printable(wrong)}: refers to other keys, and those to others, too often to be written out")
    tree, script = OmegaConf.create({}), Script({}, {}, {})
    for key, value in flat.items():
        try:
            OmegaConf.update(tree, key, plain(value), force_add=True)
        except (BadValue, OmegaConfBaseException) as error:
            script.unread[key] = first_line(error)
    for key in flat:
        if key in script.unread:
            continue
        try:
            value = OmegaConf.select(tree, key)
            is_tree = OmegaConf.is_config(value)
            script.values[key] = OmegaConf.to_container(value, resolve=True) if is_tree else value
        except (OmegaConfBaseException, RecursionError) as error:
            script.unread[key] = f"cannot be resolved: {first_line(error)}"
    return script


def _selected(value: Any, flat: Mapping[str, Any]) -> Any:
    found = _SELECT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    return f"${{{found[1]}}}" if found[1] in flat else read_value(found[2] or "null")


def _default(value: Any, flat: Mapping[str, Any]) -> Any:
    return flat.get(value.key, value.otherwise) if isinstance(value, Same) else value


def _said(key: str, flat: Mapping[str, Any]) -> bool:
    """Whether the file says a default itself, by that key or by another for the same thing."""
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
        typed(None, leaf.annotation, leaf.within)
    except BadValue:
        return False
    return True


def _plain(value: Any) -> Any:
    """The value as a configuration holds it; references were resolved before, so a `${` that is left is text."""
    return value if isinstance(value, str) else plain(value)
