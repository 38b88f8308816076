"""Code that a user brings to a rule, by `file.py:name` or `module:name`."""

from __future__ import annotations

from typing import Any

from mtrl.plugins import PluginError, load_plugin


def load_own(spec: str, what: str) -> Any:
    """The object that `spec` names; PluginError says in one line what is wrong, also where the file itself raises."""
    try:
        return load_plugin(spec, what)
    except PluginError:
        raise
    except Exception as error:  # whatever the user's file raises
        raise PluginError(f"{spec} cannot be loaded: {type(error).__name__}: {error}") from error
