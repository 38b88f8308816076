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
    """The medians of some rounds after a warm-up, one of each in turn: a device that grows slower under load is no
    better to the first than to the last."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            wait()
            begin = time.perf_counter()
            work()
            wait()
            if number:
                taken[name].append(time.perf_counter() - begin)
    return {name: round(statistics.median(times), 4) for name, times in taken.items()}


@contextmanager
def peak_gb(into: dict[str, float], name: str) -> Iterator[None]:
    """The most memory held on the device meanwhile; nothing is written without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield
    if torch.cuda.is_available():
        into[name] = round(torch.cuda.max_memory_allocated() / 2**30, 2)


def held_gb() -> dict[str, float]:
    """What is held on the device now: by tensors, and by everybody, what torch keeps to use again and graphs included;
    nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    held = {"allocated_gb": torch.cuda.memory_allocated(), "device_used_gb": total - free}
    return {name: round(size / 2**30, 3) for name, size in held.items()}


@contextmanager
def compute_device(gib: float | None) -> Iterator[None]:
    """The GPU as if it had so much memory; None: as it is. The rest is taken from the driver and not used, so that
    torch's allocator, the engine's buffers past it, graphs, workspaces and CUDA's own context share what is left, as
    they would on a smaller card. (A cap of torch's allocator would leave the others out.)"""
    if gib is None:
        yield
        return
    device = torch.device("cuda")
    torch.zeros(1, device=device)  # the driver's calls need torch's context
    driver, total = Driver(device), torch.cuda.mem_get_info()[1]
    rest = int(total - gib * 2**30) // driver.granularity * driver.granularity
    taken = driver.create(rest) if rest > 0 else None
    if taken is None:
        raise SystemExit(f"the device has not {gib:g} GiB and as much more as would have to be put aside")
    try:
        yield
    finally:
        driver.release(taken)


def give_back() -> None:
    """Frees what nobody refers to, for whoever comes next on the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compiled_graphs() -> int:
    """How many graphs torch.compile has made so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
