"""Real but minimal runs of a tiny model and of the embedded one, and readers of their files."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mtrl.cli import main
from mtrl.rewards import sandbox
from mtrl.tracking.jsonl import read_rows
from pretraining.tiny_checkpoints import make_tiny_checkpoint

TINY = (
    "dataset.rollout_batch_size=2",
    "worker.actor.global_batch_size=1",
    "worker.rollout.n=4",
    "training.logger=[]",
    "training.val_generations_to_log=0",
)
STEPS = 4
SETTINGS = (f"training.max_steps={STEPS}", "training.save_freq=2", "training.val_freq=2", "training.save_limit=-1")
ADAPTERS = (
    "worker.actor.model.peft_type=lora", "worker.actor.model.lora_rank=4", "worker.actor.optim.lr=1e-3",
)  # fmt: skip
# Critic, adapters and replay at once: all that a checkpoint can hold.
COMBINED = (
    *ADAPTERS, "optimization.advantage_estimator=gae", "worker.critic.optim.lr=1e-3",
    "optimization.replay_buffer_size=8",
)  # fmt: skip
NOT_COMPARED = ("perf/", "time", "attempt")  # timings, and the number of attempts at a step


QUESTIONS = 8
_scratch = tempfile.TemporaryDirectory()
REWARDS = '''"""Rewards of the random responses of a tiny model."""


def score(data):
    """Nearly always differs within a group, so that there is something to learn."""
    return sum(data["response_token_ids"]) % 7 / 7


def accuracy(data):
    """Often the same in a group."""
    return float(sum(data["response_token_ids"]) % 5 == 0)
'''


@cache
def tiny_run_files() -> Path:
    """A folder with a model of 40,000 parameters, eight questions about pictures and a reward."""
    folder = Path(_scratch.name)
    make_tiny_checkpoint(folder / "model", hidden=16, heads=2, kv_heads=1, vision_hidden=16, vocabulary=320)
    weights = load_file(folder / "model/model.safetensors")
    sharper = {name: 8 * weight if weight.dim() > 1 else weight for name, weight in weights.items()}  # see tiny_models
    save_file(sharper, folder / "model/model.safetensors", metadata={"format": "pt"})
    (folder / "rewards.py").write_text(REWARDS)
    rows = []
    for index in range(QUESTIONS):
        pixels = np.random.default_rng(index).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        row = {"prompt": f"<image>Which of {index}?", "images": [f"{index}.png"], "answer": "A", "options": ["x", "y"]}
        rows.append(json.dumps(row))
    (folder / "train.jsonl").write_text("\n".join(rows))
    return folder


def tiny_settings() -> list[str]:
    """Overrides for a run of the tiny model on its questions, with the algorithm settings of zoo.yaml."""
    folder = tiny_run_files()
    return [
        *TINY, f"worker.actor.model.model_path={folder / 'model'}", f"dataset.train_files={folder / 'train.jsonl'}",
        "dataset.min_pixels=3136", "dataset.max_pixels=3136", "dataset.max_prompt_length=96",
        "dataset.max_response_length=8", "worker.actor.model.enable_gradient_checkpointing=false",
        "worker.actor.fsdp.mixed_precision_dtype=fp32", "worker.actor.optim.lr=1e-4",
        "worker.actor.optim.warmup_steps=2", "optimization.disable_divergence=true",
        "optimization.enable_perception_filtering=true", "optimization.top_p_perception_tokens=0.4",
        "optimization.enable_trajectory_reweighting=true", "optimization.trajectory_scaling_min=0.9",
        f"worker.reward.functions=[{folder / 'rewards.py'}:score,format]", "worker.reward.weights=[1.0,0.2]",
        "worker.reward.num_cpus=1", "worker.reward.timeout_s=300", "training.experiment_name=zoo",
    ]  # fmt: skip


def tiny_arguments(output: Path, *overrides: str) -> list[str]:
    """`mtrl train` of the tiny model that validates on three questions."""
    return ["train", *tiny_settings(), *outputs(output), *overrides]


def train_arguments(output: Path, *overrides: str) -> list[str]:
    """A small `mtrl train` of the embedded model, for tests of that model or its task."""
    return ["train", *TINY, *outputs(output), *overrides]


def outputs(output: Path) -> list[str]:
    output.mkdir(parents=True, exist_ok=True)
    questions = output / "val.jsonl"
    if not questions.exists():
        rows = [{"prompt": f"Which letter? {each}", "answer": each, "options": ["x", "y", "z"]} for each in "ABC"]
        questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"training.output_dir={output}", f"dataset.val_files={questions}"]


def get_run_dir(output: Path) -> Path:
    return output / "mtrl" / "zoo"


def start(arguments: list[str]) -> subprocess.Popen:
    """Start the command in a new process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mtrl", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(arguments: list[str]) -> tuple[int, str]:
    """Run the command to its end; returns its status and its standard error."""
    process = start(arguments)
    errors = process.communicate()[1]
    return process.returncode, errors


def load_in_one_thread() -> None:
    """For a fork. transformers loads weights in several threads; torch replaces its pool of threads after a fork when
    first asked, and a thread that asks at that moment finds none ("Invalid thread pool")."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"


def write_into(file: Path) -> None:
    """For a fork: all that it prints goes there, and not where pytest captures the output of this process."""
    with file.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)


class ForkedRun:
    """The command in a fork of this process, with the methods of `subprocess.Popen` that tests use. It imports nothing
    again and starts at once. (A process that has used OpenMP's threads cannot be forked: OMP_NUM_THREADS=1.)"""

    def __init__(self, arguments: list[str]) -> None:
        import_module("mtrl.commands.train")  # here, once for all forks
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process: BaseProcess = multiprocessing.get_context("fork").Process(target=self._run, args=(arguments,))
        self.process.start()

    def _run(self, arguments: list[str]) -> None:
        os.dup2(self.output.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        # Image files are deleted with their process: the fork makes its own and keeps a reference to the parent's.
        self.inherited, sandbox.IMAGES = sandbox.IMAGES, sandbox.ImageFiles()
        load_in_one_thread()
        sys.exit(main(arguments))

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        self.process.join(timeout)
        self.output.seek(0)
        return None, self.output.read()


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Within the context, file permissions bind this thread and those it starts, even for root: drops Linux's
    CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    libc, header, held = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, held) == 0
    less = type(held)(held[0] & ~0b110, *held[1:])
    assert libc.capset(header, less) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0


def read_metrics(run: Path) -> dict[tuple[int, bool], dict]:
    """The metrics of the last attempt without timings, by (step, whether it is a validation)."""
    rows = {}
    for row in read_rows(run / "metrics.jsonl"):
        key = row["step"], any(name.startswith("val/") for name in row)
        if key not in rows or row["attempt"] >= rows[key]["attempt"]:
            rows[key] = row
    return {
        key: {name: value for name, value in row.items() if not name.startswith(NOT_COMPARED)}
        for key, row in rows.items()
    }


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint in one dictionary."""
    return {
        f"{file.relative_to(checkpoint)}: {name}": tensor
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same bits: a NaN, which marks what does not apply, is equal to itself."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (tensor, other)))


def same_end(run: Path, other: Path, step: int) -> None:
    """Asserts that both runs ended bitwise equal: every file of their last checkpoint, every row of metrics."""
    same_checkpoint(*(each / "checkpoints" / f"step_{step}" for each in (run, other)))
    rows, others = read_metrics(run), read_metrics(other)
    assert rows.keys() == others.keys()
    for key, row in rows.items():
        assert row == others[key], f"step {key[0]}"


def same_checkpoint(checkpoint: Path, other: Path) -> None:
    """Asserts that two checkpoints are bitwise equal: weights and optimizer of each learner, trainer state, replay."""
    first, second = read_tensors(checkpoint), read_tensors(other)
    assert first.keys() == second.keys() and len(first) > 50
    different = [name for name in first if not same_bits(first[name], second[name])]
    assert not different, f"{len(different)} of {len(first)} tensors differ: {different[:3]}"
    texts, others = (
        {str(file.relative_to(each)): file.read_text() for file in each.rglob("*.json")} for each in (checkpoint, other)
    )
    assert texts == others, "the manifest among them, so all other files, too"


def check_combined(run: Path, step: int) -> None:
    """Asserts that critic, adapters and replay took part in a run of COMBINED."""
    tensors, rows = read_tensors(run / "checkpoints" / f"step_{step}"), list(read_metrics(run).values())
    assert any(".lora_B." in name and tensor.any() for name, tensor in tensors.items())
    assert any(name.startswith("critic/trainer/") for name in tensors)
    assert sum(row.get("replay/hits", 0) for row in rows) > 0 and any(row.get("critic/grad_norm") for row in rows)


def wait_for(condition: Callable[[], object], what: str, seconds: float = 900) -> None:
    """Wait until the condition is true; longer than this is a hang, even on a busy machine."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {seconds} s")
        time.sleep(0.05)
