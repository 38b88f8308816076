"""Ranks as processes of Ray: placed one a GPU, called together, watched while they work, and ended with the run.
Engines that have GPUs of their own are further processes, placed beside them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mtrl.distributed.object_refs import ObjectRefs
from mtrl.distributed.weight_channel import WeightChannel
from mtrl.models.parallel.ranks import Ranks
from mtrl.utils.errors import StartError

STARTS = 3  # attempts to start Ray on this machine
PLACING = 120.0  # seconds that a cluster has to find room for all ranks

logger = logging.getLogger(__name__)

Build = Callable[[Ranks], Mapping[str, Any]]
BuildEngine = Callable[[Callable[[], Any]], Mapping[str, Any]]  # from what brings the next of what arrives


@dataclass(frozen=True)
class EnginePlacement:
    """So many processes for engines, which hold nothing else; `build` makes what one holds, on it. So many `sharers`,
    neighbours, are one engine and meet before."""

    size: int = 0
    sharers: int = 1
    build: BuildEngine | None = None


NO_ENGINES = EnginePlacement()


class RayWorkerGroup:
    """`build` makes the workers of a rank, on that rank; `engines` have processes of their own. Nothing of a model is
    ever here."""

    def __init__(
        self,
        size: int,
        per_node: int,
        build: Build,
        logs: Path,
        heartbeat: float,
        engines: EnginePlacement = NO_ENGINES,
    ) -> None:
        from mtrl.distributed.health import HealthMonitor

        self.size, self.logs, self.watch = size, logs, HealthMonitor(heartbeat)
        self.lent = ObjectRefs(ray.put)
        self.started = open_ray(size + engines.size)
        self.group: PlacementGroup | None = None
        self.ranks: list[Any] = []
        try:
            self.group = place(size, per_node, engines.size)
            self.ranks = [self._start("rank", number, size) for number in range(size)]
            apart = [self._start("engine", number, engines.size) for number in range(engines.size)]
            # A process that starts answers nobody: on a busy machine that takes longer than a heartbeat.
            members = self.watch.members
            for member, where in zip(members, self._places([*self.ranks, *apart]), strict=True):
                member.place = where
            firsts = [self.ranks[0], *apart[:: engines.sharers]]
            address, *others = self.watch.results([first.address.remote() for first in firsts])
            joining = [rank.join.remote(address, build) for rank in self.ranks]
            meeting = [(where, engines.sharers) for where in others for _ in range(engines.sharers)]
            holding = [engine.hold.remote(engines.build, *met) for engine, met in zip(apart, meeting, strict=True)]
            self.watch.results([*joining, *holding])
            self.engines = RayEngines(apart, self)
        except BaseException:
            self.close()
            raise

    def _start(self, kind: str, number: int, size: int) -> Any:
        from mtrl.distributed.health import MonitoredProcess
        from mtrl.distributed.ray_worker import RayWorker

        assert self.group is not None
        strategy = PlacementGroupSchedulingStrategy(self.group)
        options = {"scheduling_strategy": strategy, "num_cpus": 1, "num_gpus": gpus()}
        remote: Any = RayWorker  # ray.remote has put more into the class
        log = self.logs / f"{kind}_{number}.log"
        process = remote.options(**options).remote(number, size, log, kind)
        self.watch.members.append(MonitoredProcess(process, f"{kind} {number} of {size}", log))
        return process

    def _places(self, processes: Sequence[Any]) -> list[tuple[str, int]]:
        return self.watch.results([process.place.remote() for process in processes], watched=False)

    # -------------------------------------------------------------------------------------------------------- calling
    def call(self, part: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self.watch.results(self.begun(self.ranks, part, method, arguments))

    def begun(
        self, processes: Sequence[Any], part: str, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:  # fmt: skip
        """Names of what will come of it."""
        self.watch.check_alive()
        calls = zip(processes, arguments, strict=True)
        return [process.answer.remote(part, method, self.lent(given)) for process, given in calls]

    def call_rank0(self, part: str, method: str, *arguments: Any) -> Any:
        self.watch.check_alive()
        return self.watch.results([self.ranks[0].execute_side_channel.remote(part, method, arguments)])[0]

    def call_side_channel(self, part: str, method: str, *arguments: Any) -> list[Any]:
        self.watch.check_alive()
        calls = [rank.execute_side_channel.remote(part, method, arguments) for rank in self.ranks]
        return self.watch.results(calls, beside=True)

    # --------------------------------------------------------------------------------------------------------- the end
    def close(self) -> None:
        """Ends all processes, and Ray where it was started here."""
        members, self.watch.members = self.watch.members, []
        for member in members:
            ray.kill(member.process)
        if self.group is not None:
            ray.util.remove_placement_group(self.group)
            self.group = None
        if self.started:
            self.started = False
            ray.shutdown()


@dataclass(frozen=True, eq=False)
class RayEngines:
    """Engines that hold no part of what learns, and compute while ranks do."""

    processes: Sequence[Any]
    worker_group: RayWorkerGroup

    @property
    def size(self) -> int:
        return len(self.processes)

    def call(self, part: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self.begin(part, method, arguments)()

    def begin(self, part: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        calls = self.worker_group.begun(self.processes, part, method, arguments)
        return lambda: self.worker_group.watch.results(calls)

    def hand_over(self, sender: str, taker: str) -> list[Any]:
        """Waits for all of them at once: whoever fails leaves the others waiting for ever."""
        doors = [(WeightChannel(list(self.processes)),), *[(None,)] * (self.worker_group.size - 1)]
        taken = self.worker_group.begun(self.processes, taker, "take", [()] * self.size)
        sent = self.worker_group.begun(self.worker_group.ranks, sender, "send", doors)
        return self.worker_group.watch.results([*taken, *sent])[: self.size]


def open_ray(size: int) -> bool:
    """Joins the cluster that RAY_ADDRESS names, or starts one on this machine. Whether it was started here."""
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # the console writes out what is no text
    if ray.is_initialized():
        return False
    with sigterm_kept():
        if address := os.environ.get("RAY_ADDRESS"):
            try:
                ray.init(address=address, log_to_driver=True)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise StartError(f"RAY_ADDRESS: no cluster of Ray answers at {address}: {error}") from error
            return True
        start_ray(max(size, os.cpu_count() or 1))
    return True


def start_ray(cores: int) -> None:
    """A cluster of this machine alone. Ray gives itself half a minute for it, which a busy machine does not keep."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would let everything else go first
    quiet: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.ERROR}
    for left in reversed(range(STARTS)):
        try:
            ray.init(address="local", num_cpus=cores, log_to_driver=True, **quiet)
            return
        except Exception as error:  # Ray has no class of its own for it
            if not left:
                raise StartError(f"Ray does not start on this machine, after {STARTS} attempts: {error}") from error
            logger.warning("Ray has not started (%s); it is tried again", error)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Ray makes SIGTERM an exit with status 15. It stays what it was, and where it would have ended the process without
    a word, it now ends it with the status of a signal, after all that was started."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, leave if before in (signal.SIG_DFL, None) else before)


def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def gpus() -> int:
    return int(torch.cuda.is_available())


def place(size: int, per_node: int, engines: int = 0) -> PlacementGroup:
    """One bundle a process; those of a machine stand one after the other, engines last."""
    bundles = [{"CPU": 1.0, "GPU": 1.0} if gpus() else {"CPU": 1.0}] * (size + engines)
    group = placement_group(bundles, strategy="STRICT_PACK" if size == per_node and not engines else "PACK")
    if not group.wait(PLACING):
        ray.util.remove_placement_group(group)
        kind = "GPUs" if gpus() else "processors"
        beside, keys = "", "training.nnodes and training.n_gpus_per_node"
        if engines:
            beside, keys = f" and {engines} engines", f"{keys} and worker.rollout.n_gpus"
        raise StartError(
            f"the cluster has no room for {size} ranks{beside} ({kind}: {ray.cluster_resources()}); set {keys} to what "
            "it has"
        )
    return group
