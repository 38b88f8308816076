"""Engines on devices of their own (`worker.hybrid_engine: false`): they hold nothing that learns, sample while others
learn, and are sent the weights of every version, one tensor at a time.

    ranks gather a weight -> the first sends it -> each engine puts it where it belongs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtrl.distributed.generator_proxy import PART, DistributedGenerator, EngineHandle
from mtrl.protocols import Generator, RemoteEngines
from mtrl.types import Prompt, Rollouts, Sampling, Weights

SENDER = "weights"  # the part of a rank
Sent = tuple[Any, Tensor | None]  # a weight by its name; before the first the version and all names


class DedicatedGenerator(DistributedGenerator):
    """They are awake for as long as the run is: nobody else wants their devices."""

    apart = True

    def __init__(self, engines: RemoteEngines, sharers: int = 1) -> None:
        super().__init__(engines, sharers)
        self.engines = engines

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Callable[[], Rollouts]:
        shares, given = self.dealt(prompts, sampling)
        found = self.engines.begin(PART, "generate", given)
        return lambda: self.joined(prompts, shares, found())

    def load(self, weights: Weights) -> None:
        """After all that was begun: an engine does one thing after the other."""
        self.check_versions(weights, self.engines.hand_over(SENDER, PART))


class WeightSender:
    """Of one rank; `publish` gives the weights of its actor, and `dtype` is what engines hold them in."""

    def __init__(self, publish: Callable[[], Weights], dtype: torch.dtype) -> None:
        self.publish, self.dtype = publish, dtype

    def send(self, door: Callable[[Iterable[Sent]], None] | None) -> int:
        """All ranks gather each weight. The first has a `door`, through which they go."""
        weights = self.publish()
        sent = self._one_by_one(weights)
        if door is not None:
            door(sent)
        else:
            for _ in sent:
                pass
        return weights.version

    def _one_by_one(self, weights: Weights) -> Iterator[Sent]:
        yield (weights.version, list(weights.tensors)), None
        for name, tensor in weights.tensors.items():
            yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor


class DedicatedEngine(EngineHandle):
    """The engine of one process, as `DedicatedGenerator` calls it; `next_one` waits for what a `WeightSender` sends."""

    def __init__(self, generator: Generator, next_one: Callable[[], Sent]) -> None:
        super().__init__(generator, lambda: arriving(next_one))
        self.wake()

    def take(self) -> int:
        return self.load()


def arriving(next_one: Callable[[], Sent]) -> Weights:
    (version, names), _ = next_one()
    return Weights(version, IncomingWeights(names, next_one))


class IncomingWeights(Mapping[str, Tensor]):
    """Weights that can be read once, in their order."""

    def __init__(self, names: Sequence[str], next_one: Callable[[], Sent]) -> None:
        self.names, self.next_one = names, next_one

    def __getitem__(self, name: str) -> Tensor:
        found, tensor = self.next_one()
        if found != name or tensor is None:
            raise KeyError(f"{name} was asked for, and {found} is next")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names
