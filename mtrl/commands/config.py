"""`mtrl config`: the resolved configuration, what its keys mean, and the packaged ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mtrl.config import ConfigError, load_config, take_file, to_yaml, warnings
from mtrl.config.explain import explain
from mtrl.config.packaged import listing

EXPLAIN = "explain"


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] == [EXPLAIN]:
        if len(arguments) > 2:
            raise ConfigError([f"{' '.join(arguments[2:])}: one key at a time; mtrl config {EXPLAIN} KEY"])
        print(explain(arguments[1] if len(arguments) == 2 else None))
        return 0
    if "--list" in arguments:
        print(listing())
        return 0
    file, overrides = take_file(arguments)
    resolved = load_config(file, overrides)
    for warning in warnings(resolved):
        print(f"warning: {warning}", file=sys.stderr)
    print(to_yaml(resolved), end="")
    return 0
