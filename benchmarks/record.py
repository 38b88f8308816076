"""CPU seconds that recording the rollouts costs the demo, as a share of its steps in the same run.

    python -m benchmarks.record [--steps 8] [--keep DIR] [--out FILE]

Two runs of the embedded model in the demo's sizes record 64 of the 128 responses of a step: one as every run does, one
with attention maps. The cost of the record is the time of its own thread and of the handover to it; maps cost one more
pass over the recorded responses. CPU time is measured instead of wall time, so that other programs do not matter; the
first step is a warm-up and does not count.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.environment import finish
from mtrl.compose.run import build
from mtrl.config import load_config
from mtrl.embedded.embedded_rows import CONFIG_FILE
from mtrl.tracking.record import RolloutRecord
from mtrl.training import loop
from mtrl.training.loop import Loop

Seconds = dict[str, list[float]]


@contextmanager
def timed(owner: Any, name: str, clock: Callable[[], float], durations: list[float]) -> Iterator[None]:
    """Appends the duration of each call of a method, measured by `clock`, to `durations`."""
    method = getattr(owner, name)

    def timed_method(*args: Any, **kwargs: Any) -> Any:
        begin = clock()
        try:
            return method(*args, **kwargs)
        finally:
            durations.append(clock() - begin)

    setattr(owner, name, timed_method)
    try:
        yield
    finally:
        setattr(owner, name, method)


def measure(directory: Path, steps: int, maps: bool) -> dict[str, Any]:
    config = load_config(CONFIG_FILE, {
        "training.output_dir": str(directory), "training.max_steps": steps, "training.val_before_train": False,
        "training.experiment_name": "maps" if maps else "record", "training.record_attention_maps": maps,
        "training.val_freq": -1, "training.save_freq": -1, "training.best_metric": None, "dataset.val_batch_size": 8,
        "optimization.compute_attention_metrics": False,
    })  # fmt: skip
    seconds: Seconds = defaultdict(list)
    training = build(config)
    with (
        timed(Loop, "step", time.process_time, seconds["step"]),
        timed(loop, "with_maps", time.process_time, seconds["maps"]),
        timed(RolloutRecord, "_write", time.thread_time, seconds["write"]),
        timed(RolloutRecord, "rollouts", time.thread_time, seconds["hand_over"]),
    ):
        training.train()
    per_step = {name: mean(values[1:]) for name, values in seconds.items() if values}
    record, map_pass = per_step["write"] + per_step["hand_over"], per_step.get("maps", 0.0)
    without_record = per_step["step"] - record - map_pass
    size = sum(part.stat().st_size for part in (training.directory / "record").iterdir())
    return {
        "seconds_of_a_step_without": round(without_record, 4),
        "seconds_of_record": round(record, 4),
        "record_percent": round(100 * record / without_record, 2),
        "seconds_of_map_pass": round(map_pass, 4),
        "map_pass_percent": round(100 * map_pass / without_record, 2),
        "kilobytes_of_a_step": round(size / steps / 1000, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch)
        results = {
            name: measure(directory, arguments.steps, maps) for name, maps in (("record", False), ("maps", True))
        }
    finish({"what": "record", "steps": arguments.steps, "threads": torch.get_num_threads(), **results}, arguments.out)


if __name__ == "__main__":
    main()
