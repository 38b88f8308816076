"""Tables of the kernels of a piece of work (on a CPU: of its operators), the slowest first, and of the gaps between
kernels, in which the device waits for the host."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity

from benchmarks.measure import wait

Result = TypeVar("Result")
MAX_KERNELS = 40  # rows of a table
MAX_GAPS = 15


def profile(work: Callable[[], Result], device: str) -> tuple[Result, str]:
    """The result of the work, and its kernels."""
    with make_profiler(device) as profiler:
        begin = time.perf_counter()
        result = work()
        wait()
        taken = time.perf_counter() - begin
    return result, make_table(profiler, taken, device)


def make_profiler(device: str) -> Any:
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    return torch.profiler.profile(activities=[activity])


def make_table(profiler: Any, taken: float, device: str) -> str:
    kind = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"  # in microseconds
    found = [(getattr(each, kind) / 1000, each.count, each.key) for each in profiler.key_averages()]
    rows = sorted((row for row in found if row[0] > 0), reverse=True)
    listed = sum(ms for ms, _, _ in rows) / 1000
    lines = [
        f"# {taken:.3f} s with the profiler, {listed:.3f} s of it in the kernels below, the slowest first.",
        *(f"{ms:9.2f} ms {calls:7d}  {key[:100]}" for ms, calls, key in rows[:MAX_KERNELS]),
    ]
    return "\n".join(lines + (find_gaps(profiler) if device == "cuda" else [])) + "\n"


def find_gaps(profiler: Any) -> list[str]:
    """The device's idle time by the kernels before and after it, the longest first."""
    results = profiler.profiler.kineto_results.events()
    kernels = sorted(
        (each.start_ns(), each.start_ns() + each.duration_ns(), each.name())
        for each in results
        if each.device_type() == torch.autograd.DeviceType.CUDA
    )
    idle: dict[tuple[str, str], list[float]] = defaultdict(list)
    busy_until, last = kernels[0][0], ""
    for begin, end, name in kernels:
        if begin > busy_until:
            idle[last, name].append((begin - busy_until) / 1e6)
        if end > busy_until:
            busy_until, last = end, name
    total = sum(map(sum, idle.values())) / 1000
    longest = sorted(idle.items(), key=lambda item: -sum(item[1]))[:MAX_GAPS]
    return [
        f"# {total:.3f} s without a kernel, by the kernels before and after:",
        *(f"{sum(ms):9.2f} ms {len(ms):7d}  {a[:60]} -> {b[:60]}" for (a, b), ms in longest),
    ]


def profile_methods(owner: Any, names: tuple[str, ...], device: str, tables: dict[str, str]) -> None:
    """Let every call of these methods write the table of its kernels; one that makes no pass has none."""

    def profiled(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            result, tables[name] = profile(lambda: method(*arguments, **named), device)
            return result

        return run

    for name in names:
        setattr(owner, name, profiled(name, getattr(owner, name)))


def profile_calls(owner: Any, name: str, calls: range, device: str, tables: dict[str, str]) -> None:
    """Let these calls of a method, counted from 0, write one table of their kernels."""
    method: Callable[..., Any] = getattr(owner, name)
    profiler, begin, call = make_profiler(device), 0.0, -1

    def run(*arguments: Any, **named: Any) -> Any:
        nonlocal begin, call
        call += 1
        if call == calls.start:
            wait()
            profiler.start()
            begin = time.perf_counter()
        result = method(*arguments, **named)
        if call == calls.stop - 1:
            wait()
            taken = time.perf_counter() - begin
            profiler.stop()
            tables[f"{len(calls)} calls of {name}"] = make_table(profiler, taken, device)
        return result

    setattr(owner, name, run)
