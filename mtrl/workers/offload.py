"""Tensors that are in CPU memory while nobody needs them on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mtrl.models.parallel.fsdp import local_tensor

PIECE = 2**30  # bytes of weights whose optimizer state is on the device at once; a larger weight is a piece by itself
ALIGNMENT = 512


class OffloadedTensors:
    """Moves tensors between CPU and device memory. They stay the same objects with bitwise the same values, so their
    holders need not know. Their CPU buffers are kept, pinned for a GPU, since pinning takes longer than copying.
    """

    def __init__(self, tensors: Callable[[], Sequence[Tensor]], device: torch.device) -> None:
        self.tensors, self.device = tensors, device
        self._buffers: list[Tensor] = []
        self._pinned: list[torch.UntypedStorage] = []  # pinned memory must not be freed before it is unpinned

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """On the device inside the block, in CPU memory afterwards."""
        self.onload()
        try:
            yield
        finally:
            self.offload()
            self.empty_cache()

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """In CPU memory inside the block, on the device afterwards."""
        self.offload()
        self.empty_cache()
        try:
            yield
        finally:
            self.onload()

    def onload(self) -> None:
        for tensor in self.tensors():
            tensor.data = torch.empty_like(tensor, device=self.device).copy_(tensor, non_blocking=True)

    def offload(self) -> None:
        """When this returns, torch may reuse their device memory."""
        tensors = self.tensors()
        self._prepare_buffers(tensors)
        for tensor, buffer in zip(tensors, self._buffers, strict=True):
            buffer.copy_(tensor.detach(), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for tensor, buffer in zip(tensors, self._buffers, strict=True):
            tensor.data = buffer

    def empty_cache(self) -> None:
        """Returns torch's unused device memory to the driver, from which generation allocates."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare_buffers(self, tensors: Sequence[Tensor]) -> None:
        formats = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if formats != [(buffer.shape, buffer.dtype) for buffer in self._buffers]:
            self._buffers = allocate_buffers(tensors)
            if self.device.type == "cuda" and self._buffers:
                self._pinned.append(self._buffers[0].untyped_storage())
                pin(self._pinned[-1], until=self)


def allocate_buffers(tensors: Sequence[Tensor]) -> list[Tensor]:
    """CPU memory for these tensors, in one block."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    parts = torch.empty(sum(sizes), dtype=torch.uint8).split(sizes)
    return [part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def pin(block: torch.UntypedStorage, until: object) -> None:
    """Pins a block until its owner is collected. torch's own pinned memory comes in powers of two, which would waste up
    to half of a large block."""
    driver: Any = torch.cuda.cudart()
    torch.cuda.check_error(driver.cudaHostRegister(block.data_ptr(), block.nbytes(), 0))
    weakref.finalize(until, driver.cudaHostUnregister, block.data_ptr())


def parameter_pieces(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters in their order, in pieces of up to PIECE bytes; of sharded ones this rank's shard counts.

    >>> [len(piece) for piece in parameter_pieces([torch.empty(2**28, device="meta")] * 2 + [torch.empty(9)] * 3)]
    [1, 1, 3]
    """
    pieces: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        size = local_tensor(parameter).nbytes
        room -= size
        if room < 0:
            pieces.append([])
            room = PIECE - size
        pieces[-1].append(parameter)
    return pieces
