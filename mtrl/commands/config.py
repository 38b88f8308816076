"""`mtrl config`: the resolved configuration, what its keys mean, and the packaged ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mtrl.config import ConfigError, load_config, take_file, to_yaml, warnings
from mtrl.config.explain import explain
from mtrl.config.packaged import listing

EXPLAIN = "explain"


def run(words: Sequence[str]) -> int:
    if words[:1] == [EXPLAIN]:
        if len(words) > 2:
            raise ConfigError([f"{' '.join(words[2:])}: one key at a time; mtrl config {EXPLAIN} KEY"])
        print(explain(words[1] if len(words) == 2 else None))
        return 0
    if "--list" in words:
        print(listing())
        return 0
    file, overrides = take_file(words)
    resolved = load_config(file, overrides)
    for warning in warnings(resolved):
        print(f"warning: {warning}", file=sys.stderr)
    print(to_yaml(resolved), end="")
    return 0
