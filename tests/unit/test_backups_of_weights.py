"""Weights of a vLLM engine that sleeps, with a fake of vLLM's allocator: CUDA alone has the real one
(tests/gpu/test_vllm_cuda.py)."""

from dataclasses import dataclass, field

import pytest
import torch

from mtrl.rollout.vllm.sleeping_memory import CACHE, WEIGHTS, Backups, is_filled

LOST = -1.0
MIB = 2**20
SIZE = 12 * MIB  # the driver's, of each block


@dataclass
class FakeBlock:
    tag: str
    memory: torch.Tensor
    handle: tuple
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
    return FakeAllocator({place: make_block(place, tag) for place, tag in tags.items()})


def make_block(place, tag=WEIGHTS):
    return FakeBlock(tag, torch.full((2,), float(place)), (0, SIZE, place * MIB, None))


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
    allocator.pointer_to_data[80] = make_block(80)
    allocator.sleep(OFFLOADED)
    allocator.wake_up()
    assert contents(allocator)[80] == [80.0, 80.0] and contents(allocator)[32] == [32.0, 32.0]


def test_nothing_is_restored_where_new_weights_go(allocator):
    backups = Backups(allocator)
    allocator.sleep(OFFLOADED)
    backups.discard({(16 * MIB, SIZE), (48 * MIB, SIZE), (64 * MIB, SIZE)})  # of weights only the first
    allocator.wake_up([WEIGHTS])
    assert contents(allocator)[16] == [LOST, LOST] and contents(allocator)[32] == [32.0, 32.0]
    allocator.pointer_to_data[16].memory.fill_(100.0)
    for _ in range(2):
        allocator.sleep(OFFLOADED)
        allocator.wake_up()
        assert contents(allocator)[16] == [100.0, 100.0] and contents(allocator)[32] == [32.0, 32.0]
        assert contents(allocator)[64] == [64.0, 64.0]
    assert allocator.copied.count(WEIGHTS) == 4, "once after the start, once after new weights"


def test_memory_that_is_awake_keeps_what_it_has(allocator):
    backups = Backups(allocator)
    backups.discard({(16 * MIB, SIZE)})
    assert backups.are_current
    allocator.sleep(OFFLOADED)
    allocator.wake_up()
    assert contents(allocator)[16] == [16.0, 16.0]


@pytest.mark.parametrize(
    ("spans", "filled"),
    [
        ([(100, 12)], True),
        ([(100, 11)], True),
        ([(100, 5), (106, 6)], True),
        ([(101, 5), (107, 4)], True),
        ([(80, 20), (100, 12), (112, 12)], True),
        ([], False),
        ([(100, 10)], False),
        ([(102, 10)], False),
        ([(100, 5), (107, 5)], False),
        ([(88, 12), (112, 12)], False),
    ],
)
def test_a_block_is_filled_if_no_other_tensor_has_room_in_it(spans, filled):
    """In MiB: in such blocks torch puts tensors of more than one."""
    assert is_filled((100 * MIB, SIZE), [(start * MIB, length * MIB) for start, length in spans]) == filled


def test_a_block_of_small_tensors_may_hold_others():
    assert not is_filled((100 * MIB, 2 * MIB), [(100 * MIB, 2 * MIB)])
