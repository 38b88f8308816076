"""Seconds and peaks of device memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from mtrl.rollout.decode.arena import Driver


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], rounds: int = 3) -> float:
    """The median of some rounds after a warm-up."""
    return alternating({"": work}, rounds)[""]


def alternating(works: Mapping[str, Callable[[], object]], rounds: int = 3) -> dict[str, float]:
    """The median of each function over some rounds after a warm-up. The functions take turns, so that a device that
    slows down under load does not favour the first."""
    durations: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            wait()
            begin = time.perf_counter()
            work()
            wait()
            if number:
                durations[name].append(time.perf_counter() - begin)
    return {name: round(statistics.median(times), 6) for name, times in durations.items()}


@contextmanager
def peak_gb(result: dict[str, float], name: str) -> Iterator[None]:
    """Writes the peak of device memory within the context; without a GPU, nothing."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield
    if torch.cuda.is_available():
        result[name] = round(torch.cuda.max_memory_allocated() / 2**30, 2)


def held_gb() -> dict[str, float]:
    """Device memory held now: by tensors, and in total, with torch's cache and graphs. Empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    held = {"allocated_gb": torch.cuda.memory_allocated(), "device_used_gb": total - free}
    return {name: round(size / 2**30, 3) for name, size in held.items()}


@contextmanager
def compute_device(gib: float | None) -> Iterator[None]:
    """Simulates a GPU with this much memory; None: the whole GPU. The rest is allocated from the driver and left
    unused, so that torch's allocator, the engine's own buffers, graphs, workspaces and CUDA's context share the
    remainder, as on a smaller card. (A cap of torch's allocator would not limit the others.)"""
    if gib is None:
        yield
        return
    device = torch.device("cuda")
    torch.zeros(1, device=device)  # the driver's calls need torch's context
    driver, total = Driver(device), torch.cuda.mem_get_info()[1]
    rest = int(total - gib * 2**30) // driver.granularity * driver.granularity
    reserved = driver.create(rest) if rest > 0 else None
    if reserved is None:
        raise SystemExit(f"cannot simulate a card of {gib:g} GiB: the device is too small, or its memory is in use")
    try:
        yield
    finally:
        driver.release(reserved)


def free_memory() -> None:
    """Collects garbage and empties torch's cache of device memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compiled_graphs() -> int:
    """How many graphs torch.compile has made so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
