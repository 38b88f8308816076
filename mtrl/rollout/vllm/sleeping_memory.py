"""Memory of a vLLM engine that is closed while it sleeps."""

from __future__ import annotations


def free_while_asleep() -> None:
    """Maps memory that sleeps for the moment in which it is freed; call it before an engine is closed.

    Why: vLLM (0.32) unmaps memory when the engine falls asleep, and once more when it is freed: "CUDA Error: invalid
    argument at cumem_allocator.cpp", for the driver refuses to unmap what is not mapped. Waking the engine before would
    need room for all of it. Unnecessary once vLLM itself skips what sleeps, as it does on ROCm.
    """
    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator.instance
    if allocator is None:
        return
    free = cumem.CuMemAllocator._python_free_callback

    def map_and_free(address: int) -> cumem.HandleType:
        data = allocator.pointer_to_data[address]
        if data.is_asleep:
            cumem.create_and_map(data.handle)
            data.is_asleep = False
        return free(allocator, address)

    allocator.python_free_callback = map_and_free  # the extension itself holds no reference
    cumem.init_module(allocator.python_malloc_callback, map_and_free)
