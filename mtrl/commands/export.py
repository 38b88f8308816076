"""Write a run's newest checkpoint, or any, as a model that other tools load, with a card.

mtrl export RUN|CHECKPOINT --to DIR [--dtype bf16|fp32] [--push ORG/NAME]

Writes safetensors with tokenizer, processor and generation settings, with merged adapters, and a model card
(README.md): the run's configuration, curves, data, rewards and samples. --dtype defaults to the dtype in which the run
computed. DIR is new or empty. --push uploads it to the Hugging Face hub; a repository that does not exist yet is
created private. The last line is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mtrl.commands.export_model import ExportSource, check_push, check_target, export, push
from mtrl.commands.load_arguments import OptionParser, check_call, find_run_and_checkpoint, log_line

OPTIONS = OptionParser(__doc__, "--to", "--push")
OPTIONS.add_argument("--dtype", choices=("bf16", "fp32"))


def run(arguments: Sequence[str]) -> int:
    options, paths = OPTIONS.parse_paths(arguments)
    if len(paths) != 1:
        OPTIONS.error(f"{paths[1]}: name one model" if paths else "which model?")
    if options.to is None:
        OPTIONS.error("--to: name a new directory")
    target = Path(options.to).expanduser()
    check_call(check_target, target)
    if options.push is not None:
        check_push(options.push)
    source = check_call(ExportSource.of, *find_run_and_checkpoint(paths[0]))
    dtype = options.dtype or check_call(partial(getattr, source, "dtype"))
    check_call(export, source, target, dtype, options.push or target.absolute().name, log_line)
    url = None if options.push is None else push(target, options.push)
    print(json.dumps({"export": str(target), "checkpoint": str(source.checkpoint), "dtype": dtype, "pushed": url}))
    return 0
