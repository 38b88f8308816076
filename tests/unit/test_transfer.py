"""Copies of a device's tensors, through buffers that are smaller and larger than they are."""

import pytest
import torch
from helpers import same

from mtrl.models.device_copy import copy_through_buffers, copy_to_cpu, fill_buffers


def tensors():
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(5, 7, generator=draw),
        torch.tensor(3.0),
        torch.randn(11, generator=draw).bfloat16(),
        torch.empty(0),
        torch.arange(9).view(3, 3),
        torch.tensor([True, False, True]),
    ]


@pytest.mark.parametrize("size", [1, 7, 64, 141, 100_000])
def test_every_byte_arrives(size):
    given, log = tensors(), []
    copies = [torch.full_like(tensor, 1) for tensor in given]
    buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]

    def mark():
        log.append("begun")
        return lambda: log.append("waited")

    copy_through_buffers(zip(given, copies, strict=True), buffers, mark)
    for tensor, copy in zip(given, copies, strict=True):
        same(copy, tensor)
    number = -(-sum(tensor.nbytes for tensor in given) // size)
    assert log.count("begun") == log.count("waited") == number
    assert log[:3] == (["begun", "begun", "waited"] if number > 1 else ["begun", "waited"]), "one fills, one empties"


class Late:
    """A buffer of bytes whose copies arrive only after a wait, like a device's."""

    def __init__(self, size):
        self.bytes, self.under_way = torch.zeros(size, dtype=torch.uint8), []

    def __len__(self):
        return len(self.bytes)

    def __getitem__(self, place):
        return self.Slice(self, place)

    class Slice(torch.Tensor):
        @staticmethod
        def __new__(cls, buffer, place):
            return buffer.bytes[place].as_subclass(cls)

        def __init__(self, buffer, place):
            self.buffer = buffer

        def copy_(self, source, non_blocking):
            assert non_blocking
            self.buffer.under_way.append((self.as_subclass(torch.Tensor), source))


def test_no_buffer_is_read_before_its_copies_have_arrived():
    given = tensors()
    copies = [torch.full_like(tensor, 1) for tensor in given]
    buffers = [Late(16), Late(16)]

    def mark():
        asked = [copy for buffer in buffers for copy in buffer.under_way]
        for buffer in buffers:
            buffer.under_way.clear()
        return lambda: [place.copy_(source) for place, source in asked]

    copy_through_buffers(zip(given, copies, strict=True), buffers, mark)
    for tensor, copy in zip(given, copies, strict=True):
        same(copy, tensor)


def test_a_buffer_takes_many_small_tensors_and_a_large_one_many_buffers():
    small, large = [torch.ones(2) for _ in range(4)], torch.ones(16)
    lists = list(fill_buffers([(tensor, tensor) for tensor in (*small, large)], 32))
    assert [[len(source) for source, _, _ in pieces] for pieces in lists] == [[8, 8, 8, 8], [32], [32]]


def test_without_a_gpu_it_is_a_plain_copy():
    given = [*tensors(), torch.randn(4, 6).T, torch.nn.Parameter(torch.ones(3))]
    for tensor, copy in zip(given, copy_to_cpu(given), strict=True):
        same(copy, tensor.detach())
        assert copy.stride() == tensor.stride() and not copy.requires_grad
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
