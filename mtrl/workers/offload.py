"""Tensors that lie in main memory while nobody needs them on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mtrl.models.parallel.fsdp import own_part

PIECE = 2**30  # bytes of weights whose optimizer state is on the device at once; a larger weight is a piece by itself
ALIGNMENT = 512


class OffloadedTensors:
    """Brings tensors to the device for the time that somebody works with them. They are the same objects here and
    there, with the same numbers to the bit, so that whoever holds them need not know. Their places in main memory are
    kept, pinned for a GPU: to pin memory takes longer than to use it.
    """

    def __init__(self, tensors: Callable[[], Sequence[Tensor]], device: torch.device) -> None:
        self.tensors, self.device = tensors, device
        self._places: list[Tensor] = []
        self._pinned: list[torch.UntypedStorage] = []  # what is pinned may not be freed before it is let go

    @contextmanager
    def here(self) -> Iterator[None]:
        """On the device in here, in main memory afterwards."""
        self.bring()
        try:
            yield
        finally:
            self.park()
            self.give_back()

    @contextmanager
    def away(self) -> Iterator[None]:
        """In main memory in here, on the device afterwards."""
        self.park()
        self.give_back()
        try:
            yield
        finally:
            self.bring()

    def bring(self) -> None:
        for tensor in self.tensors():
            tensor.data = torch.empty_like(tensor, device=self.device).copy_(tensor, non_blocking=True)

    def park(self) -> None:
        """To main memory. What they took on the device is torch's to use again when this returns."""
        tensors = self.tensors()
        self._find_places(tensors)
        for tensor, place in zip(tensors, self._places, strict=True):
            place.copy_(tensor.detach(), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for tensor, place in zip(tensors, self._places, strict=True):
            tensor.data = place

    def give_back(self) -> None:
        """What is torch's to use again becomes the driver's, from which generation takes its room."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _find_places(self, tensors: Sequence[Tensor]) -> None:
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if kinds != [(place.shape, place.dtype) for place in self._places]:
            self._places = places_for(tensors)
            if self.device.type == "cuda" and self._places:
                self._pinned.append(self._places[0].untyped_storage())
                pin(self._pinned[-1], until=self)


def places_for(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Room for these in main memory, one after the other in one block."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    block = torch.empty(sum(sizes), dtype=torch.uint8)
    parts = block.split(sizes)
    return [part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def pin(block: torch.UntypedStorage, until: object) -> None:
    """Pins a block until its owner goes. torch's own pinned memory comes in powers of two: of large blocks up to half
    would be wasted, and pinned memory cannot be swapped."""
    driver: Any = torch.cuda.cudart()
    torch.cuda.check_error(driver.cudaHostRegister(block.data_ptr(), block.nbytes(), 0))
    weakref.finalize(until, driver.cudaHostUnregister, block.data_ptr())


def parameter_pieces(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters in their order, in pieces of up to PIECE bytes; of those that are split this rank's part counts.

    >>> [len(piece) for piece in pieces_of([torch.empty(2**28, device="meta")] * 2 + [torch.empty(9)] * 3)]
    [1, 1, 3]
    """
    pieces: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        size = own_part(parameter).nbytes
        room -= size
        if room < 0:
            pieces.append([])
            room = PIECE - size
        pieces[-1].append(parameter)
    return pieces
