"""Weights on their way from the ranks that hold them together to engines in other processes, through Ray's store.

The first rank puts each weight there once, as the ranks gather it, and all engines read the same memory. No more than a
few are on their way at a time: neither the store nor any main memory holds a whole model for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ON_THE_WAY = 2  # weights that engines have not taken yet


@dataclass(frozen=True)
class WeightChannel:
    """To the engines, for the first rank: what goes in here arrives at each of them, in order."""

    engines: list[Any]

    def __call__(self, sent: Iterable[tuple[Any, Tensor | None]]) -> None:
        import ray

        waiting: deque[list[Any]] = deque()
        for head, tensor in sent:
            form, stored = (None, None) if tensor is None else (tensor_format(tensor), ray.put(raw_bytes(tensor)))
            waiting.append([engine.arrive.remote(head, form, stored) for engine in self.engines])
            if len(waiting) > ON_THE_WAY:
                ray.get(waiting.popleft())
        for each in waiting:
            ray.get(each)


Form = tuple[torch.dtype, tuple[int, ...]]


def tensor_format(tensor: Tensor) -> Form:
    return tensor.dtype, tuple(tensor.shape)


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """As numpy knows them: it has no bf16, and arrays alone are read in the store where they lie."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def from_bytes(form: Form, stored: np.ndarray) -> Tensor:
    """A copy: the store's memory is not to be written to."""
    dtype, shape = form
    return torch.from_numpy(stored.copy()).view(dtype).reshape(shape)
