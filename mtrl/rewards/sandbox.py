"""User functions in processes of their own, with limits of time and memory: whatever one does, only its call fails."""

from __future__ import annotations

import math
import os
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mtrl.rewards.images import ImageFiles, pack
from mtrl.rewards.loading import Setup, name_of
from mtrl.rewards.outcomes import Outcome
from mtrl.rewards.process import END_SECONDS, WorkerLost, WorkerProcess
from mtrl.rewards.signatures import Sample, Traits, UserReward
from mtrl.types import Needs

START_SECONDS = 120.0  # time limit of loading a function: a reward file may import something large
LEAST_MEMORY = 8 << 30  # bytes that a worker may have whatever the machine has: libraries reserve more than they use
ASYNC_GRACE = 2.0  # seconds that a worker gets to stop an async call itself, before it is killed
HOPELESS = 10  # workers lost in a row: the rest of a step's responses fail untried, or a step could take hours
ROWS_PER_MESSAGE = 128  # most samples in one message to a worker
ROWS_PER_BATCH = 64  # samples that a function of many responses gets in a call; more where a group is larger
SIGNALS_TOLD = Needs(
    "old", "entropy"
)  # what a function that asks for signals can count on; more, where others need more
IMAGES = ImageFiles()  # one for the whole process: several functions look at the same images


def split_calls(traits: Traits, group: Sequence[int], workers: int) -> list[list[int]]:
    """Which rows go to a worker together. A function of many responses sees groups whole."""
    if not traits.batch:
        return list(falling(len(group), workers, ROWS_PER_BATCH if traits.concurrent else ROWS_PER_MESSAGE))
    members: dict[int, list[int]] = {}
    for row, g in enumerate(group):
        members.setdefault(g, []).append(row)
    calls: list[list[int]] = []
    for rows in members.values():
        if calls and len(calls[-1]) + len(rows) <= ROWS_PER_BATCH:
            calls[-1] += rows
        else:
            calls.append(rows)
    return calls


def falling(rows: int, workers: int, most: int) -> Iterator[list[int]]:
    """All rows in messages that are large while there is much to do, and small at the end, so that no worker waits long
    for another."""
    done = 0
    while done < rows:
        size = min(most, math.ceil((rows - done) / (2 * workers)))
        yield list(range(done, done + size))
        done += size


def memory_share(workers: int) -> int:
    """Bytes that each worker may have: half of the machine's memory for all of them together, so that a mistake cannot
    end the machine."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(LEAST_MEMORY, machine // (2 * workers))


@dataclass
class Job:
    """Samples that travel together, and who waits for them."""

    samples: list[Sample]
    futures: list[Future[Outcome]]

    def __post_init__(self) -> None:
        self.waiting = set(range(len(self.samples)))

    def settle(self, place: int | None, outcome: Outcome) -> None:
        """Hands the outcome to the sample at `place`; None stands for all samples that still wait."""
        for each in sorted(self.waiting) if place is None else (place,):
            self.waiting.discard(each)
            self.futures[each].set_result(outcome)

    def rest(self, places: Sequence[int]) -> Job:
        return Job([self.samples[place] for place in places], [self.futures[place] for place in places])


@dataclass
class Service:
    """What the threads of a sandbox do: each has a worker, replaces it where it was lost, and takes jobs to it."""

    setup: Setup
    traits: Traits = field(init=False)
    jobs: queue.SimpleQueue[Job | None] = field(default_factory=queue.SimpleQueue)
    alive: set[WorkerProcess] = field(default_factory=set)
    closing: threading.Event = field(default_factory=threading.Event)
    lost_in_a_row: int = 0

    def start(self) -> WorkerProcess:
        worker = WorkerProcess(self.setup)
        self.alive.add(worker)
        try:
            kind, told = worker.receive(START_SECONDS)
        except WorkerLost as lost:
            kind, told = "error", f"{lost}\n{worker.output()}"
        if kind == "error":
            self.drop(worker)
            gap = "\n" if "\n" in told else " "
            raise ValueError(f"the reward function {self.setup.function} cannot be loaded:{gap}{told}")
        self.traits = told
        return worker

    def drop(self, worker: WorkerProcess) -> None:
        self.alive.discard(worker)
        worker.release()

    def run(self, worker: WorkerProcess | None) -> None:
        while (job := self.jobs.get()) is not None:
            worker = self.serve(job, worker)
            del job  # while a thread waits, it must not keep a step's images
        if worker is not None:
            self.drop(worker)

    def serve(self, job: Job, worker: WorkerProcess | None) -> WorkerProcess | None:
        """Takes a job to the worker, or to a new one; gives the worker back if it is still good."""
        if self.closing.is_set() or self.lost_in_a_row >= HOPELESS:
            untried = f"not called: the {HOPELESS} calls before it all lost their worker process"
            job.settle(None, Outcome(failure="the run has ended" if self.closing.is_set() else untried))
            return worker
        try:
            message = pack(job.samples, IMAGES)
        except Exception:  # a column that cannot travel
            self.retry_alone(job, Outcome(failure=traceback.format_exc()))
            return worker
        try:
            worker = worker or self.start()
        except Exception as error:
            self.lost_in_a_row += 1
            job.settle(None, Outcome(failure=str(error)))
            return None
        try:
            worker.send(message)
            if self.collect(job, worker):
                return worker
        except WorkerLost as lost:
            self.lost_in_a_row += 1
            self.blame(job, worker.place, Outcome(failure=str(lost), output=worker.output()))
        self.drop(worker)
        return None

    def collect(self, job: Job, worker: WorkerProcess) -> bool:
        """Takes the outcomes as they come; whether the worker is as good as before."""
        limit = self.setup.timeout_s + (ASYNC_GRACE if self.traits.concurrent else 0.0)
        while job.waiting:
            answers, ends = worker.receive(limit)
            self.lost_in_a_row = 0
            output = worker.output()
            for place, value, extras, failure, seconds in answers:
                job.settle(place, Outcome(value, extras, failure, output, seconds))
            if ends:
                self.put_back(job, Outcome(failure=failure, output=output))
                return False
        return True

    def blame(self, job: Job, place: int, failure: Outcome) -> None:
        """A worker was lost. Samples that went one after the other fail at the one it was at; where they went together
        nobody knows which it was."""
        if self.traits.concurrent and not self.traits.batch:
            self.retry_alone(job, failure)
        else:
            if not self.traits.batch:
                job.settle(place if place in job.waiting else min(job.waiting), failure)
            self.put_back(job, failure)

    def retry_alone(self, job: Job, failure: Outcome) -> None:
        if self.traits.batch or len(job.waiting) == 1:
            job.settle(None, failure)
        for place in sorted(job.waiting):
            self.jobs.put(job.rest([place]))

    def put_back(self, job: Job, failure: Outcome) -> None:
        """Queues samples that still wait once more. Where all of them went in one call, it failed for all of them."""
        if self.traits.batch or self.closing.is_set():
            job.settle(None, failure)
        elif job.waiting:
            self.jobs.put(job.rest(sorted(job.waiting)))

    def close(self, threads: list[threading.Thread]) -> None:
        """Ends threads and workers; calls in flight fail at once."""
        self.closing.set()
        for _ in threads:
            self.jobs.put(None)
        for worker in list(self.alive):
            worker.kill()
        for thread in threads:
            if thread is not threading.current_thread():  # the garbage collector may call from any thread
                thread.join(END_SECONDS)
        with suppress(queue.Empty):
            while True:
                if job := self.jobs.get_nowait():
                    job.settle(None, Outcome(failure="the run has ended"))


class Sandbox:
    """`workers` processes that share a queue of samples. The first is started, and the function loaded, at once.

    Closing, being forgotten and the end of the interpreter all end the processes.
    """

    def __init__(
        self,
        function: str,
        kwargs: Mapping[str, Any],
        *,
        workers: int,
        timeout_s: float,
        memory_bytes: int | None = None,
    ) -> None:
        memory = memory_bytes or memory_share(workers)
        setup = Setup(function, dict(kwargs), timeout_s, memory, os.getpid(), IMAGES.directory.name)
        self._service = service = Service(setup)  # the threads hold it, and nothing that holds us
        self._workers = workers
        first = [service.start(), *[None] * (workers - 1)]
        self.needs = SIGNALS_TOLD if service.traits.signals else Needs()
        self.name = service.traits.name or name_of(function)  # the name in logs
        threads = [threading.Thread(target=service.run, args=(worker,), daemon=True) for worker in first]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, service.close, threads)

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> list[Future[Outcome]]:
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        self._service.lost_in_a_row = 0
        for rows in split_calls(self._service.traits, group or range(len(samples)), self._workers):
            self._service.jobs.put(Job([samples[row] for row in rows], [futures[row] for row in rows]))
        return futures


def own_copy(value: Any) -> Any:
    """A copy for a function of this process, in whose lists and dicts it may change what it likes."""
    if isinstance(value, Mapping):
        return {key: own_copy(each) for key, each in value.items()}
    return [own_copy(each) for each in value] if isinstance(value, list) else value


class InProcess:
    """A Python callable handed over as an object. It runs here, at once, where no process can be killed: only what it
    raises is caught. Reward files have the sandbox."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._reward = UserReward(function, kwargs)
        self.needs = SIGNALS_TOLD if self._reward.traits.signals else Needs()

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> list[Future[Outcome]]:
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        for rows in split_calls(self._reward.traits, group or range(len(samples)), workers=1):
            job = Job([own_copy(samples[row]) for row in rows], [futures[row] for row in rows])
            self._reward.score(job.samples, job.settle)
        return futures

    def close(self) -> None: ...
