"""Small helpers for tests of the configuration."""

from pathlib import Path
from typing import Any

import pytest

from mtrl.config import Config, ConfigError, load_config


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def get_errors(path: Path | None = None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.errors


def only_error(*overrides: str) -> str:
    errors = get_errors(None, *overrides)
    assert len(errors) == 1, errors
    return errors[0]


def get_value(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name)
    return node
