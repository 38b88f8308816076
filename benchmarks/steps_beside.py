"""Why do steps take longer while a checkpoint is written? Steps of one run next to one kind of work at a time.

    python -m benchmarks.steps_beside --size 3b --device cuda --prompts 8 --generations 8 --image-side 672 \
        --completion 256 --dtype bf16 [--steps 3] [--only nothing saving] [KEY=VALUE ..]

nothing      the steps alone, first and last
interpreter  a thread computes in Python, and so holds the interpreter half of the time
memory       a thread copies CPU memory, which it does without the interpreter
fresh        a thread takes CPU memory that was never used, and writes to it
process      another process copies CPU memory
disk         another process writes files and flushes them, in the folder of the run
device       a thread copies device memory to pinned CPU memory
checksum     a thread computes the checksums that a checkpoint has
saving       a checkpoint is written in the background, as by `mtrl train`: the steps until it is on the disk
saved_again  the same once more

Medians of the phases of a step, and what a step takes in proportion to the steps alone. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import finish
from benchmarks.first_steps import make_parser
from mtrl.bench.measure import PHASES, MeasuredRun, Row, open_run
from mtrl.bench.random_run import write_run
from mtrl.bench.workload import Workload
from mtrl.checkpoint.manifest import CHUNK

BLOCK = {"cuda": 2**30, "cpu": 2**20}  # bytes at a time
FILE_BLOCKS = 8  # blocks of a file before it is flushed
MOST_STEPS = 30  # during a save
SAVING_THREAD = "mtrl-save"  # of the store
Stopped = Callable[[], bool]


def interpret(stopped: Stopped, size: int) -> None:
    while not stopped():
        sum(range(100_000))


def copy_memory(stopped: Stopped, size: int) -> None:
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    while not stopped():
        target.copy_(source)


def take_fresh_memory(stopped: Stopped, size: int) -> None:
    while not stopped():
        torch.empty(size, dtype=torch.uint8).fill_(1)


def copy_from_device(stopped: Stopped, size: int) -> None:
    if not torch.cuda.is_available():
        return
    stream = torch.cuda.Stream()
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(stream):
        while not stopped():
            target.copy_(source, non_blocking=True)
            stream.synchronize()


def compute_checksums(stopped: Stopped, size: int) -> None:
    chunk = bytes(CHUNK)
    while not stopped():
        zlib.crc32(chunk)


def write_files(stopped: Stopped, size: int, folder: Path) -> None:
    block = bytes(size)
    for number in count():
        if stopped():
            return
        with open(folder / f"file_{number % 4}", "wb") as file:
            for _ in range(FILE_BLOCKS):
                file.write(block)
            file.flush()


THREADS = {
    "interpreter": interpret, "memory": copy_memory, "fresh": take_fresh_memory, "device": copy_from_device,
    "checksum": compute_checksums,
}  # fmt: skip
SAVES = ("saving", "saved_again")
WORKS = ("nothing", *THREADS, "process", "disk", *SAVES)


class RepeatedWorkload(Workload):
    """The prompts of four steps, over and over."""

    def write(self, folder: Path) -> Path:
        return write_run(
            folder, self.size, self.device, 4 * self.prompts, [self.image_side], self.text_tokens, self.seed,
            self.make_settings(), weights=False,
        )  # fmt: skip


@contextmanager
def running(work: str, device: str) -> Iterator[None]:
    """Does the work, in a thread or another process, within the context."""
    size = BLOCK[device]
    with tempfile.TemporaryDirectory(prefix="mtrl-beside-") as folder:
        if work in THREADS:
            stop, worker = start_thread(THREADS[work], size)
        elif work == "process":
            stop, worker = start_process(copy_memory, size)
        elif work == "disk":
            stop, worker = start_process(write_files, size, Path(folder))
        else:
            yield
            return
        try:
            yield
        finally:
            stop()
            worker.join()


def start_thread(target: Any, size: int) -> tuple[Callable[[], None], Any]:
    event = threading.Event()
    worker = threading.Thread(target=target, args=(event.is_set, size))
    worker.start()
    return event.set, worker


def start_process(target: Any, size: int, *more: Any) -> tuple[Callable[[], None], Any]:
    context = multiprocessing.get_context("spawn")
    event = context.Event()
    worker = context.Process(target=target, args=(event.is_set, size, *more))
    worker.start()
    return event.set, worker


def measure(run: MeasuredRun, work: str, steps: int, numbers: Iterator[int]) -> dict[str, Any]:
    """The median step next to this work, and its phases."""
    with running(work, run.workload.device):
        rows = measure_save(run, numbers) if work in SAVES else [run.step(next(numbers)) for _ in range(steps)]
    medians = {name: round(statistics.median(row[name] for row in rows), 4) for name in ("wall", *PHASES)}
    return {**medians, "steps": [round(row["wall"], 3) for row in rows]}


def measure_save(run: MeasuredRun, numbers: Iterator[int]) -> list[Row]:
    """The steps until a checkpoint is complete; at least one."""
    run.training.loop.save()
    rows = [run.step(next(numbers))]
    while len(rows) < MOST_STEPS and any(thread.name == SAVING_THREAD for thread in threading.enumerate()):
        rows.append(run.step(next(numbers)))
    store: Any = run.components.store
    store.close()
    return rows


def run(a: argparse.Namespace) -> dict[str, Any]:
    works = [work for work in WORKS if not a.only or work in a.only]
    order = ["nothing", *(work for work in works if work != "nothing"), "nothing"]
    steps = 1 + a.steps * len(order) + len(SAVES) * MOST_STEPS
    given = {field.name: getattr(a, field.name) for field in fields(Workload) if hasattr(a, field.name)}
    workload = RepeatedWorkload(**{**given, "steps": steps})
    found: dict[str, Any] = {}
    with open_run(workload) as measured:
        numbers = count()
        measured.step(next(numbers))  # compiles
        for index, work in enumerate(order):
            name = work if index < len(order) - 1 else "nothing, again"
            found[name] = measure(measured, work, a.steps, numbers)
            found[name]["in_proportion"] = round(found[name]["wall"] / found["nothing"]["wall"], 3)
            print(f"{name}: {found[name]}", flush=True)
    arguments = {name: value for name, value in vars(a).items() if name != "out"}
    return {"bench": "steps_beside", "args": arguments, "settings": workload.reported_settings(), "beside": found}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--image-side", type=int, default=56)
    parser.add_argument("--only", nargs="+", choices=WORKS)
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    args = parse()
    finish(run(args), args.out)
