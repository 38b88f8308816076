"""Watch the embedded model learn, in minutes on a laptop.

mtrl demo [a.b=c ...]

Ends with accuracy before and after by kind of question, a learning curve, and a last line of JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mtrl.checkpoint.folder_store import list_checkpoints
from mtrl.commands.load_arguments import check_call, log_line
from mtrl.compose.run import build, configure
from mtrl.tracking.jsonl import read_rows

STEPS = 24
PLAIN_GRPO = (  # every credit rule of zoo.yaml is off
    "mtrl train optimization.enable_perception_filtering=false optimization.enable_trajectory_reweighting=false"
)


def run(arguments: Sequence[str]) -> int:
    begin = time.perf_counter()
    defaults = [
        f"training.max_steps={STEPS}",
        f"training.experiment_name=demo-{time.strftime('%Y%m%d-%H%M%S')}",
        "training.val_generations_to_log=1",
        "optimization.compute_attention_metrics=false",  # saves a second pass over the questions of each validation
    ]
    config, _ = configure(None, [*defaults, *arguments])
    log_line(
        "A vision-language model of 3 million parameters learns, by reinforcement, to answer questions about small\n"
        "pictures of coloured shapes. It can see them, but its teacher often answered from habit without looking, and\n"
        "called some things by a wrong name. Only the reward (right answer, right form) corrects it."
    )
    training = check_call(build, config)
    training.train()
    rows = read_rows(training.directory / "metrics.jsonl")
    accuracy = f"val/avg@{config.worker.rollout.val.n}"
    validated = [row for row in rows if accuracy in row]
    before, after = validated[0], validated[-1]
    print(_comparison(before, after, accuracy))
    checkpoint = list_checkpoints(training.directory / "checkpoints")[-1]
    print(
        f"\nLearning curve:  {training.directory}/curve.png"
        f"\nEvery response:  {training.directory}/rollouts.jsonl"
        f"\nEvery number:    {training.directory}/metrics.jsonl"
        f"\nThe new model:   {checkpoint}  (plain from_pretrained loads it)"
        f"\nPlain GRPO, for comparison:  {PLAIN_GRPO}"
        "\nEvery key:                   mtrl config\n"
    )
    summary = {
        "accuracy_before": before[accuracy],
        "accuracy_after": after[accuracy],
        "steps": after["step"],
        "seconds": round(time.perf_counter() - begin, 1),
        "run_dir": str(training.directory),
    }
    print(json.dumps(summary), flush=True)
    mtrl = "mtrl" if shutil.which("mtrl") else f"{sys.executable} -m mtrl"
    log_line(
        f"\nSee which tokens looked at the picture, and which were trained on:\n  {mtrl} view {training.directory}"
    )
    return 0


def _comparison(before: Mapping[str, Any], after: Mapping[str, Any], accuracy: str) -> str:
    """Accuracy by kind of question before and after, as a table."""
    prefix = "val/by_kind/"
    kinds = [name for name in before if name.startswith(prefix)]
    rows = [(name.removeprefix(prefix), before[name], after[name]) for name in kinds]
    rows.append(("all", before[accuracy], after[accuracy]))
    lines = [f"\n{'accuracy':<12} {'before':>7} {'after':>7}"]
    lines += [f"{kind:<12} {old:7.3f} {new:7.3f}   {new - old:+.3f}" for kind, old, new in rows]
    return "\n".join(lines)
