"""User functions in processes of their own, with limits of time and memory: whatever one does, only its call fails."""

from __future__ import annotations

import functools
import logging
import math
import os
import pickle
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mtrl.rewards.image_files import ImageFiles, pack
from mtrl.rewards.loading import Setup, reward_name
from mtrl.rewards.messages import WorkerLost, read_answers, read_start
from mtrl.rewards.outcomes import Outcome, last_words
from mtrl.rewards.signatures import Sample, Traits, UserReward
from mtrl.rewards.worker_process import END_SECONDS, WorkerProcess
from mtrl.types import Needs

START_SECONDS = 120.0  # time limit of loading a function: a reward file may import something large
LEAST_MEMORY = 8 << 30  # bytes that a worker may have whatever the machine has: libraries reserve more than they use
ASYNC_GRACE = 2.0  # seconds that a worker gets to stop an async call itself, before it is killed
HOPELESS = 10  # workers lost in a row: the rest of a step's responses fail untried, or a step could take hours
ROWS_PER_MESSAGE = 128  # most samples in one message to a worker
ROWS_PER_BATCH = 64  # samples that a function of many responses gets in a call; more where a group is larger
SIGNALS_TOLD = Needs(
    "old_logprobs", "entropy"
)  # what a function that asks for signals can count on; more, where others need more
IMAGES = ImageFiles()  # one for the whole process: several functions look at the same images

logger = logging.getLogger(__name__)


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


@functools.cache
def warn_of_strays() -> None:
    logger.warning("this system does not let us end processes that a reward function moves to a session of their own "
                   "(setsid): they may outlive the run (this is said once)")  # fmt: skip


@dataclass
class RewardJob:
    """Samples that travel together, who waits for them, and until when."""

    samples: list[Sample]
    futures: list[Future[Outcome]]
    limit: float = math.inf  # on the monotonic clock: the end of the step's time

    def __post_init__(self) -> None:
        ids = [sample.get("response_token_ids", ()) for sample in self.samples]
        self.waiting = {place: len(each) for place, each in enumerate(ids)}  # who has no outcome, and its tokens

    def settle(self, place: int | None, outcome: Outcome) -> None:
        """Hands the outcome to the sample at `place`; None stands for all samples that still wait."""
        for each in sorted(self.waiting) if place is None else (place,):
            del self.waiting[each]
            self.futures[each].set_result(outcome)

    def rest(self, places: Sequence[int]) -> RewardJob:
        return RewardJob([self.samples[each] for each in places], [self.futures[each] for each in places], self.limit)


@dataclass
class Service:
    """What the threads of a sandbox do: each has a worker, replaces it where it was lost, and takes jobs to it.
    Whatever happens there, a thread goes on and every sample gets an outcome."""

    setup: Setup
    step_seconds: float = math.inf
    traits: Traits | None = None  # as the first worker told them
    jobs: queue.SimpleQueue[RewardJob | None] = field(default_factory=queue.SimpleQueue)
    alive: set[WorkerProcess] = field(default_factory=set)
    closing: threading.Event = field(default_factory=threading.Event)
    lost_in_a_row: int = 0

    def start(self, seconds: float = START_SECONDS) -> WorkerProcess:
        setup = pickle.dumps(self.setup)
        worker = WorkerProcess(IMAGES.directory.name)
        self.alive.add(worker)
        try:
            worker.send(setup, seconds)
            traits, error, contained = read_start(worker.receive(seconds))
        except WorkerLost as lost:
            traits, error, contained = None, f"{lost}\n{worker.output()}", True
        if traits is None:
            self.drop(worker)
            gap = "\n" if "\n" in error else " "
            raise ValueError(f"the reward function {self.setup.function} cannot be loaded:{gap}{error}")
        if not contained:
            warn_of_strays()
        self.traits = self.traits or traits
        return worker

    def drop(self, worker: WorkerProcess) -> None:
        self.alive.discard(worker)
        worker.release()

    def run(self, worker: WorkerProcess | None) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                worker = self.serve(job, worker)
            except BaseException:  # of a thread that ended, samples would wait for ever
                job.settle(None, Outcome(failure="the sandbox failed: " + last_words(traceback.format_exc())))
                worker = None
            del job  # while a thread waits, it must not keep a step's images
        self.jobs.put(None)  # for the next thread
        if worker is not None:
            self.drop(worker)

    def serve(self, job: RewardJob, worker: WorkerProcess | None) -> WorkerProcess | None:
        """Takes a job to the worker, or to a new one; gives the worker back if it is still good."""
        if why := self.hopeless(job):
            job.settle(None, Outcome(failure=why))
            return worker
        try:
            message = pack(job.samples, IMAGES)
        except Exception:  # a column that cannot travel
            self.retry_alone(job, Outcome(failure=last_words(traceback.format_exc())))
            return worker
        try:
            worker = worker or self.start(min(START_SECONDS, job.limit - time.monotonic()))
        except Exception as error:
            self.lost_in_a_row += 1
            job.settle(None, Outcome(failure=last_words(str(error))))
            return None
        try:
            if self.collect(job, worker, message):
                return worker
        except WorkerLost as lost:
            self.lost_in_a_row += 1
            self.blame(job, worker.place, Outcome(failure=str(lost), output=worker.output()))
        except Exception:
            job.settle(None, Outcome(failure="the sandbox failed: " + last_words(traceback.format_exc())))
        self.drop(worker)
        return None

    def hopeless(self, job: RewardJob) -> str:
        """Why a job need not be tried, if that is so."""
        if self.closing.is_set():
            return "the run has ended"
        if time.monotonic() >= job.limit:
            return f"not called: {self.out_of_time()}"
        if self.lost_in_a_row >= HOPELESS:
            return f"not called: the {HOPELESS} calls before it all lost their worker process"
        return ""

    def out_of_time(self) -> str:
        return f"all responses together took longer than worker.reward.step_timeout_s={self.step_seconds:g}"

    def collect(self, job: RewardJob, worker: WorkerProcess, message: bytes) -> bool:
        """Takes the outcomes as they come; whether the worker is as good as before."""
        assert self.traits is not None
        seconds = self.setup.timeout_s + (ASYNC_GRACE if self.traits.concurrent else 0.0)
        worker.send(message, min(seconds, job.limit - time.monotonic()))
        while job.waiting:
            left = job.limit - time.monotonic()
            told = worker.receive(min(seconds, left), self.out_of_time() if left < seconds else None)
            output = worker.output()
            answers, ends = read_answers(told, job.waiting, output)
            self.lost_in_a_row = 0
            for place, outcome in answers:
                job.settle(place, outcome)
            if ends:
                self.put_back(job, Outcome(failure=answers[-1][1].failure or "its process ended", output=output))
                return False
        return True

    def blame(self, job: RewardJob, place: int, failure: Outcome) -> None:
        """A worker was lost. Samples that went one after the other fail at the one it was at; where they went together
        nobody knows which it was."""
        assert self.traits is not None
        if self.traits.concurrent and not self.traits.batch:
            self.retry_alone(job, failure)
        else:
            if not self.traits.batch:
                job.settle(place if place in job.waiting else min(job.waiting), failure)
            self.put_back(job, failure)

    def retry_alone(self, job: RewardJob, failure: Outcome) -> None:
        if len(job.waiting) == 1 or self.fails_whole():
            job.settle(None, failure)
        for place in sorted(job.waiting):
            self.jobs.put(job.rest([place]))

    def put_back(self, job: RewardJob, failure: Outcome) -> None:
        """Queues samples that still wait once more. Where all of them went in one call, it failed for all of them."""
        if self.fails_whole():
            job.settle(None, failure)
        elif job.waiting:
            self.jobs.put(job.rest(sorted(job.waiting)))

    def fails_whole(self) -> bool:
        return self.closing.is_set() or self.traits is None or self.traits.batch

    def close(self, threads: list[threading.Thread]) -> None:
        """Ends threads and workers; calls in flight fail at once."""
        self.closing.set()
        self.jobs.put(None)
        for worker in list(self.alive):
            worker.kill()
        for thread in threads:
            if thread is not threading.current_thread():  # the garbage collector may call from any thread
                thread.join(END_SECONDS)
        self.settle_rest()

    def settle_rest(self) -> None:
        """Nobody will take a job any more."""
        with suppress(queue.Empty):
            while True:
                if job := self.jobs.get_nowait():
                    job.settle(None, Outcome(failure="the run has ended"))
        self.jobs.put(None)


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
        step_timeout_s: float = math.inf,
        memory_bytes: int | None = None,
    ) -> None:
        setup = Setup(function, dict(kwargs), timeout_s, memory_bytes or memory_share(workers))
        self._service = service = Service(setup, step_timeout_s)  # the threads hold it, and nothing that holds us
        self._workers = workers
        first = [service.start(), *[None] * (workers - 1)]
        assert service.traits is not None, "the first worker told them"
        self.traits = service.traits
        self.needs = SIGNALS_TOLD if self.traits.signals else Needs()
        self.name = self.traits.name or reward_name(function)  # the name in logs
        threads = [threading.Thread(target=service.run, args=(worker,), daemon=True) for worker in first]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, service.close, threads)

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> list[Future[Outcome]]:
        """The time of a step counts from here, for all samples together."""
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        limit = time.monotonic() + self._service.step_seconds
        self._service.lost_in_a_row = 0
        for rows in split_calls(self.traits, group or range(len(samples)), self._workers):
            self._service.jobs.put(RewardJob([samples[row] for row in rows], [futures[row] for row in rows], limit))
        if self._service.closing.is_set():
            self._service.settle_rest()
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
            job = RewardJob([own_copy(samples[row]) for row in rows], [futures[row] for row in rows])
            self._reward.score(job.samples, job.settle)
        return futures

    def close(self) -> None: ...
