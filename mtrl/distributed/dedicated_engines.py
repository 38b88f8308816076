"""Dedicated engines (`worker.hybrid_engine: false`): they have their own devices, sample while ranks learn, and receive
every version of the weights, one tensor at a time.

    all ranks gather a weight -> the first rank sends it -> each engine loads it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtrl.distributed.generator_proxy import ENGINE, DistributedGenerator, EngineHandle, check_versions
from mtrl.models.backbone import Backbone
from mtrl.models.state_dicts import Form, weight_forms
from mtrl.protocols import Generator, RemoteEngines
from mtrl.types import Prompt, Rollouts, Sampling, Weights

SENDER = "weights"  # the role of a rank that sends its weights
Message = tuple[Any, Tensor | None]  # a name and its weight; the first message: (version, all forms by name) and None
Receive = Callable[[], Message]  # waits for the next message


class DedicatedGenerator(DistributedGenerator[RemoteEngines]):
    """Dedicated engines never sleep: they share their devices with nobody."""

    colocated = False

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Callable[[], Rollouts]:
        shares, arguments = self.partition(prompts, sampling)
        wait = self.workers.start(ENGINE, "generate", self.repeat_in_groups(arguments))
        return lambda: self.merge(prompts, shares, self.first_of_groups(wait()))

    def load(self, weights: Weights) -> None:
        """Waits for all generation that was started before: an engine makes one call after the other."""
        check_versions(weights, self.workers.transfer_weights(SENDER, ENGINE))


class WeightSender:
    """Sends the weights of one rank's actor, which `publish` returns, in the engines' `dtype`."""

    def __init__(self, publish: Callable[[], Weights], dtype: torch.dtype) -> None:
        self.publish, self.dtype = publish, dtype

    def send(self, channel: Callable[[Iterable[Message]], None] | None) -> int:
        """All ranks gather each weight; only the first has a channel to send it through."""
        weights = self.publish()
        messages = self._messages(weights)
        if channel is not None:
            channel(messages)
        else:
            for _ in messages:
                pass
        return weights.version

    def _messages(self, weights: Weights) -> Iterator[Message]:
        forms = {
            name: (self.dtype if dtype.is_floating_point else dtype, shape)
            for name, (dtype, shape) in weight_forms(weights.tensors).items()
        }
        yield (weights.version, forms), None
        for name, tensor in weights.tensors.items():
            yield name, tensor.to(forms[name][0])


class DedicatedEngine(EngineHandle):
    """The engine of one process, as `DedicatedGenerator` calls it."""

    def __init__(self, generator: Generator, receive: Receive, copy: Backbone | None = None) -> None:
        super().__init__(generator, self._receive, copy)
        self.receive = receive
        self.wake()

    def _receive(self) -> Weights:
        (version, forms), _ = self.receive()
        self.incoming = IncomingWeights(forms, self.receive)
        return Weights(version, self.incoming)

    def load(self) -> int:
        version = super().load()
        self.incoming.skip_rest()
        return version


class IncomingWeights(Mapping[str, Tensor]):
    """Weights that can be read once, in the order of their names. Their forms are known before they arrive."""

    def __init__(self, forms: Mapping[str, Form], receive: Receive) -> None:
        self.forms, self.receive, self.taken = forms, receive, 0

    def __getitem__(self, name: str) -> Tensor:
        received, tensor = self.receive()
        self.taken += 1
        if received != name or tensor is None:
            raise KeyError(f"the weight {name} was requested, but the next one is {received}")
        return tensor

    def skip_rest(self) -> None:
        """Takes what the engine did not: the next message must be that of the next version."""
        for name in list(self.forms)[self.taken :]:
            self[name]

    def form(self, name: str) -> Form:
        return self.forms[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)

    def __contains__(self, name: object) -> bool:
        return name in self.forms
