"""Weights on their way to another process: a checkpoint's file, in shared memory where there is room."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch
from safetensors.torch import save_file
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
FILE, LOCK, PREFIX = "model.safetensors", "in-use", "mtrl-weights-"
_locks: list[TextIO] = []


def new_folder(room: int) -> Path:
    """A folder that only this user can read: in shared memory if `room` bytes fit there twice (the old file goes when
    the new one is whole), else where temporary files are. What a killed run left there is removed."""
    for left in SHARED_MEMORY.glob(f"{PREFIX}*"):
        remove_if_left(left)
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * room
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY if roomy else None))
    lock = (folder / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    _locks.append(lock)
    return folder


def remove_if_left(folder: Path) -> None:
    """Whoever made it holds its lock for as long as it lives, however it ends."""
    with suppress(OSError), (folder / LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def tensor_bytes(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    return sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize


def write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Path:
    """The whole file or none, in the dtype of the engine. Tied weights stand in it under each name."""
    seen: set[int] = set()
    ready = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        if copy.data_ptr() in seen:
            copy = copy.clone()
        seen.add(copy.data_ptr())
        ready[name] = copy
    target = folder / FILE
    partial = target.with_suffix(".partial")
    save_file(ready, partial, metadata={"format": "pt"})
    os.replace(partial, target)
    return target
