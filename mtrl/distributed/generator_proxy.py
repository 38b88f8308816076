"""Engines of several ranks as one: each samples for its share of the prompts, by the whole model or, with neighbours,
by a part of it each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from mtrl.algorithms.packing import Piece, balance
from mtrl.protocols import Generator, RemoteWorkers
from mtrl.rollout.lifecycle import EngineLifecycle
from mtrl.types import Prompt, Rollouts, Sampling, Weights
from mtrl.utils.record_rows import join_rows, take_rows

PART = "engine"


class DistributedGenerator(EngineLifecycle):
    """Samples are keyed by task, and an engine gets all of a task's prompts: rows are those of a single one. So many
    `sharers`, neighbours, are one engine: they are asked the same, and say the same."""

    def __init__(self, worker_group: RemoteWorkers, sharers: int = 1) -> None:
        self.worker_group, self.sharers = worker_group, sharers

    def wake(self) -> None:
        self._on_all("wake")

    def sleep(self) -> None:
        self._on_all("sleep")

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        """Prompts go out once, and of the responses alone something comes back."""
        shares, given = self.dealt(prompts, sampling)
        return self.joined(prompts, shares, self.worker_group.call(PART, "generate", given))

    def dealt(self, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[list[list[int]], list[tuple[Any, ...]]]:
        """The places of each engine's prompts, and what each rank is asked."""
        shares = deal_prompts(prompts, self.worker_group.size // self.sharers)
        asked = [([prompts[place] for place in share], sampling) for share in shares]
        return shares, [each for each in asked for _ in range(self.sharers)]

    def joined(self, prompts: Sequence[Prompt], shares: Sequence[list[int]], found: Sequence[Any]) -> Rollouts:
        """What engines say of their shares as the rows of one."""
        parts = [
            replace(rows, prompts=(), group=torch.tensor(share)[rows.group])
            for rows, share in zip(found[:: self.sharers], shares, strict=True)
            if share
        ]
        rows = join_rows(parts)
        return replace(take_rows(rows, rows.group.argsort(stable=True)), prompts=tuple(prompts))

    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self.worker_group.call(PART, "preflight", [(prompts, sampling)] * self.worker_group.size)

    def load(self, weights: Weights) -> None:
        """Every engine takes the weights of its own rank's actor, which gathers them one by one."""
        self.check_versions(weights, self._on_all("load"))

    def check_versions(self, weights: Weights, versions: Sequence[int]) -> None:
        assert set(versions) == {weights.version}, f"engines hold the versions {versions}, not {weights.version}"

    def close(self) -> None:
        """Engines end with their ranks."""

    def _on_all(self, method: str) -> list[Any]:
        return self.worker_group.call(PART, method, [()] * self.worker_group.size)


def deal_prompts(prompts: Sequence[Prompt], ranks: int) -> list[list[int]]:
    """The places of each rank's prompts, in order. Prompts of one task stay together: they are counted."""
    by_task: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_task.setdefault(prompt.task.id, []).append(place)
    pieces = [Piece(tuple(places), sum(len(prompts[p].ids) for p in places)) for places in by_task.values()]
    return [sorted(place for piece in share for place in piece.rows) for share in balance(pieces, ranks)]


class EngineHandle:
    """The engine of one rank, as `DistributedGenerator` calls it; `publish` gives the weights of the rank's actor."""

    def __init__(self, generator: Generator, publish: Callable[[], Weights]) -> None:
        self.generator, self.publish, self._awake = generator, publish, ExitStack()

    def wake(self) -> None:
        self._awake.enter_context(self.generator.resident())

    def sleep(self) -> None:
        self._awake.close()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts | None:
        return replace(self.generator.generate(prompts, sampling), prompts=()) if prompts else None

    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self.generator.preflight(prompts, sampling)

    def load(self) -> int:
        weights = self.publish()
        self.generator.load(weights)
        return weights.version
