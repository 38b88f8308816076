"""Code that a user brings to a rule, by `file.py:name` or `module:name`."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from mtrl.algorithms.credit.rule import Bonus, Filter, Weight
from mtrl.utils.plugins import PluginError, load_plugin


def load_own(spec: str, what: str) -> Any:
    """The object that `spec` names; PluginError says in one line what is wrong, also where the file itself raises."""
    try:
        return load_plugin(spec, what)
    except PluginError:
        raise
    except Exception as error:  # whatever the user's file raises
        raise PluginError(f"{spec} cannot be loaded: {type(error).__name__}: {error}") from error


def load_rule(spec: str) -> Any:
    """The class of a rule."""
    kind: Any = load_own(spec, "credit rule")
    fits = isinstance(kind, type) and issubclass(kind, (Filter, Weight, Bonus)) and is_dataclass(kind)
    if not fits or not kind.__dataclass_params__.frozen:
        raise PluginError(f"{spec} is no credit rule: it must be a frozen dataclass and a Filter, a Weight or a Term")
    return kind
