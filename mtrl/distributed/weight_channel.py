"""Weights on their way from the ranks to dedicated engines, through Ray's object store.

The first rank puts each weight there once, as the ranks gather it, and all engines read the same memory. Only a few are
on their way at a time, so neither the store nor any process holds a whole model for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrl.models.state_dicts import Form

IN_FLIGHT = 2  # weights that engines have not received yet


@dataclass(frozen=True)
class WeightChannel:
    """From the first rank to the engines: every message arrives at each of them, in order."""

    engines: list[Any]

    def __call__(self, messages: Iterable[tuple[Any, Tensor | None]]) -> None:
        import ray

        waiting: deque[list[Any]] = deque()
        for head, tensor in messages:
            form, stored = (None, None) if tensor is None else (tensor_form(tensor), ray.put(raw_bytes(tensor)))
            waiting.append([engine.receive.remote(head, form, stored) for engine in self.engines])
            if len(waiting) > IN_FLIGHT:
                ray.get(waiting.popleft())
        for each in waiting:
            ray.get(each)


def tensor_form(tensor: Tensor) -> Form:
    return tensor.dtype, tuple(tensor.shape)


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """The tensor as bytes: numpy has no bf16, and Ray maps only numpy arrays into memory without a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def from_bytes(form: Form, stored: np.ndarray) -> Tensor:
    """A copy: the store's memory is read-only."""
    dtype, shape = form
    return torch.from_numpy(stored.copy()).view(dtype).reshape(shape)
