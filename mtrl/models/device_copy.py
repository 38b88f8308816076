"""Copies to the device and scatters on it that do not wait for it, and fast copies back to CPU memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

BUFFER_BYTES = 32 << 20  # size of each of the two pinned buffers

Pair = tuple[Tensor, Tensor]  # a tensor and its copy
Piece = tuple[Tensor, Tensor, int]  # bytes of a tensor, those of its copy, and their offset in a buffer


def to_device(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    """Copy a CPU tensor to the device, queued behind the work it already has.

    A plain `.to` waits until the device has done all its work, and then the device waits for the next piece.
    """
    device = torch.device(device or "cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def queue_cpu_copy(tensor: Tensor) -> Tensor:
    """A copy in CPU memory, pinned for a GPU, that nothing waits for: only copies back to the device, which are queued
    behind it, may read it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=True)


def put_rows(tensor: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """The tensor [*mask, ..] with its rows where the mask is set, which is on the CPU, replaced; gradients flow.

    The backward pass of `masked_scatter` would wait for the device to count the mask.
    """
    index = to_device(mask.flatten().nonzero()[:, 0], tensor.device)
    return tensor.flatten(0, mask.dim() - 1).index_copy(0, index, rows).view(tensor.shape)


def unpack_rows(values: Tensor, mask: Tensor) -> Tensor:
    """[M, ..] -> [N, T, ..] where the mask is set, 0 elsewhere; on the CPU, without gradients."""
    unpacked = torch.zeros(*mask.shape, *values.shape[1:], dtype=values.dtype)
    unpacked[mask] = values
    return unpacked


def unpack(values: Tensor, mask: Tensor) -> Tensor:
    """Scatter values [M] to where the mask [N, T], on the CPU, is set, 0 elsewhere; gradients flow."""
    return put_rows(values.new_zeros(mask.shape), mask, values)


def copy_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in CPU memory, which do not follow later changes of the tensors.

    A plain copy from a GPU goes page by page through a buffer of the driver, on one processor; 42 GiB took 36 s. Here
    the device fills one pinned buffer while all processors empty the other. The buffers go back to torch, which keeps
    them for the next call: pinning memory takes longer than using it.
    """
    staged = [tensor.is_cuda and tensor.is_contiguous() for tensor in tensors]
    copies = [
        torch.empty_like(tensor, device="cpu") if through else tensor.detach().to("cpu", copy=True)
        for tensor, through in zip(tensors, staged, strict=True)
    ]
    pairs = [(tensor, copy) for tensor, copy, through in zip(tensors, copies, staged, strict=True) if through]
    if pairs:
        device = pairs[0][0].device
        buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        copy_through_buffers(pairs, buffers, lambda: torch.cuda.current_stream(device).record_event().synchronize)
    return copies


def copy_through_buffers(
    pairs: Iterable[Pair], buffers: Sequence[Tensor], record: Callable[[], Callable[[], None]]
) -> None:
    """Copy through two buffers of bytes in turn. `record` is called after the copies into a buffer are queued; the
    function it returns waits for them."""

    def empty(wait: Callable[[], None], buffer: Tensor, pieces: Sequence[Piece]) -> None:
        wait()
        for _, target, offset in pieces:
            target.copy_(buffer[offset : offset + len(target)])

    before: tuple[Callable[[], None], Tensor, Sequence[Piece]] | None = None
    for number, pieces in enumerate(fill_buffers(pairs, len(buffers[0]))):
        buffer = buffers[number % 2]  # emptied in the previous iteration
        for source, _, offset in pieces:
            buffer[offset : offset + len(source)].copy_(source, non_blocking=True)
        filled = record(), buffer, pieces
        if before is not None:
            empty(*before)
        before = filled
    if before is not None:
        empty(*before)


def fill_buffers(pairs: Iterable[Pair], size: int) -> Iterator[list[Piece]]:
    """All bytes of the tensors in order, one list per buffer of `size` bytes: large tensors are cut, small ones share a
    buffer."""
    pieces: list[Piece] = []
    used = 0
    for source, target in (map(view_bytes, pair) for pair in pairs):
        while len(source):
            if used == size:
                yield pieces
                pieces, used = [], 0
            count = min(size - used, len(source))
            pieces.append((source[:count], target[:count], used))
            source, target, used = source[count:], target[count:], used + count
    if pieces:
        yield pieces


def view_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)
