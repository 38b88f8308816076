"""User functions in processes of their own, with a time limit: one that raises, hangs or exits fails one sample."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mtrl.rewards.worker import call, name_of, refuse_other_signatures

START_SECONDS = 120.0  # a reward file may import something large
END_SECONDS = 5.0  # between the end of a pipe and the end of its process


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
        command = [sys.executable, "-u", "-m", "mtrl.rewards.worker", str(theirs.fileno()), function]
        # What it prints goes to our stderr: stdout belongs to the command. A session of its own, so that it can be
        # killed with all that the function started, and Ctrl-C is ours alone.
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
        theirs.close()

    def ask(self, message: Any, seconds: float) -> tuple[Any, ...]:
        """Its answer, or ("dead", reason) after which it must be replaced."""
        try:
            if message is not None:
                self.connection.send_bytes(pickle.dumps(message))  # `send` would share a tensor's memory
            if not self.connection.poll(seconds):
                return ("dead", f"took longer than {seconds:g} s")
            answer: tuple[Any, ...] = self.connection.recv()
            return answer
        except (EOFError, OSError):
            return ("dead", f"its process ended with status {self._status()}")

    def kill(self) -> None:
        """The process and whatever it started; what waits for it sees its pipe end."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):  # another thread was quicker
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _status(self) -> int | str:
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "unknown: it closed its pipe and went on"


Jobs = queue.SimpleQueue[tuple[dict[str, Any], Future[Outcome]] | None]


@dataclass
class Service:
    """What the threads of a sandbox do: each has a worker, replaces it where it died, and takes samples to it."""

    function: str
    kwargs: dict[str, Any]
    timeout_s: float
    jobs: Jobs = field(default_factory=queue.SimpleQueue)
    alive: set[Worker] = field(default_factory=set)
    closing: threading.Event = field(default_factory=threading.Event)

    def start(self) -> Worker:
        worker = Worker(self.function)
        self.alive.add(worker)
        answer = worker.ask(None, START_SECONDS)
        if answer[0] != "ready":
            self.drop(worker)
            raise ValueError(f"the reward function {self.function} cannot be loaded:\n{answer[1]}")
        return worker

    def drop(self, worker: Worker) -> None:
        worker.kill()
        self.alive.discard(worker)

    def run(self, worker: Worker | None) -> None:
        while (job := self.jobs.get()) is not None:
            sample, future = job
            try:
                if self.closing.is_set():
                    raise ValueError("the run has ended")
                worker = worker or self.start()
                kind, *rest = worker.ask((sample, self.kwargs), self.timeout_s)
            except Exception:  # it could not be started, or the sample does not go through a pipe
                kind, rest = "error", [traceback.format_exc()]
            if kind == "dead" and worker is not None:
                self.drop(worker)
                worker = None
            future.set_result(Outcome(*rest) if kind == "value" else Outcome(failure=rest[0]))
        if worker is not None:
            self.drop(worker)

    def close(self, threads: list[threading.Thread]) -> None:
        """Calls in flight fail at once."""
        self.closing.set()
        for _ in threads:
            self.jobs.put(None)
        for worker in list(self.alive):
            worker.kill()
        for thread in threads:
            if thread is not threading.current_thread():  # the garbage collector may call from any thread
                thread.join(END_SECONDS)


class Sandbox:
    """`workers` processes that share a queue of samples. The first is started, and the function loaded, at once.

    Closing, being forgotten and the end of the interpreter all end the processes.
    """

    def __init__(self, function: str, kwargs: Mapping[str, Any], *, workers: int, timeout_s: float) -> None:
        self.name = name_of(function)  # in logs
        service = Service(function, dict(kwargs), timeout_s)  # the threads hold it, and nothing that holds us
        self._jobs = service.jobs
        first = [service.start(), *[None] * (workers - 1)]
        threads = [threading.Thread(target=service.run, args=(worker,), daemon=True) for worker in first]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, service.close, threads)

    def submit(self, sample: Mapping[str, Any]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self._jobs.put((dict(sample), future))
        return future


class InProcess:
    """A Python callable handed over as an object. It runs here, where no process can be killed: only what it raises is
    caught. Reward files have the sandbox."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        refuse_other_signatures(function)
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.function, self.kwargs = function, dict(kwargs)

    def submit(self, sample: Mapping[str, Any]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        try:
            _, value, extras = call(self.function, dict(sample), self.kwargs)
            future.set_result(Outcome(value, extras))
        except Exception:
            future.set_result(Outcome(failure=traceback.format_exc()))
        return future

    def close(self) -> None: ...
