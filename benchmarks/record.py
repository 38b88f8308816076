"""What the record of the rollouts costs the demo, in processor seconds, as a share of its steps in the same run.

    python -m benchmarks.record [--steps 8] [--keep DIR] [--out FILE]

Two runs of the embedded model in the demo's sizes, 64 of 128 responses of a step recorded: as every run does it, and
with attention maps. The record is the time of its own thread and of what hands it over; maps are one more pass over the
recorded responses. Processor time is counted, not the clock, so that other programs do not matter; the first step warms
up.
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
def timed(owner: Any, name: str, clock: Callable[[], float], into: list[float]) -> Iterator[None]:
    """Adds up what each call of a method takes by a clock."""
    method = getattr(owner, name)

    def counted(*given: Any, **options: Any) -> Any:
        begin = clock()
        try:
            return method(*given, **options)
        finally:
            into.append(clock() - begin)

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, method)


def measured(directory: Path, steps: int, maps: bool) -> dict[str, Any]:
    config = load_config(CONFIG_FILE, {
        "training.output_dir": str(directory), "training.max_steps": steps, "training.val_before_train": False,
        "training.experiment_name": "maps" if maps else "record", "training.record_attention_maps": maps,
        "training.val_freq": -1, "training.save_freq": -1, "training.best_metric": None, "dataset.val_batch_size": 8,
        "optimization.compute_attention_metrics": False,
    })  # fmt: skip
    found: Seconds = defaultdict(list)
    training = build(config)
    with (
        timed(Loop, "step", time.process_time, found["step"]),
        timed(loop, "with_maps", time.process_time, found["maps"]),
        timed(RolloutRecord, "_write", time.thread_time, found["write"]),
        timed(RolloutRecord, "rollouts", time.thread_time, found["hand_over"]),
    ):
        training.train()
    per_step = {name: mean(values[1:]) for name, values in found.items() if values}
    record, looked = per_step["write"] + per_step["hand_over"], per_step.get("maps", 0.0)
    alone = per_step["step"] - record - looked
    size = sum(part.stat().st_size for part in (training.directory / "record").iterdir())
    return {
        "seconds_of_a_step_without": round(alone, 4),
        "seconds_of_record": round(record, 4),
        "record_percent": round(100 * record / alone, 2),
        "seconds_of_map_pass": round(looked, 4),
        "map_pass_percent": round(100 * looked / alone, 2),
        "kilobytes_of_a_step": round(size / steps / 1000, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="a folder that the runs stay in")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = asked.keep or Path(scratch)
        results = {name: measured(place, asked.steps, maps) for name, maps in (("record", False), ("maps", True))}
    finish({"what": "record", "steps": asked.steps, "threads": torch.get_num_threads(), **results}, asked.out)


if __name__ == "__main__":
    main()
