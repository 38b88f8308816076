"""Count the memory of a pass tensor by tensor.

On a GPU the allocator reports it. On a CPU nothing does: the memory of a process includes blocks that its allocator
keeps. The count agrees with torch's own MemTracker to the byte (by test), which has no peaks by moment and takes three
times as long.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of tensors that operations create, while their storage lives; `fake`: of fake tensors only.

    `peaks` holds the most bytes alive at once in each moment; `begin` starts the next moment.
    """

    def __init__(self, fake: bool = False) -> None:
        super().__init__()
        self.kind: type[Tensor] = FakeTensor if fake else Tensor
        self.now, self.moment = 0, ""
        self.peaks: dict[str, int] = defaultdict(int)
        self.storages: dict[int, weakref.ref[Any]] = {}

    @property
    def peak(self) -> int:
        return max(self.peaks.values(), default=0)

    def begin(self, moment: str) -> None:
        self.moment = moment
        self.peaks[moment] = max(self.peaks[moment], self.now)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.kind is FakeTensor and function in INDEXING:  # fake tensors cannot tell how many positions a mask has
            masks_as_indices = [
                index
                for each in args[1]
                for index in (each.nonzero().unbind(1) if each is not None and each.dtype == torch.bool else (each,))
            ]
            args = (args[0], masks_as_indices, *args[2:])
        self._track((args, kwargs), created=False)  # an earlier tensor that is changed in place is not new
        result = function(*args, **(kwargs or {}))
        self._track(result, created=True)
        return result

    def _track(self, values: Any, created: bool) -> None:
        for tensor in (value for value in tree_leaves(values) if isinstance(value, self.kind)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if created else 0
            if key not in self.storages:
                self.storages[key] = weakref.ref(storage, partial(self._untrack, key, size))
                self.now += size
                self.peaks[self.moment] = max(self.peaks[self.moment], self.now)

    def _untrack(self, key: int, size: int, _: object) -> None:
        del self.storages[key]
        self.now -= size
