"""Ranks as Ray actors, one per GPU: they are called together, monitored while they work, and end with the run.
Dedicated engines are further actors in the same placement group."""

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
from ray._private import services
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mtrl.distributed.object_refs import ObjectRefs
from mtrl.distributed.weight_channel import WeightChannel
from mtrl.models.parallel.ranks import Ranks
from mtrl.utils.errors import StartError
from mtrl.utils.machine import LOOPBACK

START_ATTEMPTS = 3
PLACEMENT_SECONDS = 120.0  # for a cluster to find room for all processes

logger = logging.getLogger(__name__)

Arguments = Sequence[tuple[Any, ...]]  # one tuple per process
Build = Callable[[Ranks], Mapping[str, Any]]
BuildEngine = Callable[[Callable[[], Any]], Mapping[str, Any]]  # its argument waits for the next received weight


@dataclass(frozen=True)
class EnginePlacement:
    """The processes for dedicated engines; `build` runs in each of them and returns its workers by role. Each `tp_size`
    neighbouring processes are one engine."""

    size: int = 0
    tp_size: int = 1
    build: BuildEngine | None = None


NO_ENGINES = EnginePlacement()


class RayWorkerGroup:
    """`build` runs on each rank and returns its workers by role; the driver itself holds no model."""

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

        self.size, self.logs, self.monitor = size, logs, HealthMonitor(heartbeat)
        self.object_refs = ObjectRefs(ray.put)
        self.started_ray = open_ray(size + engines.size)
        self.placement: PlacementGroup | None = None
        self.ranks: list[Any] = []
        try:
            self.placement = make_placement(size, per_node, engines.size)
            self.ranks = [self._start("rank", number, size) for number in range(size)]
            dedicated = [self._start("engine", number, engines.size) for number in range(engines.size)]
            # A process that is starting answers nobody, and on a busy machine for longer than a heartbeat.
            members = self.monitor.members
            locations = self.monitor.wait([each.process.location.remote() for each in members], heartbeats=False)
            for member, location in zip(members, locations, strict=True):
                member.location = location
            first_ranks = [self.ranks[0], *dedicated[:: engines.tp_size]]
            address, *engine_addresses = self.monitor.wait([first.address.remote() for first in first_ranks])
            building = [rank.build_rank.remote(address, build) for rank in self.ranks]
            for number, engine in enumerate(dedicated):
                meets_at = engine_addresses[number // engines.tp_size]
                building.append(engine.build_engine.remote(engines.build, meets_at, engines.tp_size))
            self.monitor.wait(building)
            self.engines = RayEngines(dedicated, self)
        except BaseException:
            self.close()
            raise

    def _start(self, kind: str, number: int, size: int) -> Any:
        from mtrl.distributed.health import MonitoredProcess
        from mtrl.distributed.ray_worker import RayWorker

        assert self.placement is not None
        strategy = PlacementGroupSchedulingStrategy(self.placement)
        options = {"scheduling_strategy": strategy, "num_cpus": 1, "num_gpus": gpus_per_process()}
        remote: Any = RayWorker  # ray.remote has added methods to the class
        log = self.logs / f"{kind}_{number}.log"
        process = remote.options(**options).remote(number, size, log, kind)
        self.monitor.members.append(MonitoredProcess(process, f"{kind} {number} of {size}", log))
        return process

    # -------------------------------------------------------------------------------------------------------- calling
    def call(self, role: str, method: str, arguments: Arguments) -> list[Any]:
        return self.monitor.wait(self.start_calls(self.ranks, role, method, arguments))

    def start_calls(self, processes: Sequence[Any], role: str, method: str, arguments: Arguments) -> list[Any]:
        """Starts one call per process; returns references to their results."""
        self.monitor.check_alive()
        calls = zip(processes, arguments, strict=True)
        return [process.execute.remote(role, method, self.object_refs.share(each)) for process, each in calls]

    def call_rank0(self, role: str, method: str, *arguments: Any) -> Any:
        self.monitor.check_alive()
        return self.monitor.wait([self.ranks[0].execute_side_channel.remote(role, method, arguments)])[0]

    def call_side_channel(self, role: str, method: str, *arguments: Any) -> list[Any]:
        self.monitor.check_alive()
        calls = [rank.execute_side_channel.remote(role, method, arguments) for rank in self.ranks]
        return self.monitor.wait(calls, side_channel=True)

    # --------------------------------------------------------------------------------------------------------- the end
    def close(self) -> None:
        """Ends all processes, and Ray if it was started here."""
        members, self.monitor.members = self.monitor.members, []
        for member in members:
            ray.kill(member.process)
        if self.placement is not None:
            ray.util.remove_placement_group(self.placement)
            self.placement = None
        if self.started_ray:
            self.started_ray = False
            ray.shutdown()


@dataclass(frozen=True, eq=False)
class RayEngines:
    """Dedicated engines, which sample while the ranks of `worker_group` learn."""

    processes: Sequence[Any]
    worker_group: RayWorkerGroup

    @property
    def size(self) -> int:
        return len(self.processes)

    def call(self, role: str, method: str, arguments: Arguments) -> list[Any]:
        return self.start(role, method, arguments)()

    def start(self, role: str, method: str, arguments: Arguments) -> Callable[[], list[Any]]:
        calls = self.worker_group.start_calls(self.processes, role, method, arguments)
        return lambda: self.worker_group.monitor.wait(calls)

    def transfer_weights(self, sender: str, receiver: str) -> list[Any]:
        """Waits for both sides at once: if one fails, the other would wait forever."""
        group = self.worker_group
        channels = [(WeightChannel(list(self.processes)),), *[(None,)] * (group.size - 1)]
        received = group.start_calls(self.processes, receiver, "load", [()] * self.size)
        sent = group.start_calls(group.ranks, sender, "send", channels)
        return group.monitor.wait([*received, *sent])[: self.size]


def open_ray(size: int) -> bool:
    """Joins the cluster at RAY_ADDRESS, or starts one on this machine; returns whether this process now owns the
    connection."""
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # consoles print colour codes as text
    if ray.is_initialized():
        return False
    with preserve_sigterm():
        if address := os.environ.get("RAY_ADDRESS"):
            try:
                ray.init(address=address, log_to_driver=True)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise StartError(f"RAY_ADDRESS: no Ray cluster answers at {address}: {error}") from error
            return True
        start_ray(max(size, os.cpu_count() or 1))
    return True


def start_ray(cores: int) -> None:
    """A cluster of this machine alone. Ray allows itself half a minute to start, which a busy machine may exceed."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would give its workers the lowest priority
    quiet: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.ERROR}
    for left in reversed(range(START_ATTEMPTS)):
        try:
            with loopback_allowed():
                ray.init(address="local", num_cpus=cores, log_to_driver=True, _node_ip_address=LOOPBACK, **quiet)
            return
        except Exception as error:  # Ray has no specific class for it
            if not left:
                raise StartError(f"Ray does not start on this machine in {START_ATTEMPTS} attempts: {error}") from error
            logger.warning("Ray has not started (%s); trying again", error)


@contextmanager
def loopback_allowed() -> Iterator[None]:
    """Ray 2.60 replaces 127.0.0.1 by an address that other machines can reach, and then listens on all interfaces. A
    cluster of one machine needs neither."""
    replaced, services.resolve_ip_for_localhost = services.resolve_ip_for_localhost, lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = replaced


@contextmanager
def preserve_sigterm() -> Iterator[None]:
    """Ray makes SIGTERM an exit with status 15. This restores the handler; if there was none, SIGTERM exits with the
    status of a signal, after everything that was started has been cleaned up."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, exit_on_signal if before in (signal.SIG_DFL, None) else before)


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def gpus_per_process() -> int:
    return int(torch.cuda.is_available())


def make_placement(size: int, per_node: int, engines: int = 0) -> PlacementGroup:
    """One bundle per process: ranks of one machine next to each other, engines last."""
    bundles = [{"CPU": 1.0, "GPU": 1.0} if gpus_per_process() else {"CPU": 1.0}] * (size + engines)
    group = placement_group(bundles, strategy="STRICT_PACK" if size == per_node and not engines else "PACK")
    if not group.wait(PLACEMENT_SECONDS):
        ray.util.remove_placement_group(group)
        kind = "GPUs" if gpus_per_process() else "processors"
        processes, keys = f"{size} ranks", "training.nnodes and training.n_gpus_per_node"
        if engines:
            processes, keys = f"{processes} and {engines} engines", f"{keys} and worker.rollout.n_gpus"
        raise StartError(
            f"the cluster has no room for {processes} ({kind}: {ray.cluster_resources()}); set {keys} to the number "
            "that it has"
        )
    return group
