"""Time and peak memory of each phase of a step, and the share of the CPUs that the process got."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mtrl.utils.machine import cpu_times, free_share


class Clock:
    """`with clock("generate"): ..` times a phase, which may occur several times; `metrics` returns seconds, peaks and
    rates of the whole step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_gb: dict[str, float] = {}
        self._begin, self._cpu, self._machine = time.perf_counter(), time.process_time(), cpu_times()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        yield
        if on_gpu:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else resident_peak_gb()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
        self.peak_gb[phase] = max(self.peak_gb.get(phase, 0.0), peak)

    def metrics(self, tokens: int, samples: int, devices: int = 1) -> dict[str, float]:
        total = time.perf_counter() - self._begin
        values = {f"perf/seconds_{phase}": seconds for phase, seconds in self.seconds.items()}
        values |= {f"perf/peak_gb_{phase}": peak for phase, peak in self.peak_gb.items()}
        if devices == 1 and not torch.cuda.is_available():  # with several processes the driver only waits
            values |= self._cpu_shares(total - self.seconds.get("reward", 0.0))
        return values | {
            "perf/seconds_step": total,
            "perf/tokens_per_second": tokens / total,
            "perf/samples_per_second": samples / total,
            "perf/throughput": tokens / total / devices,
        }

    def _cpu_shares(self, seconds: float) -> dict[str, float]:
        """The share of CPU time that our threads got, and the share of all CPUs that was idle. Waiting for rewards does
        not count."""
        got = (time.process_time() - self._cpu) / max(seconds, 1e-9) / torch.get_num_threads()
        free = free_share(self._machine)
        return {"perf/cpu_share": got} | ({} if free is None else {"perf/cpu_free": free})


def resident_peak_gb() -> float:
    """Peak memory of the process so far: CPUs report no peak per phase."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
