"""The memory of a vLLM engine that sleeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's tags of its memory
MEMORY = frozenset({WEIGHTS, CACHE})
SMALL_BLOCK, SMALL_TENSOR = 2**21, 2**20  # bytes: torch puts tensors up to 1 MiB into blocks of 2 MiB, others elsewhere
Span = tuple[int, int]  # an address and a number of bytes


def keep_backups() -> Backups | None:
    """Call it once an engine with `enable_sleep_mode` has started; None if engine_kwargs has chosen another backend for
    sleep."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    if allocator is None:
        return None
    map_before_freeing(allocator)
    return Backups(allocator)


class Backups:
    """The weights of a sleeping engine in CPU memory, kept there while it is awake.

    Why: vLLM (0.32) copies its weights to CPU memory whenever it falls asleep, and back when it wakes, and then forgets
    the copy. Of the two naps in a step, only the one after new weights has something to copy, and an engine that wakes
    for new weights has nothing to restore where they go.
    """

    def __init__(self, allocator: Any) -> None:
        self.allocator, self.are_current = allocator, True
        self._copies: dict[int, Any] = {}  # by address
        self._wake_up, self._sleep = allocator.wake_up, allocator.sleep
        allocator.wake_up, allocator.sleep = self.wake_up, self.sleep

    def discard(self, overwritten: Iterable[Span]) -> None:
        """Forgets the copies of blocks that will hold nothing but new weights. Call it before the engine wakes."""
        spans = sorted(overwritten)
        for block in self._weights().values():
            _, size, address, _ = block.handle
            if block.is_asleep and is_filled((address, size), spans):
                block.cpu_backup_tensor, self.are_current = None, False

    def wake_up(self, tags: list[str] | None = None) -> None:
        for place, block in self._weights().items():
            if block.is_asleep:
                self._copies[place] = block.cpu_backup_tensor
        self._wake_up(tags)

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        weights = self._weights()
        if self.are_current and self._copies.keys() == weights.keys():
            self._sleep(tuple(tag for tag in offload_tags if tag != WEIGHTS))
            for place, block in weights.items():
                block.cpu_backup_tensor = self._copies[place]
        else:
            self._copies.clear()  # the new ones take their memory
            self._sleep(offload_tags)
            self.are_current = True

    def _weights(self) -> dict[int, Any]:
        return {place: block for place, block in self.allocator.pointer_to_data.items() if block.tag == WEIGHTS}


def is_filled(block: Span, spans: Iterable[Span]) -> bool:
    """Whether tensors at these places, in their order, leave no room in a block for a tensor of its kind."""
    begin, size = block
    end, gaps = begin, []
    for start, length in spans:
        if begin <= start < begin + size:
            gaps.append(start - end)
            end = start + length
    return size > SMALL_BLOCK and max(*gaps, 0, begin + size - end) <= SMALL_TENSOR


def map_before_freeing(allocator: Any) -> None:
    """Lets sleeping memory be freed.

    Why: vLLM (0.32) unmaps memory when the engine falls asleep, and once more when it is freed, which the driver
    refuses ("CUDA Error: invalid argument at cumem_allocator.cpp"). Runs close an engine that sleeps. To wake it first
    would need room for all of its memory; here one allocation after the other is mapped, just before it is freed.
    Unnecessary once vLLM leaves out what is unmapped already, as it does on ROCm.
    """
    from vllm.device_allocator import cumem

    free = cumem.CuMemAllocator._python_free_callback

    def map_and_free(address: int) -> cumem.HandleType:
        data = allocator.pointer_to_data[address]
        if data.is_asleep:
            cumem.create_and_map(data.handle)
            data.is_asleep = False
        return free(allocator, address)

    allocator.python_free_callback = map_and_free  # for later pools; and the extension itself holds no reference
    cumem.init_module(allocator.python_malloc_callback, map_and_free)
