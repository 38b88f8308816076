"""Objects that a configuration names: a built-in one by its name, a user's by `file.py:Name` or `module:Name`.

Each is a dataclass; its fields are the arguments that the configuration may set, checked against their annotations.
An object of a user's class is pickled as its spec and its arguments, so that other processes load the same file.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, Generic, TypeVar, get_type_hints

from mtrl.utils.plugins import PluginError, find_line, load_user_object, split_spec
from mtrl.utils.value_types import BadValue, validate

T = TypeVar("T")
Spec = str | Mapping[str, Any]  # name, file.py:Name, or {name: .., and arguments}


def spec_name(spec: Spec) -> str | None:
    """The name in a spec, if it has one."""
    name = spec if isinstance(spec, str) else spec.get("name")
    return name if isinstance(name, str) else None


@dataclass(frozen=True)
class Registry(Generic[T]):
    what: str  # what the objects are, for messages: "credit rule"
    bases: tuple[type, ...]  # a user's class is derived from one of them
    builtin: Mapping[str, type[T]]
    frozen: bool = True  # whether its class must be frozen: it has no state

    def make(self, spec: Spec, offered: Mapping[str, Any] | None = None) -> T:
        """Make the object of a spec; PluginError says what is wrong. `offered` are the values of fields that the spec
        does not set: hyperparameters under the names of their keys, or parts of the run."""
        name, arguments = spec_name(spec), {} if isinstance(spec, str) else dict(spec)
        if name is None:
            raise PluginError(f"{spec}: the name of the {self.what} is missing; write {{name: .., and its arguments}}")
        arguments.pop("name", None)
        kind: Any = self.find(name)
        new_names = {f.metadata["old_name"]: f.name for f in fields(kind) if "old_name" in f.metadata}
        arguments = {new_names.get(key, key): value for key, value in arguments.items()}
        parameters = [f.name for f in fields(kind) if f.init]
        if unknown := sorted(arguments.keys() - set(parameters)):
            known = ", ".join(parameters) or "none"
            raise PluginError(f"{name} takes no {', '.join(unknown)}; its arguments are {known}")
        values = {key: tuple(x) if isinstance(x, list) else x for key, x in arguments.items()}
        values = {key: value for key, value in (offered or {}).items() if key in parameters} | values
        check_arguments(name, kind, {key: values[key] for key in arguments})
        try:
            made: T = kind(**values)
        except Exception as error:  # an argument without a default, an abstract method, or the user's own code
            known = "" if isinstance(error, TypeError) else f"{type(error).__name__}: "
            raise PluginError(f"{name}: {known}{error}{find_line(error, split_spec(name)[0])}") from error
        return made

    def takes(self, spec: Spec, argument: str) -> bool:
        """Whether the class of a spec has a field of that name that the spec leaves open."""
        kind: Any = self.find(spec_name(spec) or "")
        is_set = not isinstance(spec, str) and argument in spec
        return not is_set and argument in {f.name for f in fields(kind) if f.init}

    def find(self, name: str) -> type[T]:
        """The class of that name."""
        if ":" in name:
            return self._load(name)
        if name in self.builtin:
            return self.builtin[name]
        close = get_close_matches(name, self.builtin, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        known = f"; there are {', '.join(self.builtin)}" if self.builtin else ""
        raise PluginError(f"there is no {self.what} {name}{hint}{known}; yours is file.py:Name")

    def _load(self, spec: str) -> type[T]:
        kind: Any = load_user_object(spec, self.what)
        fits = isinstance(kind, type) and issubclass(kind, self.bases) and is_dataclass(kind)
        if not fits or (self.frozen and not kind.__dataclass_params__.frozen):
            bases = " or a ".join(", a ".join(base.__name__ for base in self.bases).rsplit(", a ", 1))
            dataclass = "frozen dataclass" if self.frozen else "dataclass"
            raise PluginError(f"{spec} is no {self.what}: it must be a {dataclass} and a {bases}")
        copyreg.pickle(kind, partial(_reduce, spec=spec, what=self.what))
        return kind


def _reduce(made: Any, spec: str, what: str) -> tuple[Any, ...]:
    return _restore, (spec, what, {f.name: getattr(made, f.name) for f in fields(made) if f.init})


def _restore(spec: str, what: str, values: dict[str, Any]) -> Any:
    return _load_once(spec, what)(**values)


@cache
def _load_once(spec: str, what: str) -> Any:
    """The class of an object that arrived from another process. A loss arrives with every update, and loading runs the
    whole file."""
    kind = load_user_object(spec, what)
    copyreg.pickle(kind, partial(_reduce, spec=spec, what=what))  # it may travel on
    return kind


def check_arguments(name: str, kind: type, values: Mapping[str, Any]) -> None:
    """Check values against the annotations of the fields, as far as a configuration can have such a type."""
    hints = get_type_hints(kind)
    for key, value in values.items():
        try:
            validate(value, hints[key], None)
        except BadValue as error:
            raise PluginError(f"{name}: {key}: {error}") from error
        except TypeError:  # an annotation that no key has
            continue
