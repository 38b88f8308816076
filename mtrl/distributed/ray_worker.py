"""One rank, or one dedicated engine, as a Ray actor: a process with its own GPU, if there are any."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from mtrl.distributed.object_refs import resolve
from mtrl.distributed.torchrun_group import TIMEOUT, execute, join_ranks
from mtrl.distributed.weight_channel import from_bytes
from mtrl.models.parallel.ranks import Ranks
from mtrl.models.state_dicts import Form
from mtrl.utils.machine import LOOPBACK

SIDE_CHANNEL, HEARTBEAT, WEIGHTS = "side_channel", "heartbeat", "weights"  # threads next to the one that computes

logger = logging.getLogger(__name__)


def limit_threads() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def join_at(address: tuple[str, int], rank: int, size: int, listener: socket.socket | None) -> Ranks:
    """Joins a process group of this size at the address of its first rank, which holds the `listener`. torch's store
    would listen on all interfaces, and anybody may read and write it."""
    host, port = address
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "LOCAL_RANK": "0"}  # Ray shows it only one GPU
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    if host == LOOPBACK:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    descriptor = listener.detach() if rank == 0 and listener is not None else None
    store = dist.TCPStore(host, port, size, rank == 0, timeout=TIMEOUT, master_listen_fd=descriptor)
    return join_ranks(store)


remote: Any = ray.remote  # its type hints do not know concurrency groups


@remote(concurrency_groups={SIDE_CHANNEL: 1, HEARTBEAT: 1, WEIGHTS: 1})
class RayWorker:
    """It logs to a file too, whose last lines are reported if the process ends without an error."""

    def __init__(self, number: int, size: int, log: Path, kind: str = "rank") -> None:
        self.number, self.size, self.kind = number, size, kind
        self.received: Queue[tuple[Any, Any]] = Queue(maxsize=1)
        self.roles: Mapping[str, Any] = {}
        self.listener: socket.socket | None = None  # where other ranks meet, if this is the first
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("a", buffering=1)
        faulthandler.enable(file)
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger("mtrl").setLevel(logging.INFO)
        logger.info("process %d on %s is %s %d of %d", os.getpid(), socket.gethostname(), kind, number, size)

    def __repr__(self) -> str:
        """The prefix that Ray gives each of its lines on the console."""
        return f"{self.kind} {self.number}"

    def address(self) -> tuple[str, int]:
        """Where ranks meet if this is the first: its machine, and a port there that it holds from now on."""
        self.listener = socket.socket()
        self.listener.bind((ray.util.get_node_ip_address(), 0))
        host, port = self.listener.getsockname()
        return host, port

    def location(self) -> tuple[str, int]:
        """Its machine and its process, for messages."""
        return socket.gethostname(), os.getpid()

    def build_rank(self, address: tuple[str, int], build: Callable[[Ranks], Mapping[str, Any]]) -> None:
        """Joins the other ranks, and builds its workers together with them."""
        limit_threads()
        self.roles = build(join_at(address, self.number, self.size, self.listener))

    def build_engine(
        self, build: Callable[[Callable[[], Any]], Mapping[str, Any]], address: tuple[str, int], tp_size: int
    ) -> None:  # fmt: skip
        """Joins the other processes of its tensor-parallel engine, if any, and builds the engine, which takes received
        weights from a queue."""
        limit_threads()
        if tp_size > 1:
            join_at(address, self.number % tp_size, tp_size, self.listener)
        self.roles = build(self.received.get)

    @ray.method(concurrency_group=WEIGHTS)
    def receive(self, head: Any, form: Form | None, stored: np.ndarray | None) -> None:
        """Returns when the engine has taken the message before this one."""
        self.received.put((head, None if form is None or stored is None else from_bytes(form, stored)))

    def execute(self, role: str, method: str, arguments: tuple[Any, ...]) -> Any:
        logger.info("%s.%s begins", role, method)
        result = execute(self.roles, (role, method, resolve(arguments, ray.get)))
        logger.info("%s.%s ends", role, method)
        return result

    @ray.method(concurrency_group=SIDE_CHANNEL)
    def execute_side_channel(self, role: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Executes a call while the process may be computing another one."""
        return execute(self.roles, (role, method, arguments))

    @ray.method(concurrency_group=HEARTBEAT)
    def beat(self) -> None:
        """A process that does not answer this is stopped, or its machine is gone."""
