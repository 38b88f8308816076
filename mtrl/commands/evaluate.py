"""Measure accuracy and rewards of a checkpoint, or of a run's newest one: avg@k, pass@k, by column.

mtrl eval CHECKPOINT|RUN [--data FILE] [--out FILE] [a.b=c ...]

worker.rollout.val.n and .temperature set how responses are sampled. --out writes every question, answer and response
with its scores, as JSONL. optimization.compute_attention_metrics=true measures attention too, which takes longer. The
last line is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mtrl.commands.load_arguments import OptionParser, check_call, check_new_file, load_evaluation_config, log_line
from mtrl.compose.run import evaluate
from mtrl.data.parallel import Progress
from mtrl.tracking.jsonl import as_line
from mtrl.training.validation import OnBatch, Result
from mtrl.types import Rewards, Rollouts

DEFAULT_ATTENTION = "optimization.compute_attention_metrics=auto"
OPTIONS = OptionParser(__doc__, "--data", "--out")


def run(arguments: Sequence[str]) -> int:
    options, path, overrides = OPTIONS.parse_path(arguments, "which model?")
    out = check_new_file(options.out) if options.out else None
    # Comes first, so that it undoes the setting of the run but not that of the user.
    config = load_evaluation_config(path, [DEFAULT_ATTENTION, *overrides], options.data)
    result = check_call(evaluate, config, partial(watch_progress, out, config.worker.rollout.val.n))
    if out is not None:
        log_line(f"responses: {out}")
    print(_format_table(result))
    print(json.dumps({"checkpoint": config.worker.actor.model.model_path, **result.metrics, "by": result.by}))
    return 0


@contextmanager
def watch_progress(file: Path | None, responses: int, prompts: int) -> Iterator[OnBatch]:
    """Show the progress, and write every response to the file."""
    log_line(f"evaluating {prompts} prompts, {responses} response{'s' if responses > 1 else ''} each")
    with ExitStack() as opened:
        out = None if file is None else opened.enter_context(file.open("x", encoding="utf-8"))
        progress = opened.enter_context(Progress(prompts, "evaluating"))

        def seen(rollouts: Rollouts, rewards: Rewards) -> None:
            if out is not None:
                out.writelines(map(as_line, response_rows(rollouts, rewards)))
                out.flush()
            progress.add(len(rollouts.prompts))

        yield seen


def response_rows(rollouts: Rollouts, rewards: Rewards) -> Iterator[Mapping[str, Any]]:
    for row, group in enumerate(rollouts.group.tolist()):
        task = rollouts.prompts[group].task
        yield {
            "id": task.id,
            "question": task.text,
            "answer": task.answer,
            "response": rollouts.text[row],
            "reward": rewards.total[row].item(),
            "rewards": {name: part[row].item() for name, part in rewards.parts.items()},
            "failed": bool(rewards.failed[row]),
            "tokens": int(rollouts.mask[row].sum()),
            "finish": rollouts.finish_reason[row],
        }


def _format_table(result: Result) -> str:
    metrics = {name.removeprefix("val/"): value for name, value in result.metrics.items()}
    width = max(24, *map(len, metrics))
    lines = [f"{name:<{width}} {value:8.4f}" for name, value in metrics.items()]
    for column, table in result.by.items():
        lines += ["", f"by {column}", *(f"  {value:<{width - 2}} {rate:8.4f}" for value, rate in table.items())]
    return "\n".join(lines)
