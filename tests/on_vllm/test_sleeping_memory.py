"""An engine that is closed while it sleeps: vLLM's own bookkeeping, on a driver that is as strict as CUDA's."""

import pytest
import torch
from vllm_engines import INSTALLED

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

SIZE = 2**21


class Driver:
    """What the C extension does with the driver; memory may be unmapped only while it is mapped."""

    def __init__(self):
        self.mapped, self.errors, self.most = set(), [], 0

    def init_module(self, malloc, free):
        self.malloc_callback, self.free_callback = malloc, free

    def create_and_map(self, device, size, address, handle):
        assert address not in self.mapped
        self.mapped.add(address)
        self.most = max(self.most, len(self.mapped))

    def unmap_and_release(self, device, size, address, handle):
        if address in self.mapped:
            self.mapped.remove(address)
        else:
            self.errors.append("CUDA Error: invalid argument")

    def malloc(self, address):
        self.create_and_map(0, SIZE, address, address + 1)
        self.malloc_callback((0, SIZE, address, address + 1))

    def free(self, address):
        self.unmap_and_release(*self.free_callback(address))


@pytest.fixture
def sleeping(monkeypatch):
    """A driver and an allocator with three allocations, of which the last was made after the others fell asleep."""
    from vllm.device_allocator import cumem

    driver, allocator = Driver(), cumem.CuMemAllocator()
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    monkeypatch.setattr(cumem, "init_module", driver.init_module)
    monkeypatch.setattr(cumem, "python_create_and_map", driver.create_and_map)
    monkeypatch.setattr(cumem, "python_unmap_and_release", driver.unmap_and_release)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    driver.init_module(allocator.python_malloc_callback, allocator.python_free_callback)
    for address in (SIZE, 2 * SIZE):
        driver.malloc(address)
    allocator.sleep(offload_tags=())
    driver.malloc(3 * SIZE)
    assert driver.mapped == {3 * SIZE}
    return driver, allocator


def test_as_it_is_sleeping_memory_cannot_be_freed(sleeping):
    """Once this fails, `sleeping_memory.py` is no longer needed."""
    driver, _ = sleeping
    driver.free(SIZE)
    assert driver.errors == ["CUDA Error: invalid argument"]


def test_sleeping_memory_is_mapped_just_before_it_is_freed(sleeping):
    from mtrl.rollout.vllm.sleeping_memory import map_before_freeing

    driver, allocator = sleeping
    driver.most = 0
    for _ in range(2):  # two engines
        map_before_freeing(allocator)
        assert driver.free_callback is allocator.python_free_callback, "the extension holds no reference"
    for address in (SIZE, 3 * SIZE, 2 * SIZE):
        driver.free(address)
    assert driver.errors == [] and driver.mapped == set() and allocator.pointer_to_data == {}
    assert driver.most == 2, "the one that was awake, and one at a time"
