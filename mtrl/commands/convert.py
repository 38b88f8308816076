"""Turn a configuration of EasyR1, verl or TRL into one of MTRL.

mtrl convert FILE.yaml|FILE.py [--gpus N] [-- WORDS ..] > run.yaml

Takes YAML of EasyR1, verl (hydra) and TRL, or a Python file with GRPOConfig(..) and GRPOTrainer(..), which is read but
not run. WORDS is the command line of the other program: --name value of TRL, key=value of EasyR1 and verl. Prints one
line per key on stderr (it maps, it differs in meaning, it has no counterpart, or it could not be read) and the defaults
that differ. TRL's batch sizes are per process: --gpus is the number of processes. Exit status 0: everything maps; 1:
something does not, though the YAML is written and loads; 2: nothing is written, since the file cannot be read or has no
model or no data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mtrl.commands.load_arguments import OptionParser, whole_number
from mtrl.config import ConfigError
from mtrl.config.foreign_config import DIFFERS, LOST, UNREAD, convert
from mtrl.utils.value_types import format_key

NOT_ALL = 1
OPTIONS = OptionParser(__doc__)
OPTIONS.add_argument("--gpus", type=whole_number(), default=1)


def run(arguments: Sequence[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, files = OPTIONS.parse_paths(arguments[:split])
    if len(files) != 1:
        OPTIONS.error(f"{len(files)} files given, one is needed")
    converted = convert(files[0], options.gpus, arguments[split + 1 :])
    for line in converted.lines:
        print(line, file=sys.stderr)
    if missing := converted.find_missing():
        raise ConfigError([f"{format_key(files[0])}: {message}" for message in missing])
    print(converted.yaml(), end="")
    return NOT_ALL if any(line.kind in (DIFFERS, LOST, UNREAD) for line in converted.lines) else 0
