"""Weights on their way to another process: a checkpoint file, in shared memory if there is room."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from mtrl.models.state_dicts import Form, weight_forms

DTYPE_NAMES = {  # in safetensors files
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
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


def count_bytes(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """The size of their file."""
    return sum(count_form_bytes(form) for form in stored_forms(tensors, dtype).values())


def write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Path:
    """Writes the complete file or none, in the engine's dtype, with tied weights under each name. Each tensor is read
    once, in order, and written before the next one: they may be gathered or received one by one."""
    forms, target = stored_forms(tensors, dtype), folder / FILE
    header, places = make_header(forms)
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(header)
        for name, tensor in tensors.items():
            stored = tensor.detach().to("cpu", forms[name][0]).contiguous()
            assert tuple(stored.shape) == forms[name][1], f"{name} is {tuple(stored.shape)}, not {forms[name][1]}"
            file.seek(len(header) + places[name])
            file.write(stored.reshape(-1).view(torch.uint8).numpy().data)
    os.replace(partial, target)
    return target


def stored_forms(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Form]:
    forms = weight_forms(tensors).items()
    return {name: (dtype if own.is_floating_point else own, shape) for name, (own, shape) in forms}


def make_header(forms: Mapping[str, Form]) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and where each tensor begins after it: wide numbers first, so that all are
    aligned."""
    places: dict[str, int] = {}
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in sorted(forms.items(), key=lambda item: -item[1][0].itemsize):
        places[name], end = end, end + count_form_bytes((dtype, shape))
        content[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [places[name], end]}
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def count_form_bytes(form: Form) -> int:
    dtype, shape = form
    return math.prod(shape) * dtype.itemsize
