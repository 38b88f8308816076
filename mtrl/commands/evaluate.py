"""`mtrl eval`: accuracy and rewards of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mtrl.commands.load_arguments import evaluation_config, say, started, take_option, take_path_and_data
from mtrl.compose.run import evaluate
from mtrl.config import ConfigError, given_keys
from mtrl.data.parallel import Progress
from mtrl.tracking.jsonl import as_line
from mtrl.training.validation import Result, Seen
from mtrl.types import Rewards, Rollouts

ATTENTION = "optimization.compute_attention_metrics"


def run(arguments: Sequence[str]) -> int:
    out, others = take_option(arguments, "--out", "name a file for the responses")
    path, data, overrides = take_path_and_data(
        others, "which model? mtrl eval CHECKPOINT|RUN [--data F] [--out F] [a.b=c ...]"
    )
    file = None if out is None else new_file(out)
    named = [f"dataset.val_files={data}"] if data else []
    if ATTENTION not in given_keys(overrides):  # a run that measured it need not be evaluated so
        named.append(f"{ATTENTION}=auto")
    config = evaluation_config(path, [*overrides, *named])
    each = config.worker.rollout.val.n
    result = started(evaluate, config, partial(watching, file, each))
    if file is not None:
        say(f"responses: {file}")
    print(_table(result))
    print(json.dumps({"checkpoint": config.worker.actor.model.model_path, **result.metrics, "by": result.by}))
    return 0


def new_file(name: str) -> Path:
    """The path, refused before a model is loaded where it cannot be written."""
    path = Path(name).expanduser()
    if path.exists() or path.is_symlink():
        raise ConfigError([f"--out: {name} is there already; name another file, or remove it"])
    if not path.parent.is_dir():
        raise ConfigError([f"--out: {path.parent} is no directory"])
    return path


@contextmanager
def watching(file: Path | None, responses: int, prompts: int) -> Iterator[Seen]:
    """Shows the progress, and writes every response to the file."""
    say(f"evaluating {prompts} prompts, {responses} response{'s' if responses > 1 else ''} each")
    with ExitStack() as opened:
        out = None if file is None else opened.enter_context(file.open("x", encoding="utf-8"))
        progress = opened.enter_context(Progress(prompts, "evaluating", None))

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


def _table(result: Result) -> str:
    metrics = {name.removeprefix("val/"): value for name, value in result.metrics.items()}
    width = max(24, *map(len, metrics))
    lines = [f"{name:<{width}} {value:8.4f}" for name, value in metrics.items()]
    for column, table in result.by.items():
        lines += ["", f"by {column}", *(f"  {value:<{width - 2}} {rate:8.4f}" for value, rate in table.items())]
    return "\n".join(lines)
