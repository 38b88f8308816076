"""Loads the code that a user names in the configuration, by `file.py:Name` or `module:Name`."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from mtrl.algorithms.credit.rule import Bonus, Filter, Weight
from mtrl.utils.plugins import PluginError, load_plugin


def load_user_object(spec: str, what: str) -> Any:
    """Load the object that `spec` names; PluginError says in one line what is wrong, even if the file itself raises."""
    try:
        return load_plugin(spec, what)
    except PluginError:
        raise
    except Exception as error:  # anything the user's file raises
        raise PluginError(f"{spec} cannot be loaded: {type(error).__name__}: {error}") from error


def load_rule(spec: str) -> Any:
    """Load the class of a rule."""
    kind: Any = load_user_object(spec, "credit rule")
    fits = isinstance(kind, type) and issubclass(kind, (Filter, Weight, Bonus)) and is_dataclass(kind)
    if not fits or not kind.__dataclass_params__.frozen:
        raise PluginError(f"{spec} is no credit rule: it must be a frozen dataclass and a Filter, a Weight or a Bonus")
    return kind
