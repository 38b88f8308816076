"""Weights of a vLLM engine that sleeps, with a fake of vLLM's allocator: CUDA alone has the real one
(tests/gpu/test_vllm_cuda.py)."""

from dataclasses import dataclass, field

import pytest
import torch

from mtrl.rollout.vllm.sleeping_memory import CACHE, WEIGHTS, Backups

LOST = -1.0


@dataclass
class FakeBlock:
    tag: str
    memory: torch.Tensor
    cpu_backup_tensor: torch.Tensor | None = None
    is_asleep: bool = False


@dataclass
class FakeAllocator:
    """As vLLM's: what is not offloaded is lost, and a backup is forgotten when it has been restored."""

    pointer_to_data: dict = field(default_factory=dict)
    copied: list = field(default_factory=list)  # the tags of blocks that were copied to CPU memory

    def sleep(self, offload_tags):
        for block in self.pointer_to_data.values():
            if block.is_asleep:
                continue
            if block.tag in offload_tags:
                block.cpu_backup_tensor = block.memory.clone()
                self.copied.append(block.tag)
            block.memory.fill_(LOST)
            block.is_asleep = True

    def wake_up(self, tags=None):
        for block in self.pointer_to_data.values():
            if block.is_asleep and (tags is None or block.tag in tags):
                block.is_asleep = False
                if block.cpu_backup_tensor is not None:
                    block.memory.copy_(block.cpu_backup_tensor)
                    block.cpu_backup_tensor = None


OFFLOADED = (WEIGHTS, "runtime")


@pytest.fixture
def allocator():
    tags = {16: WEIGHTS, 32: WEIGHTS, 48: CACHE, 64: "runtime"}
    return FakeAllocator({place: FakeBlock(tag, torch.full((2,), float(place))) for place, tag in tags.items()})


def contents(allocator):
    return {place: block.memory.tolist() for place, block in allocator.pointer_to_data.items()}


def test_weights_that_did_not_change_are_copied_once(allocator):
    backups, before = Backups(allocator), contents(allocator)
    for _ in range(3):
        allocator.sleep(OFFLOADED)
        assert all(values == [LOST, LOST] for values in contents(allocator).values())
        allocator.wake_up()
        assert contents(allocator) == before | {48: [LOST, LOST]}
    assert backups.are_current
    assert allocator.copied.count(WEIGHTS) == 2 and allocator.copied.count("runtime") == 3, "which may change"


def test_new_weights_are_copied(allocator):
    backups = Backups(allocator)
    allocator.sleep(OFFLOADED)
    for number in (100.0, 200.0):
        allocator.wake_up([WEIGHTS])
        assert allocator.pointer_to_data[48].is_asleep, "keys and values are not needed to load weights"
        backups.are_current = False
        allocator.pointer_to_data[16].memory.fill_(number)
        allocator.sleep(OFFLOADED)
        allocator.wake_up()
        assert contents(allocator)[16] == [number, number] and contents(allocator)[32] == [32.0, 32.0]
        allocator.sleep(OFFLOADED)
    assert allocator.copied.count(WEIGHTS) == 6


def test_other_blocks_are_copied_again(allocator):
    """The engine has replaced a block since: no copy is of this one."""
    Backups(allocator)
    allocator.sleep(OFFLOADED)
    allocator.wake_up()
    del allocator.pointer_to_data[16]
    allocator.pointer_to_data[80] = FakeBlock(WEIGHTS, torch.full((2,), 80.0))
    allocator.sleep(OFFLOADED)
    allocator.wake_up()
    assert contents(allocator)[80] == [80.0, 80.0] and contents(allocator)[32] == [32.0, 32.0]
