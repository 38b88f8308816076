"""The engines of several processes as one generator: each samples for its share of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from mtrl.algorithms.packing import Piece, balance
from mtrl.distributed.remote_proxy import RemoteProxy, Workers
from mtrl.models.backbone import Backbone
from mtrl.models.state_dicts import exported_weights
from mtrl.protocols import Generator
from mtrl.rollout.lifecycle import EngineLifecycle
from mtrl.rollout.local import copy_weights
from mtrl.types import Prompt, Rollouts, Sampling, Weights
from mtrl.utils.errors import RunError
from mtrl.utils.record_rows import join_rows, take_rows

ENGINE = "engine"  # the role


class DistributedGenerator(RemoteProxy[Workers], EngineLifecycle):
    """Sampling is keyed by task, and one engine gets all prompts of a task, so the rows are those of a single engine.
    Each `tp_size` neighbouring processes are one tensor-parallel engine."""

    def __init__(self, workers: Workers, tp_size: int = 1) -> None:
        super().__init__(workers, ENGINE, tp_size)

    def wake(self) -> None:
        self.call_all("wake")

    def sleep(self) -> None:
        self.call_all("sleep")

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        """Sends each prompt once; only the responses come back."""
        shares, arguments = self.partition(prompts, sampling)
        return self.merge(prompts, shares, self.call_groups("generate", arguments))

    def partition(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> tuple[list[list[int]], list[tuple[Any, ...]]]:  # fmt: skip
        """The indices of each engine's prompts, and the arguments of its `generate`."""
        shares = self.share_out(prompts)
        return shares, [([prompts[index] for index in share], sampling) for share in shares]

    def share_out(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return partition_prompts(prompts, self.groups)

    def merge(self, prompts: Sequence[Prompt], shares: Sequence[list[int]], results: Sequence[Any]) -> Rollouts:
        """The rollouts of all engines in the order of the prompts."""
        parts = [
            replace(rollouts, prompts=(), group=torch.tensor(share)[rollouts.group])
            for rollouts, share in zip(results, shares, strict=True)
            if share
        ]
        rows = join_rows(parts)
        return replace(take_rows(rows, rows.group.argsort(stable=True)), prompts=tuple(prompts))

    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self.call_all("preflight", prompts, sampling)

    def load(self, weights: Weights) -> None:
        """Every engine loads the weights of its own rank's actor, which all ranks gather one by one."""
        check_versions(weights, self.call_all("load"))

    def close(self) -> None:
        """Engines end with their ranks."""


class FirstRankGenerator(DistributedGenerator):
    """Only the first rank has an engine, the client of a server. All gather the weights that it sends."""

    def share_out(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [list(range(len(prompts))), *[[]] * (self.groups - 1)]

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        shares, arguments = self.partition(prompts, sampling)
        return self.merge(prompts, shares, self.attempt("generate", arguments))

    def load(self, weights: Weights) -> None:
        check_versions(weights, self.attempt("load", [()] * self.groups))

    def attempt(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """A server that has ended does not end the ranks: they complete the call, and can save."""
        results = self.call_groups("attempt", [(method, *each) for each in arguments])
        for _, error in results:
            if error is not None:
                raise error
        return [result for result, _ in results]


class GatheringEngine(EngineLifecycle):
    """Takes the place of the engine on the other ranks: it has no prompts, and reads the weights as the first does."""

    def load(self, weights: Weights) -> None:
        for _ in weights.tensors.values():
            pass


def check_versions(weights: Weights, versions: Sequence[int]) -> None:
    assert set(versions) == {weights.version}, f"engines hold the versions {versions}, not {weights.version}"


def partition_prompts(prompts: Sequence[Prompt], engines: int) -> list[list[int]]:
    """The indices of each engine's prompts, in order. The prompts of one task stay together, since their samples are
    numbered across them."""
    by_task: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_task.setdefault(prompt.task.id, []).append(index)
    pieces = [Piece(tuple(indices), sum(len(prompts[i].ids) for i in indices)) for indices in by_task.values()]
    return [sorted(index for piece in share for index in piece.rows) for share in balance(pieces, engines)]


class EngineHandle:
    """The engine of one process, as `DistributedGenerator` calls it; `publish` returns the weights of its actor.
    `copy`: a model of its own, which holds new weights before the engine is told."""

    def __init__(self, generator: Generator, publish: Callable[[], Weights], copy: Backbone | None = None) -> None:
        self.generator, self.publish, self.copy, self._resident = generator, publish, copy, ExitStack()

    def wake(self) -> None:
        self._resident.enter_context(self.generator.resident())

    def sleep(self) -> None:
        self._resident.close()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts | None:
        return replace(self.generator.generate(prompts, sampling), prompts=()) if prompts else None

    def attempt(self, method: str, *arguments: Any) -> tuple[Any, RunError | None]:
        try:
            return getattr(self, method)(*arguments), None
        except RunError as error:
            return None, error

    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self.generator.preflight(prompts, sampling)

    def load(self) -> int:
        weights = self.publish()
        if self.copy is not None:
            copy_weights(self.copy, weights)
            weights = replace(weights, tensors=exported_weights(self.copy.model))
        self.generator.load(weights)
        return weights.version
