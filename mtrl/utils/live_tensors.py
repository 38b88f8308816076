"""How much memory a pass takes, counted tensor by tensor.

On a GPU the allocator says it. On a CPU nothing else can: the memory of a process holds what its allocator keeps, too.
It agrees to the byte with torch's own MemTracker (a test holds the two together), which cannot tell moments apart.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BY_MASK = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, for as long as their storage lives; `fake`: of fake ones alone.

    `peaks` holds the most that lived at once in each moment; `begin` names the next one.
    """

    def __init__(self, fake: bool = False) -> None:
        super().__init__()
        self.kind: type[Tensor] = FakeTensor if fake else Tensor
        self.now, self.moment = 0, ""
        self.peaks: dict[str, int] = defaultdict(int)
        self.known: dict[int, weakref.ref[Any]] = {}

    @property
    def peak(self) -> int:
        return max(self.peaks.values(), default=0)

    def begin(self, moment: str) -> None:
        self.moment = moment
        self.peaks[moment] = max(self.peaks[moment], self.now)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.kind is FakeTensor and function in BY_MASK:  # how many places a mask has, fake tensors cannot say
            args = (args[0], [*_places(args[1])], *args[2:])
        self._watch((args, kwargs), made=False)  # a tensor from before is no news when it is changed in place
        result = function(*args, **(kwargs or {}))
        self._watch(result, made=True)
        return result

    def _watch(self, values: Any, made: bool) -> None:
        for tensor in (value for value in tree_leaves(values) if isinstance(value, self.kind)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if made else 0
            if key not in self.known:
                self.known[key] = weakref.ref(storage, partial(self._forget, key, size))
                self.now += size
                self.peaks[self.moment] = max(self.peaks[self.moment], self.now)

    def _forget(self, key: int, size: int, _: object) -> None:
        del self.known[key]
        self.now -= size


def _places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [x for i in indices for x in (i.nonzero().unbind(1) if i is not None and i.dtype == torch.bool else (i,))]
