"""Turn a configuration of EasyR1, verl or TRL into one of MTRL.

mtrl convert FILE.yaml|FILE.py [--gpus N] > run.yaml

Takes YAML of EasyR1, verl (hydra) and TRL, or a Python file with GRPOConfig(..) and GRPOTrainer(..), which is read but
not run. Prints one line per key on stderr (it maps, it differs in meaning, or it has no counterpart) and the defaults
that differ. TRL's batch sizes are per process: --gpus is the number of processes. Exit status 0: everything maps; 1:
something does not, though the YAML is written and loads; 2: the file cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mtrl.commands.load_arguments import OptionParser, whole_number
from mtrl.config.foreign_config import DIFFERS, LOST, convert

NOT_ALL = 1
OPTIONS = OptionParser(__doc__)
OPTIONS.add_argument("--gpus", type=whole_number(), default=1)


def run(arguments: Sequence[str]) -> int:
    options, files = OPTIONS.parse_paths(arguments)
    if len(files) != 1:
        OPTIONS.error(f"{len(files)} files given, one is needed")
    converted = convert(files[0], options.gpus)
    for line in converted.lines:
        print(line, file=sys.stderr)
    print(converted.yaml(), end="")
    return NOT_ALL if any(line.kind in (DIFFERS, LOST) for line in converted.lines) else 0
