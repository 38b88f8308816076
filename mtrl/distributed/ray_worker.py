"""One rank, or one engine, as an actor of Ray: a process with a GPU of its own, where there are any."""

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

from mtrl.distributed.object_refs import resolved
from mtrl.distributed.torchrun_group import answer, join_ranks
from mtrl.distributed.weight_channel import Form, from_bytes
from mtrl.models.parallel.ranks import Ranks

BESIDE, WATCH, ARRIVE = "beside", "watch", "arrive"  # threads of their own, beside the one that computes

logger = logging.getLogger(__name__)


def use_own_threads() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def met(address: tuple[str, int], number: int, size: int) -> Ranks:
    """This process as one of so many, which meet at the address of the first."""
    host, port = address
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "LOCAL_RANK": "0"}  # Ray shows it one GPU alone
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(size)}
    return join_ranks()


remote: Any = ray.remote  # its types know nothing of groups


@remote(concurrency_groups={BESIDE: 1, WATCH: 1, ARRIVE: 1})
class RayWorker:
    """Its log goes to a file as well, whose last lines are told where the process ends without a word."""

    def __init__(self, number: int, size: int, log: Path, kind: str = "rank") -> None:
        self.number, self.size, self.kind = number, size, kind
        self.arrived: Queue[tuple[Any, Any]] = Queue(maxsize=1)
        self.parts: Mapping[str, Any] = {}
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("a", buffering=1)
        faulthandler.enable(file)
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger("mtrl").setLevel(logging.INFO)
        logger.info("process %d on %s is %s %d of %d", os.getpid(), socket.gethostname(), kind, number, size)

    def __repr__(self) -> str:
        """What Ray puts before each of its lines on the console."""
        return f"{self.kind} {self.number}"

    def address(self) -> tuple[str, int]:
        """Where the ranks meet, if this is the first: its machine, and a port that is free there."""
        with socket.socket() as found:
            found.bind(("", 0))
            return ray.util.get_node_ip_address(), found.getsockname()[1]

    def place(self) -> tuple[str, int]:
        """Its machine and its process, for people."""
        return socket.gethostname(), os.getpid()

    def join(self, address: tuple[str, int], build: Callable[[Ranks], Mapping[str, Any]]) -> None:
        """Meets the others, and builds its workers together with them."""
        use_own_threads()
        self.parts = build(met(address, self.number, self.size))

    def hold(
        self, build: Callable[[Callable[[], Any]], Mapping[str, Any]], address: tuple[str, int], sharers: int
    ) -> None:  # fmt: skip
        """Builds its workers, which meet nobody but neighbours that are one engine with it; they are given what brings
        the next of what arrives here."""
        use_own_threads()
        if sharers > 1:
            met(address, self.number % sharers, sharers)
        self.parts = build(self.arrived.get)

    @ray.method(concurrency_group=ARRIVE)
    def arrive(self, head: Any, form: Form | None, stored: np.ndarray | None) -> None:
        """Returns when what came before it was taken."""
        self.arrived.put((head, None if form is None or stored is None else from_bytes(form, stored)))

    def answer(self, part: str, method: str, arguments: tuple[Any, ...]) -> Any:
        logger.info("%s.%s begins", part, method)
        found = answer(self.parts, (part, method, resolved(arguments, ray.get)))
        logger.info("%s.%s ends", part, method)
        return found

    @ray.method(concurrency_group=BESIDE)
    def execute_side_channel(self, part: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """While the rank computes on."""
        return answer(self.parts, (part, method, arguments))

    @ray.method(concurrency_group=WATCH)
    def beat(self) -> None:
        """A process that does not answer this is stopped, or its machine is gone."""
