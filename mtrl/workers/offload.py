"""Tensors that are in CPU memory while nobody needs them on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtrl.models.parallel.fsdp import COMPUTE_DEVICE, compute_device, local_tensor, view_weight_memory, weight_memory

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


class StayingWeights:
    """Weights of a model that stay on the device."""

    is_offloaded = False

    def onload(self) -> None:
        """Before they are read."""

    def offload(self) -> None:
        """Before another model needs the device."""

    def close(self) -> None:
        """At the end of a run."""


class OffloadedWeights(StayingWeights):
    """Weights of a model that make room for other models, sharded over ranks or not. They stay where they are until
    they are needed in the other place, so a phase that neither reads them nor needs their room costs nothing."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tensors = OffloadedTensors(partial(weight_memory, model), compute_device(model))
        self._had_device = hasattr(model, COMPUTE_DEVICE)
        setattr(model, COMPUTE_DEVICE, self.tensors.device)

    def onload(self) -> None:
        if self.is_offloaded:
            self._move(self.tensors.onload)

    def offload(self) -> None:
        if not self.is_offloaded:
            self._move(self.tensors.offload)
            self.tensors.empty_cache()

    def _move(self, move: Callable[[], None]) -> None:
        move()
        view_weight_memory(self.model)
        self.is_offloaded = not self.is_offloaded

    def close(self) -> None:
        self.onload()
        if not self._had_device:
            delattr(self.model, COMPUTE_DEVICE)


STAYING = StayingWeights()


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
