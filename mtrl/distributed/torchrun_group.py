"""A run of several processes started by `torchrun`: the first one drives, the others serve its calls.

Calls go through gloo's object collectives: their arguments are scattered and their results gathered.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mtrl.models.parallel.ranks import Ranks, all_ranks

STOP = "stop"
LOOPBACK, INTERFACES = "lo", {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
NO_TIMEOUT = timedelta(days=10_000)  # the side channel may be idle for any time
TIMEOUT = timedelta(minutes=60)  # how long a rank waits for the others: the longest pass or download

logger = logging.getLogger(__name__)

Call = tuple[str, str, tuple[Any, ...]]  # role, method, arguments
Roles = Mapping[str, Any]  # the workers of a process, by role


def join_ranks(store: dist.Store | None = None) -> Ranks:
    """This process among those that `torchrun` has started, by the variables that it sets; each uses its own GPU, if
    there are any. Ranks that Ray has started meet at their own `store`."""
    rank, size = (-1, -1) if store is None else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return _join(store, rank, size)


def join_single_rank() -> Ranks:
    """This process as the only rank of a model that is sharded in a single process."""
    return _join(dist.HashStore(), 0, 1)


def _join(store: dist.Store | None, rank: int, size: int) -> Ranks:
    backend = "gloo"
    if torch.cuda.is_available():
        local_rank, local_size = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        index, collectives = choose_device(local_rank, local_size, torch.cuda.device_count())
        torch.cuda.set_device(index)
        backend = f"cpu:gloo,cuda:{collectives}"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=size)
    return all_ranks(TIMEOUT)


def choose_device(local_rank: int, local_size: int, devices: int) -> tuple[int, str]:
    """The GPU of one of `local_size` ranks on a machine, and the backend of collectives between GPUs. Ranks that share
    a GPU, which NCCL refuses, communicate by gloo through CPU memory."""
    if local_size > devices and local_rank == 0:
        logger.warning(
            "%d processes share %d GPUs and communicate through CPU memory, which is slow; start one for each GPU, "
            "unless this is a test", local_size, devices,
        )  # fmt: skip
    return local_rank % devices, "gloo" if local_size > devices else "nccl"


class TorchrunWorkerGroup:
    """The first rank as the driver of all; it executes its own share of every call as well."""

    def __init__(self, ranks: Ranks, roles: Roles) -> None:
        assert ranks.is_first
        self.ranks, self.roles, self.size = ranks, roles, ranks.size
        self.side_channel = all_ranks(NO_TIMEOUT)
        self.closed = False

    def call(self, role: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        own = scatter_calls(self.ranks, [(role, method, each) for each in arguments])
        return gather_results(self.ranks, execute(self.roles, own))

    def call_rank0(self, role: str, method: str, *arguments: Any) -> Any:
        return execute(self.roles, (role, method, arguments))

    def call_side_channel(self, role: str, method: str, *arguments: Any) -> list[Any]:
        own = scatter_calls(self.side_channel, [(role, method, arguments)] * self.size)
        results = gather_results(self.side_channel, try_execute(self.roles, own))
        for _, error in results:
            if error is not None:
                raise error
        return [result for result, _ in results]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for ranks in (self.side_channel, self.ranks):
                scatter_calls(ranks, [STOP] * self.size)


class SingleRankWorkerGroup(TorchrunWorkerGroup):
    """The only rank, in a process that may run again: closed, it leaves neither workers nor a process group. It listens
    to no other machine."""

    def __init__(self, build_roles: Callable[[Ranks], Roles]) -> None:
        self._undo = ExitStack()
        try:
            if LOOPBACK in (name for _, name in socket.if_nameindex()):
                for name in INTERFACES - os.environ.keys():
                    os.environ[name] = LOOPBACK
                    self._undo.callback(os.environ.pop, name)
            ranks = join_single_rank()
            self._undo.callback(dist.destroy_process_group)
            super().__init__(ranks, build_roles(ranks))
        except BaseException:
            self._undo.close()
            raise

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.roles = {}
            self._undo.close()


def serve(ranks: Ranks, roles: Roles) -> None:
    """Executes the first rank's calls until it sends STOP. An error ends the process; the others then see its
    connection closed, and end as well."""
    side_channel = threading.Thread(target=serve_side_channel, args=(all_ranks(NO_TIMEOUT), roles), daemon=True)
    side_channel.start()
    while (call := scatter_calls(ranks, None)) != STOP:
        gather_results(ranks, execute(roles, call))
    side_channel.join()


def serve_side_channel(ranks: Ranks, roles: Roles) -> None:
    """Like `serve`, in a separate thread; an error is returned to the first rank and ends nothing."""
    while (call := scatter_calls(ranks, None)) != STOP:
        gather_results(ranks, try_execute(roles, call))


def execute(roles: Roles, call: Call) -> Any:
    role, method, arguments = call
    return getattr(roles[role], method)(*arguments)


def try_execute(roles: Roles, call: Call) -> tuple[Any, Exception | None]:
    try:
        return execute(roles, call), None
    except Exception as error:
        return None, error


def scatter_calls(ranks: Ranks, calls: Sequence[Any] | None) -> Any:
    """The first rank gives one call for each rank, the others None; returns this rank's."""
    received: list[Any] = [None]
    dist.scatter_object_list(received, None if calls is None else list(calls), src=0, group=ranks.group)
    return received[0]


def gather_results(ranks: Ranks, result: Any) -> list[Any]:
    """The results of all ranks, on the first one."""
    results: list[Any] = [None] * ranks.size
    dist.gather_object(result, results if ranks.is_first else None, dst=0, group=ranks.group)
    return results
