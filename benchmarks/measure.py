"""Seconds and peaks of device memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], rounds: int = 3, warm_up: int = 1) -> float:
    """The median of some rounds after a warm-up."""
    for _ in range(warm_up):
        work()
    taken = []
    for _ in range(rounds):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - begin)
    return round(statistics.median(taken), 4)


@contextmanager
def peak_gb(into: dict[str, float], name: str) -> Iterator[None]:
    """The most memory held on the device meanwhile; nothing is written without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield
    if torch.cuda.is_available():
        into[name] = round(torch.cuda.max_memory_allocated() / 2**30, 2)


def compiled_graphs() -> int:
    """How many graphs torch.compile has made so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
