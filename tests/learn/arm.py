"""One arm of a comparison, in a process of its own: `python arm.py DIRECTORY a.b=c ..` trains the embedded model.

`DIRECTORY/aims.jsonl` gets a line for each sampled batch of prompts: the step, and for each task the share of correct
responses (with `--vgr`: the negative mean VGR of the late layers, since less is better). All sampled responses count,
including groups that a filter drops; groups from the replay buffer do not count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mtrl.algorithms.groups import group_mean
from mtrl.algorithms.metrics import attention_values
from mtrl.compose.run import build, configure
from mtrl.protocols import Tracker
from mtrl.rewards.builtin import accuracy
from mtrl.types import Experience, Needs, Rollouts

AIMS = "aims.jsonl"


def main(directory: Path, vgr: bool, overrides: list[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config, embedded = configure(None, [*overrides, f"training.output_dir={directory}", "training.logger=[]"])
    assert embedded
    run = build(config, trackers=[LateVgr(directory)] if vgr else [])
    run.loop.components.validation = None  # not needed
    if not vgr:
        record_accuracy(run.loop.components.generator, directory)
    run.train()


def record_accuracy(generator: Any, directory: Path) -> None:
    """Records the accuracy of sampled responses; ReMax's greedy responses do not count."""
    generate = generator.generate

    def recording(prompts: Any, sampling: Any) -> Rollouts:
        rollouts: Rollouts = generate(prompts, sampling)
        if sampling.temperature > 0:
            record(directory, sampling.step + 1, rollouts, right_answers(rollouts))
        return rollouts

    generator.generate = recording


def right_answers(rollouts: Rollouts) -> list[float]:
    tasks = [rollouts.prompts[g].task for g in rollouts.group.tolist()]
    return [
        accuracy({"response": text, "ground_truth": task.answer, **(task.columns or {})}) or 0.0
        for text, task in zip(rollouts.text, tasks, strict=True)
    ]


class LateVgr(Tracker):
    needs = Needs("attention_mass")

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def rollouts(self, step: int, experience: Experience) -> None:
        values = -attention_values(experience.signals, experience.rollouts)["vgr_late"]
        record(self.directory, step, experience.rollouts, values.tolist())


def record(directory: Path, step: int, rollouts: Rollouts, values: list[float]) -> None:
    means = group_mean(torch.tensor(values), rollouts.group).tolist()
    aims: Mapping[str, float] = {p.task.id: mean for p, mean in zip(rollouts.prompts, means, strict=True)}
    with (directory / AIMS).open("a") as file:
        file.write(json.dumps({"step": step, "aims": aims}) + "\n")


if __name__ == "__main__":
    words = sys.argv[1:]
    main(Path(words[0]), "--vgr" in words, [word for word in words[1:] if word != "--vgr"])
