"""Real runs of the embedded model, as small as they get, and what they leave behind."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from mtrl.tracking.run_files import read_rows

TINY = (
    "dataset.rollout_batch_size=2",
    "worker.actor.global_batch_size=1",
    "worker.rollout.n=4",
    "training.logger=[]",
    "training.val_generations_to_log=0",
)
STEPS = 4
SETTINGS = (f"training.max_steps={STEPS}", "training.save_freq=2", "training.val_freq=2", "training.save_limit=-1")
NOT_COMPARED = ("perf/", "time", "attempt")  # what depends on the clock, and how often a step was done


def train_arguments(output: Path, *overrides: str) -> list[str]:
    """`mtrl train` of a tiny run that validates on three questions."""
    output.mkdir(parents=True, exist_ok=True)
    questions = output / "val.jsonl"
    if not questions.exists():
        rows = [{"prompt": f"Which letter? {each}", "answer": each, "options": ["x", "y", "z"]} for each in "ABC"]
        questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["train", *TINY, f"training.output_dir={output}", f"dataset.val_files={questions}", *overrides]


def run_of(output: Path) -> Path:
    return output / "mtrl" / "zoo"


def start(arguments: list[str]) -> subprocess.Popen:
    """The command in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mtrl", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(arguments: list[str]) -> tuple[int, str]:
    """The command to its end: status, and what it said."""
    process = start(arguments)
    said = process.communicate()[1]
    return process.returncode, said


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Modes of files hold for this thread and those it starts, as for anyone who is not root. (Linux: root without
    CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.)"""
    libc, header, held = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, held) == 0
    less = type(held)(held[0] & ~0b110, *held[1:])
    assert libc.capset(header, less) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0


def metrics_of(run: Path) -> dict[tuple[int, bool], dict]:
    """By step and whether it is a validation: the numbers of the last attempt, those of the clock aside."""
    rows = {}
    for row in read_rows(run / "metrics.jsonl"):
        place = row["step"], any(name.startswith("val/") for name in row)
        if place not in rows or row["attempt"] >= rows[place]["attempt"]:
            rows[place] = row
    return {
        place: {name: value for name, value in row.items() if not name.startswith(NOT_COMPARED)}
        for place, row in rows.items()
    }


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, in one dictionary."""
    return {
        f"{file.relative_to(checkpoint)}: {name}": tensor
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def same_end(run: Path, other: Path, step: int) -> None:
    """Both runs ended with the same numbers, to the bit: weights, optimizer and trainer state, every row of metrics."""
    ends = [each / "checkpoints" / f"step_{step}" for each in (run, other)]
    first, second = map(tensors_of, ends)
    assert first.keys() == second.keys() and len(first) > 100
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{len(different)} of {len(first)} tensors differ: {different[:3]}"
    for name in ("trainer_state.json", "trainer/optimizer.json"):
        assert (ends[0] / name).read_text() == (ends[1] / name).read_text()
    rows, others = metrics_of(run), metrics_of(other)
    assert rows.keys() == others.keys()
    for place, row in rows.items():
        assert row == others[place], f"step {place[0]}"
