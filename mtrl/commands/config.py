"""Print the resolved configuration, or explain a key or a metric.

mtrl config [FILE] [a.b=c ...] [--origin]
mtrl config explain [KEY | METRIC]
mtrl config --list

FILE is YAML over the defaults: your own, or one of the packaged files that --list prints. It may inherit from others
(base: grpo.yaml). Overrides are a.b=c, --a.b=c or --a.b c, with values in YAML: null, true, [x, y].
--origin prints one line per key, with the file and line that the value comes from.
explain (or --help KEY) prints what a key means and takes, whether a resumed run may change it, and its names in EasyR1,
verl and TRL; for a section (worker.reward) one line per key, and without a KEY all sections. For a metric of
metrics.jsonl (actor/entropy) it prints what it measures, its unit and how to read it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter

from mtrl.config import Config, find_warnings, load_config, take_file, to_yaml
from mtrl.config.explain import explain
from mtrl.config.load_config import escape_references, find_origins
from mtrl.config.packaged import list_configs
from mtrl.config.tree import known_leaves
from mtrl.config.yaml_io import to_inline_yaml
from mtrl.utils.errors import StartError

MAX_COLUMN = 70  # where the comments begin at the latest, except behind longer values


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["explain"]:
        if len(arguments) > 2:
            raise StartError(f"{' '.join(arguments[2:])}: one key at a time; mtrl config explain KEY")
        print(explain(arguments[1] if len(arguments) == 2 else None))
        return 0
    if "--list" in arguments:
        print(list_configs())
        return 0
    file, overrides = take_file([argument for argument in arguments if argument != "--origin"])
    resolved = load_config(file, overrides)
    for warning in find_warnings(resolved):
        print(f"warning: {warning}", file=sys.stderr)
    print(show_origins(resolved, file, overrides) if "--origin" in arguments else to_yaml(resolved), end="")
    return 0


def show_origins(config: Config, file: str | None, overrides: Sequence[str]) -> str:
    """YAML with one dotted key per line, and where its value comes from as a comment."""
    origins = find_origins(file, overrides)
    lines = [
        (f"{key}: {to_inline_yaml(escape_references(attrgetter(key)(config)))}", origins.get(key, "default"))
        for key in known_leaves()
    ]
    width = max(len(text) for text, _ in lines if len(text) <= MAX_COLUMN)
    return "".join(f"{text:<{width}}  # {origin}\n" for text, origin in lines)
