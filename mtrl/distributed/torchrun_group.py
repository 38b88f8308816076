"""One process of a run of several, started by `torchrun`: the first drives, the others do what they are told.

Messages go by object collectives of gloo: a call scatters its arguments and gathers what came of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mtrl.models.parallel.ranks import Ranks, all_ranks

STOP = "stop"
FOR_EVER = timedelta(days=10_000)  # nobody knows when there is something to do beside the training
PATIENCE = timedelta(minutes=60)  # what a rank waits for the others: the longest pass, or the longest download

Call = tuple[str, str, tuple[Any, ...]]  # part, method, arguments
Parts = Mapping[str, Any]


def join_ranks() -> Ranks:
    """This process among those that `torchrun` has started, by the variables that it sets; each has a GPU of its own
    where there are any."""
    backend = "cpu:gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=PATIENCE)
    return all_ranks(PATIENCE)


class TorchrunWorkerGroup:
    """The first rank as the driver of all: it does its own part of every call as well."""

    def __init__(self, ranks: Ranks, parts: Parts) -> None:
        assert ranks.is_first
        self.ranks, self.parts, self.size = ranks, parts, ranks.size
        self.beside = all_ranks(FOR_EVER)
        self.closed = False

    def call(self, part: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = [(part, method, each) for each in arguments]
        own = answer(self.parts, scatter_calls(self.ranks, calls))
        return gather_results(self.ranks, own)

    def call_rank0(self, part: str, method: str, *arguments: Any) -> Any:
        return answer(self.parts, (part, method, arguments))

    def call_side_channel(self, part: str, method: str, *arguments: Any) -> list[Any]:
        call = scatter_calls(self.beside, [(part, method, arguments)] * self.size)
        found = gather_results(self.beside, attempt(self.parts, call))
        for _, error in found:
            if error is not None:
                raise error
        return [result for result, _ in found]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for ranks in (self.beside, self.ranks):
                scatter_calls(ranks, [STOP] * self.size)


def serve(ranks: Ranks, parts: Parts) -> None:
    """Does what the first rank says, until it says stop. An error ends the process: the others then find its connection
    closed, and end as well."""
    beside = threading.Thread(target=serve_side_channel, args=(all_ranks(FOR_EVER), parts), daemon=True)
    beside.start()
    while (call := scatter_calls(ranks, None)) != STOP:
        gather_results(ranks, answer(parts, call))
    beside.join()


def serve_side_channel(ranks: Ranks, parts: Parts) -> None:
    """The same in a thread of its own, where an error is told and ends nothing."""
    while (call := scatter_calls(ranks, None)) != STOP:
        gather_results(ranks, attempt(parts, call))


def attempt(parts: Parts, call: Call) -> tuple[Any, Exception | None]:
    try:
        return answer(parts, call), None
    except Exception as error:
        return None, error


def answer(parts: Parts, call: Call) -> Any:
    part, method, arguments = call
    return getattr(parts[part], method)(*arguments)


def scatter_calls(ranks: Ranks, calls: Sequence[Any] | None) -> Any:
    """One of the first rank's messages for each rank."""
    received: list[Any] = [None]
    dist.scatter_object_list(received, None if calls is None else list(calls), src=0, group=ranks.group)
    return received[0]


def gather_results(ranks: Ranks, result: Any) -> list[Any]:
    results: list[Any] = [None] * ranks.size
    dist.gather_object(result, results if ranks.is_first else None, dst=0, group=ranks.group)
    return results
