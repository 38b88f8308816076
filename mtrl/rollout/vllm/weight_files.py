"""Weights on their way to another process: a checkpoint file, in shared memory if there is room."""

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


def make_folder(nbytes: int) -> Path:
    """A folder that only this user can read: in shared memory if the file fits there twice (the old one is removed when
    the new one is complete), else among temporary files. Removes folders of killed runs."""
    for folder in SHARED_MEMORY.glob(f"{PREFIX}*"):
        remove_if_abandoned(folder)
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * nbytes
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY if fits else None))
    lock = (folder / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    _locks.append(lock)
    return folder


def remove_if_abandoned(folder: Path) -> None:
    """The process that made it holds its lock until it ends, in whatever way."""
    with suppress(OSError), (folder / LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def tensor_bytes(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    return sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize


def write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Path:
    """Writes the complete file or none, in the engine's dtype, with tied weights under each name."""
    seen: set[int] = set()
    copies = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        if copy.data_ptr() in seen:
            copy = copy.clone()
        seen.add(copy.data_ptr())
        copies[name] = copy
    target = folder / FILE
    partial = target.with_suffix(".partial")
    save_file(copies, partial, metadata={"format": "pt"})
    os.replace(partial, target)
    return target
