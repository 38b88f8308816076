"""Measure what the tools of an environment are worth: the same questions with and without them.

mtrl tools RUN|CHECKPOINT [RUN|CHECKPOINT ...] [--data FILE] [a.b=c ...]

For every checkpoint of each run: accuracy with tools, without (the prompt describes none), and with tools whose images
are blank; the difference of the first two as gain (right with tools, wrong without) minus harm (the reverse); calls per
response, their errors, and the share of responses without tools that call one all the same. worker.rollout.val.n and
.temperature set how responses are sampled. The last line is JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mtrl.checkpoint.folder_store import list_checkpoints
from mtrl.commands.load_arguments import OptionParser, check_call, load_evaluation_config, log_line
from mtrl.compose.tool_gain import ToolGain, measure_tool_gain
from mtrl.report.markdown_text import table

HEADS = ("checkpoint", "with", "without", "blank", "difference", "gain", "harm", "calls", "errors", "unanswered")
NO_ATTENTION = "optimization.compute_attention_metrics=false"  # a second pass over every response
OPTIONS = OptionParser(__doc__, "--data")


def run(arguments: Sequence[str]) -> int:
    options, others = OPTIONS.parse_paths(arguments)
    overrides = [argument for argument in others if "=" in argument and not os.path.exists(argument)]
    paths = [each for path in others if path not in overrides for each in find_models(path)]
    if not paths:
        OPTIONS.error("which run?")
    overrides = [NO_ATTENTION, *overrides]
    configs = {path: load_evaluation_config(path, overrides, options.data) for path in paths}
    measured: dict[str, ToolGain] = {}
    for path, config in configs.items():
        log_line(f"evaluating {path}")
        measured[path] = check_call(measure_tool_gain, config)
    print(table(HEADS, [make_row(path, gain) for path, gain in measured.items()]))
    print(json.dumps({path: asdict(gain) for path, gain in measured.items()}))
    return 0


def find_models(path: str) -> list[str]:
    """All checkpoints of a run; of anything else the path itself."""
    checkpoints = list_checkpoints(Path(path, "checkpoints"))
    return [str(each) for each in checkpoints] or [path]


def make_row(path: str, gain: ToolGain) -> list[str]:
    difference = gain.with_tools - gain.without
    rates = (gain.with_tools, gain.without, gain.blank, difference, gain.gain, gain.harm)
    calls = (gain.calls, gain.errors, gain.unanswered)
    return [path, *(f"{rate:.3f}" for rate in (*rates, *calls))]
