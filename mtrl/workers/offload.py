"""Tensors that lie in main memory while nobody needs them on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Parked:
    """Brings tensors to the device for the time that somebody works with them. They are the same objects here and
    there, with the same numbers to the bit, so that whoever holds them need not know. Their places in main memory are
    kept, pinned for a GPU: to pin memory takes longer than to use it.
    """

    def __init__(self, tensors: Callable[[], Sequence[Tensor]], device: torch.device) -> None:
        self.tensors, self.device = tensors, device
        self._places: list[Tensor] = []

    @contextmanager
    def here(self) -> Iterator[None]:
        """On the device in here, in main memory afterwards."""
        for tensor in self.tensors():
            tensor.data = torch.empty_like(tensor, device=self.device).copy_(tensor, non_blocking=True)
        try:
            yield
        finally:
            self.park()

    def park(self) -> None:
        """To main memory; the room on the device is free when this returns."""
        tensors = self.tensors()
        self._find_places(tensors)
        for tensor, place in zip(tensors, self._places, strict=True):
            place.copy_(tensor.detach(), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for tensor, place in zip(tensors, self._places, strict=True):
            tensor.data = place
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # generation takes its room from the driver

    def _find_places(self, tensors: Sequence[Tensor]) -> None:
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if kinds != [(place.shape, place.dtype) for place in self._places]:
            pinned = self.device.type == "cuda"
            self._places = [torch.empty(shape, dtype=dtype, pin_memory=pinned) for shape, dtype in kinds]
