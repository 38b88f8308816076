"""Ranks as processes of Ray: placed one a GPU, called together, watched while they work, and ended with the run."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mtrl.cluster.transfer import Lent
from mtrl.errors import RankLost, StartError
from mtrl.models.ranks import Ranks

LINES = 12  # of a lost rank's log in the message
GRACE = 5.0  # seconds in which the ranks that lost another one say so: the one that died first is to be told
STARTS = 3  # attempts to start Ray on this machine
PLACING = 120.0  # seconds that a cluster has to find room for all ranks

logger = logging.getLogger(__name__)

Build = Callable[[Ranks], Mapping[str, Any]]


class RayCrew:
    """`build` makes the workers of a rank, on that rank. Nothing of a model is ever here."""

    def __init__(self, size: int, per_node: int, build: Build, logs: Path, heartbeat: float) -> None:
        from mtrl.cluster.process import RankProcess

        self.size, self.logs, self.heartbeat = size, logs, heartbeat
        self.lent = Lent(ray.put)
        self.lost: RankLost | None = None
        self.started = open_ray(size)
        self.group: PlacementGroup | None = None
        self.ranks: list[Any] = []
        try:
            self.group = place(size, per_node)
            strategy = PlacementGroupSchedulingStrategy(self.group)
            for number in range(size):
                options = {"scheduling_strategy": strategy, "num_cpus": 1, "num_gpus": gpus()}
                kind: Any = RankProcess  # ray.remote has put more into the class
                self.ranks.append(kind.options(**options).remote(number, size, self._log(number)))
            # A process that starts answers nobody: on a busy machine that takes longer than a heartbeat.
            self.places = self._results([rank.place.remote() for rank in self.ranks], watched=False)
            [address] = self._results([self.ranks[0].address.remote()])
            self._results([rank.join.remote(address, build) for rank in self.ranks])
        except BaseException:
            self.close()
            raise

    # -------------------------------------------------------------------------------------------------------- calling
    def call(self, part: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self._refuse_lost()
        calls = zip(self.ranks, arguments, strict=True)
        return self._results([rank.answer.remote(part, method, self.lent(given)) for rank, given in calls])

    def call_first(self, part: str, method: str, *arguments: Any) -> Any:
        self._refuse_lost()
        return self._results([self.ranks[0].answer_beside.remote(part, method, arguments)])[0]

    def call_beside(self, part: str, method: str, *arguments: Any) -> list[Any]:
        self._refuse_lost()
        return self._results([rank.answer_beside.remote(part, method, arguments) for rank in self.ranks], beside=True)

    def _refuse_lost(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _results(self, calls: Sequence[Any], watched: bool = True, beside: bool = False) -> list[Any]:
        """Waits for all, and looks meanwhile whether every rank is alive. An error of something that was done `beside`
        leaves the ranks as they were."""
        waiting, patience = list(calls), self.heartbeat if watched else None
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=patience)
            for call in done:
                try:
                    ray.get(call)
                except (RayActorError, RayTaskError) as error:
                    raise self._told(error, calls, beside) from error
            if waiting:
                self._look()
        return ray.get(list(calls))

    def _look(self) -> None:
        beats = [rank.beat.remote() for rank in self.ranks]
        for number, beat in enumerate(beats):
            try:
                ray.get(beat, timeout=self.heartbeat)
            except RayActorError:
                continue  # its call says so
            except GetTimeoutError as error:
                self.lost = RankLost(self._message(number, f"has not answered for {self.heartbeat:g} s"))
                raise self.lost from error

    def _told(self, error: Exception, calls: Sequence[Any], beside: bool) -> Exception:
        """What went wrong first. Where a process ended, others fail too, since it does not answer them."""
        ray.wait(list(calls), num_returns=len(calls), timeout=GRACE)
        ended = [number for number, rank in enumerate(self.ranks) if is_dead(rank)]
        if ended:
            self.lost = RankLost("; ".join(self._message(number, "has ended") for number in ended))
            return self.lost
        cause = error.cause if isinstance(error, RayTaskError) else error
        if not beside:
            self.lost = RankLost(f"the ranks cannot go on: {cause}")
        return cause if isinstance(cause, Exception) else error

    def _message(self, number: int, what: str) -> str:
        host, process = self.places[number] if hasattr(self, "places") else ("unknown", 0)
        try:
            lines = self._log(number).read_text(errors="replace").splitlines()[-LINES:]
        except OSError:
            lines = ["(its log cannot be read here)"]
        told = "\n    ".join(lines)
        return f"rank {number} of {self.size} (process {process} on {host}) {what}; its last lines:\n    {told}\n"

    def _log(self, number: int) -> Path:
        return self.logs / f"rank_{number}.log"

    # --------------------------------------------------------------------------------------------------------- the end
    def close(self) -> None:
        """Ends all ranks, and Ray where it was started here."""
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            ray.kill(rank)
        if self.group is not None:
            ray.util.remove_placement_group(self.group)
            self.group = None
        if self.started:
            self.started = False
            ray.shutdown()


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


def place(size: int, per_node: int) -> PlacementGroup:
    """One bundle a rank; those of a machine stand one after the other."""
    bundles = [{"CPU": 1.0, "GPU": 1.0} if gpus() else {"CPU": 1.0}] * size
    group = placement_group(bundles, strategy="STRICT_PACK" if size == per_node else "PACK")
    if not group.wait(PLACING):
        ray.util.remove_placement_group(group)
        kind = "GPUs" if gpus() else "processors"
        raise StartError(
            f"the cluster has no room for {size} ranks ({kind}: {ray.cluster_resources()}); set training.nnodes and "
            "training.n_gpus_per_node to what it has"
        )
    return group


def is_dead(rank: Any) -> bool:
    try:
        ray.get(rank.beat.remote(), timeout=GRACE)
    except RayActorError:
        return True
    except GetTimeoutError:
        return False
    return False
