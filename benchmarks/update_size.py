"""Norms of the first weight updates of runs, and the learning rate at which one run's updates match another's.

    keys="training.max_steps=5 training.save_freq=1 training.save_limit=-1 training.output_dir=sizes dataset.val_files="
    for arm in tgf_20 grpo; do mtrl train study/$arm.yaml $keys dataset.seed=0 worker.rollout.seed=0; done
    python -m benchmarks.update_size embedded/mtrl_embedded/scenes sizes/study/tgf_20 sizes/study/grpo

The first run is the one to match. The norm of an update is the norm of the difference of all weights between two
checkpoints; the mean over steps is compared. The size of AdamW's updates hardly depends on the size of the gradient, so
the rate must be found from the updates, not from gradient norms. Updates are not quite proportional to the rate: set
the rate, run the five steps again, and stop when the sizes agree within 2%.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

STEPS = 5


def load_weights(checkpoint: Path) -> dict[str, Tensor]:
    files = sorted(checkpoint.glob("*.safetensors"))
    return {name: x.double() for file in files for name, x in load_file(file).items()}


def update_norms(start: Path, run: Path, steps: int = STEPS) -> list[float]:
    """Norms of the first updates of a run that started from `start` and has a checkpoint of every step."""
    before, norms = load_weights(start), []
    for step in range(1, steps + 1):
        after = load_weights(run / "checkpoints" / f"step_{step}")
        norms.append(float(torch.stack([((x - before[name]) ** 2).sum() for name, x in after.items()]).sum().sqrt()))
        before = after
    return norms


def main(arguments: list[str]) -> None:
    start, target_run, *others = map(Path, arguments)
    target = sum(update_norms(start, target_run)) / STEPS
    print(f"{target_run}: mean update norm of steps 1 to {STEPS} is {target:.6g}")
    for run in others:
        size = sum(update_norms(start, run)) / STEPS
        rate = float(yaml.safe_load((run / "config.yaml").read_text())["worker"]["actor"]["optim"]["lr"])
        print(f"{run}: {size:.6g} at lr {rate:.6g}; to match, lr {rate * target / size:.6g}")


if __name__ == "__main__":
    main(sys.argv[1:])
