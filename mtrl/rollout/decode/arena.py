"""Device memory that is freed while the engine sleeps and mapped again at the same addresses.

A CUDA graph holds addresses, so its buffers must not move; but during an update their memory belongs to the trainer.
The addresses stay reserved, and memory is mapped to them or not (by the driver's virtual memory calls, which torch's
allocator of expandable segments uses as well).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes; tensor cores want 16, a cache line has 128
GROWTH = 64 * 2**20  # bytes, at least, that are requested from the driver at a time
OUT_OF_MEMORY = 2  # the driver's error code


class Arena:
    """Allocates tensors. This one is plain: tensors live until nobody holds them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0  # allocated

    def empty(self, dtype: torch.dtype, *size: int) -> Tensor:
        self.bytes += round_up(torch.Size(size).numel() * dtype.itemsize, ALIGNMENT)
        return torch.empty(size, dtype=dtype, device=self.device)

    def map_memory(self) -> None:
        """Gives the tensors memory again; their values are lost."""

    def unmap_memory(self) -> None:
        """Frees the tensors' memory: they must not be used until `map_memory`."""


class CudaArena(Arena):
    """On a GPU; reserves addresses for all of the device's memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.zeros(1, device=device)  # the driver's calls need torch's context
        self.driver = Driver(device)
        self.reserved = round_up(torch.cuda.mem_get_info(device)[1], self.driver.granularity)
        self.start = self.driver.reserve(self.reserved)
        self.handles: dict[int, tuple[int, int]] = {}  # offset -> size and the driver's handle
        self.mapped = 0

    def empty(self, dtype: torch.dtype, *size: int) -> Tensor:
        count = torch.Size(size).numel() * dtype.itemsize
        offset = self.bytes
        self.bytes += round_up(count, ALIGNMENT)
        if self.bytes > self.mapped:
            self._map(self.mapped, round_up(max(self.bytes - self.mapped, GROWTH), self.driver.granularity))
        flat = torch.as_tensor(Bytes(self.start + offset, count, self), device=self.device)
        return flat.view(dtype).view(size)

    def map_memory(self) -> None:
        if self.bytes and not self.handles:
            self._map(0, round_up(self.bytes, self.driver.granularity))

    def unmap_memory(self) -> None:
        if not self.handles:
            return
        torch.cuda.synchronize(self.device)
        for offset, (size, handle) in self.handles.items():
            self.driver.unmap(self.start + offset, size, handle)
        self.handles, self.mapped = {}, 0

    def _map(self, offset: int, size: int) -> None:
        """Empties torch's cache only if nothing else is free."""
        handle = self.driver.create(size)
        if handle is None:
            torch.cuda.empty_cache()
            handle = self.driver.create(size)
        if handle is None:
            free = torch.cuda.mem_get_info(self.device)[0]
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: generation needs {size / 2**30:,.2f} GiB more, {free / 2**30:,.2f} GiB are free."
            )
        self.driver.map(self.start + offset, size, handle)
        self.handles[offset] = size, handle
        self.mapped = offset + size

    def __del__(self) -> None:
        if hasattr(self, "handles") and not sys.is_finalizing():
            self.unmap_memory()
            self.driver.free(self.start, self.reserved)


class Bytes:
    """A part of an arena, for torch to wrap as foreign memory; the tensor keeps the arena alive."""

    def __init__(self, address: int, count: int, arena: Arena) -> None:
        self.arena = arena
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the CUDA driver
class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class Driver:
    """The driver calls for the memory of one device."""

    ON_DEVICE, PINNED, READ_AND_WRITE = 1, 1, 3

    def __init__(self, device: torch.device) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        here = _Location(self.ON_DEVICE, torch.cuda.current_device() if device.index is None else device.index)
        self.properties = _Properties(self.PINNED, 0, here)
        self.access = _Access(here, self.READ_AND_WRITE)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self.properties), 0)
        self.granularity = granularity.value

    def _call(self, name: str, *arguments: Any, allowed: Iterable[int] = ()) -> int:
        status = getattr(self.library, name)(*arguments)
        if status and status not in allowed:
            raise RuntimeError(f"{name} of the CUDA driver failed with {status}")
        return status

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), _size(size), _size(0), _long(0), _long(0))
        return address.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", _long(address), _size(size))

    def create(self, size: int) -> int | None:
        """None if the device has no room."""
        handle, properties = ctypes.c_uint64(), ctypes.byref(self.properties)
        status = self._call(
            "cuMemCreate", ctypes.byref(handle), _size(size), properties, _long(0), allowed=(OUT_OF_MEMORY,)
        )
        return None if status else handle.value

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemMap", _long(address), _size(size), _size(0), _long(handle), _long(0))
        self._call("cuMemSetAccess", _long(address), _size(size), ctypes.byref(self.access), _size(1))

    def unmap(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemUnmap", _long(address), _size(size))
        self.release(handle)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", _long(handle))


_size, _long = ctypes.c_size_t, ctypes.c_uint64


def make_arena(device: torch.device) -> Arena:
    return CudaArena(device) if device.type == "cuda" else Arena(device)


def round_up(n: int, multiple: int) -> int:
    """
    >>> round_up(5, 4), round_up(8, 4)
    (8, 8)
    """
    return -(-n // multiple) * multiple
