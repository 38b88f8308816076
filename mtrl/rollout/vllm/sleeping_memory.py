"""Memory of a vLLM engine that sleeps when it is closed."""

from __future__ import annotations


def map_before_freeing() -> None:
    """Lets sleeping memory be freed; call it once an engine with `enable_sleep_mode` has started.

    Why: vLLM (0.32) unmaps memory when the engine falls asleep, and once more when it is freed, which the driver
    refuses ("CUDA Error: invalid argument at cumem_allocator.cpp"). Runs close an engine that sleeps. To wake it first
    would need room for all of its memory; here one allocation after the other is mapped, just before it is freed.
    Unnecessary once vLLM leaves out what is unmapped already, as it does on ROCm.
    """
    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator.instance
    if allocator is None:  # engine_kwargs has chosen another backend for sleep
        return
    free = cumem.CuMemAllocator._python_free_callback

    def map_and_free(address: int) -> cumem.HandleType:
        data = allocator.pointer_to_data[address]
        if data.is_asleep:
            cumem.create_and_map(data.handle)
            data.is_asleep = False
        return free(allocator, address)

    allocator.python_free_callback = map_and_free  # for later pools; and the extension itself holds no reference
    cumem.init_module(allocator.python_malloc_callback, map_and_free)
