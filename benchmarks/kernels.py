"""Tables of the kernels of a piece of work (on a CPU: of its operators), the slowest first."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity

from benchmarks.measure import wait

Result = TypeVar("Result")
MAX_KERNELS = 40  # rows of a table


def profile(work: Callable[[], Result], device: str) -> tuple[Result, str]:
    """The result of the work, and its kernels."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        begin = time.perf_counter()
        result = work()
        wait()
        taken = time.perf_counter() - begin
    kind = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"  # in microseconds
    found = [(getattr(each, kind) / 1000, each.count, each.key) for each in profiler.key_averages()]
    rows = sorted((row for row in found if row[0] > 0), reverse=True)
    listed = sum(ms for ms, _, _ in rows) / 1000
    lines = [
        f"# {taken:.3f} s with the profiler, {listed:.3f} s of it in the kernels below, the slowest first.",
        *(f"{ms:9.2f} ms {calls:7d}  {key[:100]}" for ms, calls, key in rows[:MAX_KERNELS]),
    ]
    return result, "\n".join(lines) + "\n"


def profile_methods(owner: Any, names: tuple[str, ...], device: str, tables: dict[str, str]) -> None:
    """Let every call of these methods write the table of its kernels; one that makes no pass has none."""

    def profiled(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            result, tables[name] = profile(lambda: method(*arguments, **named), device)
            return result

        return run

    for name in names:
        setattr(owner, name, profiled(name, getattr(owner, name)))
