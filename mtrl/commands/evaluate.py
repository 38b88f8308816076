"""`mtrl eval`: accuracy and rewards of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mtrl.build.run import evaluate
from mtrl.commands.arguments import evaluation_config, started, take_path_and_data
from mtrl.training.evaluate import Result


def run(arguments: Sequence[str]) -> int:
    path, data, overrides = take_path_and_data(
        arguments, "which model? mtrl eval CHECKPOINT|RUN [--data F] [a.b=c ...]"
    )
    config = evaluation_config(path, [*overrides, *([f"dataset.val_files={data}"] if data else [])])
    result = started(evaluate, config)
    print(_table(result))
    print(json.dumps({"checkpoint": config.worker.actor.model.model_path, **result.metrics, "by": result.by}))
    return 0


def _table(result: Result) -> str:
    metrics = {name.removeprefix("val/"): value for name, value in result.metrics.items()}
    width = max(24, *map(len, metrics))
    lines = [f"{name:<{width}} {value:8.4f}" for name, value in metrics.items()]
    for column, table in result.by.items():
        lines += ["", f"by {column}", *(f"  {value:<{width - 2}} {rate:8.4f}" for value, rate in table.items())]
    return "\n".join(lines)
