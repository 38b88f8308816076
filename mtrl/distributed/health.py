"""Monitors the processes of a run while the driver waits for them. A process that ends or does not answer is reported
with the last lines of its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from mtrl.utils.errors import RankLost

LOG_LINES = 12  # the end of a lost process's log, for the message
GRACE = 5.0  # seconds for others to fail too when a process ends, so that the one that ended first is reported


@dataclass
class MonitoredProcess:
    """A Ray actor with its name for messages, its log, and its host and process number."""

    process: Any
    name: str
    log: Path
    location: tuple[str, int] = ("unknown", 0)

    def describe(self, problem: str) -> str:
        host, number = self.location
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        except OSError:
            lines = ["(its log cannot be read here)"]
        last = "\n    ".join(lines)
        return f"{self.name} (process {number} on {host}) {problem}; its last lines:\n    {last}\n"


@dataclass
class HealthMonitor:
    """`heartbeat`: seconds of silence after which a process is asked for a sign of life, and in which it must
    answer."""

    heartbeat: float
    members: list[MonitoredProcess] = field(default_factory=list)
    lost: RankLost | None = None

    def check_alive(self) -> None:
        if self.lost is not None:
            raise self.lost

    def wait(self, calls: Sequence[Any], heartbeats: bool = True, side_channel: bool = False) -> list[Any]:
        """The results of all calls; checks meanwhile that every process is alive. An error of a side-channel call
        leaves the ranks usable."""
        waiting, timeout = list(calls), self.heartbeat if heartbeats else None
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
            for call in done:
                try:
                    ray.get(call)
                except (RayActorError, RayTaskError) as error:
                    raise self._find_cause(error, calls, side_channel) from error
            if waiting and not done:
                self._check_heartbeats()
        return ray.get(list(calls))

    def _check_heartbeats(self) -> None:
        beats = [member.process.beat.remote() for member in self.members]
        for member, beat in zip(self.members, beats, strict=True):
            try:
                ray.get(beat, timeout=self.heartbeat)
            except RayActorError:
                continue  # the call that it was executing reports this
            except GetTimeoutError as error:
                self.lost = RankLost(member.describe(f"has not answered for {self.heartbeat:g} s"))
                raise self.lost from error

    def _find_cause(self, error: Exception, calls: Sequence[Any], side_channel: bool) -> Exception:
        """The first failure: when a process ends, the others fail too, since it no longer answers them."""
        ray.wait(list(calls), num_returns=len(calls), timeout=GRACE)
        ended = [member.describe("has ended") for member in self.members if is_dead(member.process)]
        if ended:
            self.lost = RankLost("; ".join(ended))
            return self.lost
        cause = error.cause if isinstance(error, RayTaskError) else error
        if not side_channel:
            self.lost = RankLost(f"the ranks cannot continue: {cause}\n")
        return cause if isinstance(cause, Exception) else error


def is_dead(process: Any) -> bool:
    try:
        ray.get(process.beat.remote(), timeout=GRACE)
    except RayActorError:
        return True
    except GetTimeoutError:
        return False
    return False
