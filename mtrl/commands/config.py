"""Print the resolved configuration, or explain a key.

mtrl config [FILE] [a.b=c ...]
mtrl config explain [KEY]
mtrl config --list

FILE is YAML over the defaults: your own, or one of the packaged files that --list prints. Overrides are a.b=c, --a.b=c
or --a.b c, with values in YAML: null, true, [x, y].
explain (or --help KEY) prints what a key means and takes, whether a resumed run may change it, and its names in EasyR1,
verl and TRL; for a section (worker.reward) one line per key, and without a KEY all sections.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mtrl.config import find_warnings, load_config, take_file, to_yaml
from mtrl.config.explain import explain
from mtrl.config.packaged import list_configs
from mtrl.utils.errors import StartError


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["explain"]:
        if len(arguments) > 2:
            raise StartError(f"{' '.join(arguments[2:])}: one key at a time; mtrl config explain KEY")
        print(explain(arguments[1] if len(arguments) == 2 else None))
        return 0
    if "--list" in arguments:
        print(list_configs())
        return 0
    file, overrides = take_file(arguments)
    resolved = load_config(file, overrides)
    for warning in find_warnings(resolved):
        print(f"warning: {warning}", file=sys.stderr)
    print(to_yaml(resolved), end="")
    return 0
