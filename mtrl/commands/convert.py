"""`mtrl convert`: a configuration of EasyR1, verl or TRL as one of MTRL, and what became of each of its keys."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mtrl.config import ConfigError
from mtrl.config.foreign_config import DIFFERS, LOST, convert

NOT_ALL = 1
USAGE = "mtrl convert FILE.yaml|FILE.py [--gpus N] > run.yaml"


def run(arguments: Sequence[str]) -> int:
    files, gpus = _read(arguments)
    if len(files) != 1:
        raise ConfigError([f"{len(files)} files given; {USAGE}"])
    converted = convert(files[0], gpus)
    for line in converted.lines:
        print(line, file=sys.stderr)
    print(converted.yaml(), end="")
    return NOT_ALL if any(line.kind in (DIFFERS, LOST) for line in converted.lines) else 0


def _read(arguments: Sequence[str]) -> tuple[list[str], int]:
    """The files, and the processes that TRL's batch sizes are for."""
    words, files, gpus = iter(arguments), [], 1
    for word in words:
        if word.split("=")[0] != "--gpus":
            files.append(word)
            continue
        given = word.partition("=")[2] or next(words, "")
        if not given.isdecimal() or not 1 <= int(given) <= 100_000:
            raise ConfigError([f"--gpus {given}: expected a whole number of at least 1; {USAGE}"])
        gpus = int(given)
    return files, gpus
