"""User functions in processes of their own, with a time limit: one that raises, hangs or exits fails one sample."""

from __future__ import annotations

import multiprocessing
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrl.rewards.worker import call, split_spec

START_SECONDS = 120.0  # a reward file may import something large


@dataclass(frozen=True)
class Outcome:
    """What became of one call: a number (None: not applicable) and extra values, or the reason of a failure."""

    value: float | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None


class Worker:
    """One process with one function."""

    def __init__(self, function: str) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.connection = ours
        command = [sys.executable, "-m", "mtrl.rewards.worker", str(theirs.fileno()), function]
        # what it prints goes to our stderr: stdout belongs to the command
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2)
        theirs.close()

    def ask(self, message: Any, seconds: float) -> tuple[Any, ...]:
        """Its answer, or ("dead", reason) after which it must be replaced."""
        try:
            if message is not None:
                self.connection.send(message)
            if not self.connection.poll(seconds):
                self.stop()
                return ("dead", f"took longer than {seconds:g} s")
            answer: tuple[Any, ...] = self.connection.recv()
            return answer
        except (EOFError, OSError):
            return ("dead", f"its process ended with status {self.process.wait()}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Sandbox:
    """`workers` processes that share a queue of samples. The first is started, and the function loaded, at once."""

    def __init__(self, function: str, kwargs: Mapping[str, Any], *, workers: int, timeout_s: float) -> None:
        self.function, self.kwargs, self.timeout_s = function, dict(kwargs), timeout_s
        self._jobs: queue.SimpleQueue[tuple[Any, Future[Outcome]] | None] = queue.SimpleQueue()
        self._alive: set[Worker] = set()
        first = self._start()
        threads = [threading.Thread(target=self._serve, args=(first if n == 0 else None,)) for n in range(workers)]
        for thread in threads:
            thread.daemon = True
            thread.start()
        self.close = weakref.finalize(self, _close, self._jobs, self._alive, workers)

    @property
    def name(self) -> str:
        """For logs: the function's name, or the file's where the function was left to us."""
        place, name = split_spec(self.function)
        return name or Path(place).stem

    def submit(self, sample: Mapping[str, Any]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self._jobs.put((dict(sample), future))
        return future

    def _start(self) -> Worker:
        worker = Worker(self.function)
        answer = worker.ask(None, START_SECONDS)
        if answer[0] != "ready":
            worker.stop()
            raise ValueError(f"the reward function {self.function} cannot be loaded:\n{answer[1]}")
        self._alive.add(worker)
        return worker

    def _serve(self, worker: Worker | None) -> None:
        while (job := self._jobs.get()) is not None:
            sample, future = job
            try:
                worker = worker or self._start()
                kind, *rest = worker.ask((sample, self.kwargs), self.timeout_s)
            except ValueError as error:
                kind, rest = "error", [str(error)]
            if kind == "value":
                future.set_result(Outcome(rest[0], rest[1]))
                continue
            if kind == "dead" and worker is not None:
                self._alive.discard(worker)
                worker = None
            future.set_result(Outcome(failure=rest[0]))


class InProcess:
    """A Python callable handed over as an object. It runs here, where no process can be killed: only what it raises is
    caught. Reward files have the sandbox."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self.function, self.kwargs = function, dict(kwargs)

    def submit(self, sample: Mapping[str, Any]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        try:
            _, value, extras = call(self.function, dict(sample), self.kwargs)
            future.set_result(Outcome(value, extras))
        except Exception as error:
            future.set_result(Outcome(failure=f"{type(error).__name__}: {error}"))
        return future

    def close(self) -> None: ...


def _close(jobs: queue.SimpleQueue[Any], alive: set[Worker], workers: int) -> None:
    for _ in range(workers):
        jobs.put(None)
    for worker in list(alive):
        worker.stop()
