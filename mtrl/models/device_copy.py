"""Copies to the device that do not wait for it, and copies of what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

STAGE = 32 << 20  # bytes of each of the two pinned buffers that tensors of a GPU come through

Pair = tuple[Tensor, Tensor]  # a tensor and its copy
Piece = tuple[Tensor, Tensor, int]  # bytes of a tensor, those of its copy, and where they stand in a buffer


def to_device(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    """A CPU tensor for the device, in turn with what is already asked of it.

    A plain `.to` waits until the device has done all its work, and then the device waits for the next piece.
    """
    device = torch.device(device or "cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_main_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in main memory, which later changes of the tensors leave alone.

    A plain copy of a GPU's tensor goes page by page through a buffer of the driver, on one processor; 42 GiB took 36 s.
    Here the device fills one pinned buffer while all processors empty the other. The buffers go back to torch, which
    keeps them for the next call: to pin memory takes longer than to use it.
    """
    staged = [tensor.is_cuda and tensor.is_contiguous() for tensor in tensors]
    copies = [
        torch.empty_like(tensor, device="cpu") if through else tensor.detach().to("cpu", copy=True)
        for tensor, through in zip(tensors, staged, strict=True)
    ]
    pairs = [(tensor, copy) for tensor, copy, through in zip(tensors, copies, staged, strict=True) if through]
    if pairs:
        device = pairs[0][0].device
        buffers = [torch.empty(STAGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        stage(pairs, buffers, lambda: torch.cuda.current_stream(device).record_event().synchronize)
    return copies


def stage(pairs: Iterable[Pair], buffers: Sequence[Tensor], mark: Callable[[], Callable[[], None]]) -> None:
    """Copies through two buffers of bytes in turn. `mark` is asked when a buffer's copies are under way, and gives what
    waits for them."""

    def empty(arrived: Callable[[], None], buffer: Tensor, pieces: Sequence[Piece]) -> None:
        arrived()
        for _, target, place in pieces:
            target.copy_(buffer[place : place + len(target)])

    before: tuple[Callable[[], None], Tensor, Sequence[Piece]] | None = None
    for number, pieces in enumerate(rounds(pairs, len(buffers[0]))):
        buffer = buffers[number % 2]  # emptied already: it was the one before the one before
        for source, _, place in pieces:
            buffer[place : place + len(source)].copy_(source, non_blocking=True)
        filled = mark(), buffer, pieces
        if before is not None:
            empty(*before)
        before = filled
    if before is not None:
        empty(*before)


def rounds(pairs: Iterable[Pair], size: int) -> Iterator[list[Piece]]:
    """All bytes of the tensors in order, each list as many as a buffer of that size holds: large tensors are cut, and
    small ones go together."""
    pieces: list[Piece] = []
    used = 0
    for source, target in (map(as_bytes, pair) for pair in pairs):
        while len(source):
            if used == size:
                yield pieces
                pieces, used = [], 0
            count = min(size - used, len(source))
            pieces.append((source[:count], target[:count], used))
            source, target, used = source[count:], target[count:], used + count
    if pieces:
        yield pieces


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)
