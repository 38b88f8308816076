"""The processes of a run, watched while somebody waits for them: one that ends or does not answer is told, with the
last lines of its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from mtrl.utils.errors import RankLost

LINES = 12  # of a lost process's log in the message
GRACE = 5.0  # seconds in which those that lost another one say so: the one that died first is to be told


@dataclass
class MonitoredProcess:
    """A process by its handle of Ray, with its name for people, and where it runs."""

    process: Any
    name: str
    log: Path
    place: tuple[str, int] = ("unknown", 0)

    def told(self, what: str) -> str:
        host, number = self.place
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-LINES:]
        except OSError:
            lines = ["(its log cannot be read here)"]
        last = "\n    ".join(lines)
        return f"{self.name} (process {number} on {host}) {what}; its last lines:\n    {last}\n"


@dataclass
class HealthMonitor:
    """`heartbeat`: seconds after which a process is asked whether it is there, and in which it has to say so."""

    heartbeat: float
    members: list[MonitoredProcess] = field(default_factory=list)
    lost: RankLost | None = None

    def check_alive(self) -> None:
        if self.lost is not None:
            raise self.lost

    def results(self, calls: Sequence[Any], watched: bool = True, beside: bool = False) -> list[Any]:
        """Waits for all, and looks meanwhile whether every process is alive. An error of something that was done
        `beside` leaves the ranks as they were."""
        waiting, patience = list(calls), self.heartbeat if watched else None
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=patience)
            for call in done:
                try:
                    ray.get(call)
                except (RayActorError, RayTaskError) as error:
                    raise self._told(error, calls, beside) from error
            if waiting and not done:
                self._look()
        return ray.get(list(calls))

    def _look(self) -> None:
        beats = [member.process.beat.remote() for member in self.members]
        for member, beat in zip(self.members, beats, strict=True):
            try:
                ray.get(beat, timeout=self.heartbeat)
            except RayActorError:
                continue  # its call says so
            except GetTimeoutError as error:
                self.lost = RankLost(member.told(f"has not answered for {self.heartbeat:g} s"))
                raise self.lost from error

    def _told(self, error: Exception, calls: Sequence[Any], beside: bool) -> Exception:
        """What went wrong first. Where a process ended, others fail too, since it does not answer them."""
        ray.wait(list(calls), num_returns=len(calls), timeout=GRACE)
        ended = [member.told("has ended") for member in self.members if is_dead(member.process)]
        if ended:
            self.lost = RankLost("; ".join(ended))
            return self.lost
        cause = error.cause if isinstance(error, RayTaskError) else error
        if not beside:
            self.lost = RankLost(f"the ranks cannot go on: {cause}")
        return cause if isinstance(cause, Exception) else error


def is_dead(process: Any) -> bool:
    try:
        ray.get(process.beat.remote(), timeout=GRACE)
    except RayActorError:
        return True
    except GetTimeoutError:
        return False
    return False
