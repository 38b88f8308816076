"""`mtrl export`: a trained model for everybody else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mtrl.commands.load_arguments import run_and_checkpoint, say, started, take_option
from mtrl.compose.export_model import ExportSource, check_push, check_target, export, push
from mtrl.config import ConfigError

USAGE = "mtrl export RUN|CHECKPOINT --to DIR [--dtype bf16|fp32] [--push ORG/NAME]"
EXPORTED_DTYPES = ("bf16", "fp32")


def run(arguments: Sequence[str]) -> int:
    to, words = take_option(arguments, "--to", "name a new directory")
    repository, words = take_option(words, "--push", "name a repository: ORG/NAME")
    dtype, words = take_option(words, "--dtype", f"one of {', '.join(EXPORTED_DTYPES)}")
    if len(words) != 1 or words[0].startswith("-"):
        strange = [word for word in words if word.startswith("-")] or words[1:]
        raise ConfigError([f"{strange[0]}: what is that? {USAGE}" if strange else f"which model? {USAGE}"])
    if to is None:
        raise ConfigError([f"--to: where to? {USAGE}"])
    if dtype is not None and dtype not in EXPORTED_DTYPES:
        raise ConfigError([f"--dtype: {dtype}; there are {', '.join(EXPORTED_DTYPES)}"])
    target = Path(to).expanduser()
    started(check_target, target)
    if repository is not None:
        check_push(repository)
    source = started(ExportSource.of, *run_and_checkpoint(words[0]))
    chosen = dtype or started(partial(getattr, source, "dtype"))
    started(export, source, target, chosen, repository or target.absolute().name, say)
    address = None if repository is None else push(target, repository)
    print(json.dumps({"export": str(target), "checkpoint": str(source.checkpoint), "dtype": chosen, "pushed": address}))
    return 0
