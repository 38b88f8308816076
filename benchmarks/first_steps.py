"""The first steps of a run over pictures of several sizes: the seconds of each, and what was made in it for the first
time.

    python -m benchmarks.first_steps --size 3b --device cuda --prompts 8 --generations 8 --completion 256 \
        --sides 448 672 896 --steps 8 [--dtype bf16] [--tprl] [--attention] [KEY=VALUE ..]

The run is that of `benchmarks.step` (`mtrl bench`), except for the pictures, which have these sides in turn, so that a
step has prompts of every size in changing numbers. Before the first step (as step 0: building and preflight) and in
each step it counts graphs that torch.compile made (with the function, its seconds and the reason if it was compiled
before), Triton kernels compiled (with their constants), CUDA graphs captured, and device memory that torch's allocator
requested from the driver or gave up for a retry. Run it twice for a warm cache of kernels. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import finish
from mtrl.bench.measure import MeasuredRun, open_run
from mtrl.bench.random_run import step_settings, write_run
from mtrl.bench.shapes import SHAPES
from mtrl.bench.workload import DTYPES, Workload

ALLOCATOR = {"driver_allocations": "num_device_alloc", "allocator_retries": "num_alloc_retries"}


@dataclass(frozen=True)
class MixedWorkload(Workload):
    """Pictures of several sizes."""

    sides: Sequence[int] = ()

    def make_settings(self) -> dict[str, Any]:
        longest = self.text_tokens + self.shape.image_tokens(max(self.sides))
        sizes = step_settings(self.prompts, self.generations, self.completion, self.steps, self.sides, longest)
        return super().make_settings() | sizes

    def write(self, folder: Path) -> Path:
        rows = self.prompts * (self.steps + 1) + 1  # not a multiple of the sides: steps differ
        return write_run(
            folder, self.size, self.device, rows, self.sides, self.text_tokens, self.seed, self.make_settings(),
            weights=False,
        )  # fmt: skip


class FirstTimes:
    """What was compiled, captured and allocated since the last look."""

    def __init__(self) -> None:
        self.triton: Counter[str] = Counter()
        self.graphs, self.captures = 0, 0
        self.allocator = dict.fromkeys(ALLOCATOR, 0)

    def take(self, measured: MeasuredRun | None = None) -> dict[str, Any]:
        from torch._dynamo.utils import get_compilation_metrics

        metrics: list[Any] = get_compilation_metrics()
        compiled, self.graphs = metrics[self.graphs :], len(metrics)
        kernels, self.triton = dict(self.triton), Counter()
        captures = 0 if measured is None else getattr(measured.components.generator, "captures", 0)
        captured, self.captures = captures - self.captures, captures
        return {
            "compiled": [describe(each) for each in compiled],
            "compile_seconds": round(sum(each.entire_frame_compile_time_s or 0 for each in compiled), 3),
            "triton_kernels": kernels,
            "captures": captured,
            **self._take_allocator(),
        }

    def _take_allocator(self) -> dict[str, int]:
        if not torch.cuda.is_available():
            return {}
        stats = torch.cuda.memory_stats()
        now = {name: stats[key] for name, key in ALLOCATOR.items()}
        before, self.allocator = self.allocator, now
        return {name: now[name] - before[name] for name in now}


def describe(compilation: Any) -> str:
    """A graph of torch.compile in one line."""
    file, seconds = Path(compilation.co_filename or "").name, compilation.entire_frame_compile_time_s or 0
    reason = getattr(compilation, "recompile_reason", None)
    again = f", again: {' '.join(reason.split())[:160]}" if reason else ""
    return f"{compilation.co_name} ({file}:{compilation.co_firstlineno}) {seconds:.2f} s{again}"


@contextmanager
def watch_compilers() -> Iterator[FirstTimes]:
    """Counts Triton's compilations where it is installed."""
    found = FirstTimes()
    try:
        from triton import knobs
    except ImportError:
        yield found
        return

    def count(*_: Any, **named: Any) -> None:
        constants = [str(value) for value in named["compile"]["constants"].values()]
        found.triton[f"{named['fn'].name.rpartition('.')[2]}({', '.join(constants)})"] += 1

    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, count
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before


def run(a: argparse.Namespace) -> dict[str, Any]:
    sizes = {field.name: getattr(a, field.name) for field in fields(MixedWorkload) if hasattr(a, field.name)}
    workload = MixedWorkload(**sizes)
    begin = time.perf_counter()
    with watch_compilers() as first_times, open_run(workload) as measured:
        rows = [{"step": 0, "wall": time.perf_counter() - begin, "start": measured.start, **first_times.take(measured)}]
        for step in range(a.steps):
            row = measured.step(step)
            rows.append({"step": step + 1, "wall": row["wall"], "detail": row["detail"], **first_times.take(measured)})
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items() if value), flush=True)
    arguments = {name: value for name, value in vars(a).items() if name != "out"}
    return {"bench": "first_steps", "args": arguments, "settings": workload.reported_settings(), "steps": rows}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The sizes and settings of a run that is made for a measurement."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="any other key of the run")
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--completion", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="dtype of the master weights")
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    for switch in ("tprl", "attention"):
        parser.add_argument(f"--{switch}", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=[56, 84, 112], help="of the pictures, in pixels")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    args = parse()
    finish(run(args), args.out)
