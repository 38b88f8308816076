"""User functions in separate processes with limits of time and memory: whatever one does, only its call fails."""

from __future__ import annotations

import math
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

from mtrl.rewards.loading import WorkerSetup, reward_name
from mtrl.rewards.messages import read_outcomes, read_start
from mtrl.rewards.outcomes import Outcome
from mtrl.rewards.signatures import Sample, Traits, UserReward
from mtrl.sandbox.frames import WorkerLost
from mtrl.sandbox.image_files import ImageFiles, pack
from mtrl.sandbox.plain_text import sanitize_tail
from mtrl.sandbox.worker_process import END_SECONDS, START_SECONDS, WorkerProcess, memory_per_worker, warn_about_strays
from mtrl.types import Needs
from mtrl.utils.errors import StartError

ASYNC_GRACE = 2.0  # seconds for a worker to stop an async call itself, before it is killed
MAX_LOST_WORKERS = 10  # in a row; then the other responses of the step fail at once, or it could take hours
ROWS_PER_MESSAGE = 128  # to a worker, at most
ROWS_PER_BATCH = 64  # per call of a batch function, or one group if that is larger
PROVIDED_SIGNALS = Needs("old_logprobs", "entropy")  # always provided on request; others if something else needs them
IMAGES = ImageFiles()  # shared by all functions, which read the same images


def split_calls(traits: Traits, group: Sequence[int], workers: int) -> list[list[int]]:
    """Divide the rows into messages to a worker. A batch function sees whole groups."""
    if not traits.batch:
        return list(shrinking_batches(len(group), workers, ROWS_PER_BATCH if traits.concurrent else ROWS_PER_MESSAGE))
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


def shrinking_batches(rows: int, workers: int, max_size: int) -> Iterator[list[int]]:
    """Yield all rows in batches that become smaller towards the end, so that no worker waits long for another."""
    done = 0
    while done < rows:
        size = min(max_size, math.ceil((rows - done) / (2 * workers)))
        yield list(range(done, done + size))
        done += size


@dataclass
class RewardJob:
    """Samples of one message, their futures, and the deadline."""

    samples: list[Sample]
    futures: list[Future[Outcome]]
    deadline: float = math.inf  # end of the step's time, on the monotonic clock

    def __post_init__(self) -> None:
        ids = [sample.get("response_token_ids", ()) for sample in self.samples]
        self.pending = {index: len(each) for index, each in enumerate(ids)}  # samples without outcome: their tokens

    def settle(self, index: int | None, outcome: Outcome) -> None:
        """Set the outcome of a sample; None stands for all pending samples."""
        for each in sorted(self.pending) if index is None else (index,):
            del self.pending[each]
            self.futures[each].set_result(outcome)

    def split_off(self, indices: Sequence[int]) -> RewardJob:
        return RewardJob([self.samples[i] for i in indices], [self.futures[i] for i in indices], self.deadline)


@dataclass
class WorkerPool:
    """The work of a sandbox's threads: each has a worker, sends it jobs and replaces it when it is lost. Whatever
    happens, a thread continues and every sample gets an outcome."""

    setup: WorkerSetup
    step_seconds: float = math.inf
    traits: Traits | None = None  # reported by the first worker
    jobs: queue.SimpleQueue[RewardJob | None] = field(default_factory=queue.SimpleQueue)
    alive: set[WorkerProcess] = field(default_factory=set)
    closing: threading.Event = field(default_factory=threading.Event)
    lost_in_a_row: int = 0

    def start(self, seconds: float = START_SECONDS) -> WorkerProcess:
        setup = pickle.dumps(self.setup)
        worker = WorkerProcess(IMAGES.directory.name, "mtrl.rewards.worker_main")
        self.alive.add(worker)
        try:
            worker.send(setup, seconds)
            traits, error, contained = read_start(worker.receive(seconds))
        except WorkerLost as lost:
            traits, error, contained = None, f"{lost}\n{worker.output()}", True
        if traits is None:
            self.drop(worker)
            separator = "\n" if "\n" in error else " "
            raise ValueError(f"the reward function {self.setup.function} cannot be loaded:{separator}{error}")
        if not contained:
            warn_about_strays()
        self.traits = self.traits or traits
        return worker

    def drop(self, worker: WorkerProcess) -> None:
        self.alive.discard(worker)
        worker.release()

    def run(self, worker: WorkerProcess | None) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                worker = self.serve(job, worker)
            except BaseException:  # if the thread ended, samples would wait forever
                job.settle(None, Outcome(failure="the sandbox failed: " + sanitize_tail(traceback.format_exc())))
                worker = None
            del job  # a waiting thread must not keep the images of a step
        self.jobs.put(None)  # for the next thread
        if worker is not None:
            self.drop(worker)

    def serve(self, job: RewardJob, worker: WorkerProcess | None) -> WorkerProcess | None:
        """Run a job in the worker or in a new one; return the worker if it is still usable."""
        if reason := self.reason_to_skip(job):
            job.settle(None, Outcome(failure=reason))
            return worker
        try:
            message = pack(job.samples, IMAGES)
        except Exception:  # a column that cannot be pickled
            self.retry_one_by_one(job, Outcome(failure=sanitize_tail(traceback.format_exc())))
            return worker
        try:
            worker = worker or self.start(min(START_SECONDS, job.deadline - time.monotonic()))
        except Exception as error:
            self.lost_in_a_row += 1
            job.settle(None, Outcome(failure=sanitize_tail(str(error))))
            return None
        try:
            if self.collect(job, worker, message):
                return worker
        except WorkerLost as lost:
            self.lost_in_a_row += 1
            self.fail_current(job, worker.current_sample, Outcome(failure=str(lost), output=worker.output()))
        except Exception:
            job.settle(None, Outcome(failure="the sandbox failed: " + sanitize_tail(traceback.format_exc())))
        self.drop(worker)
        return None

    def reason_to_skip(self, job: RewardJob) -> str:
        """Return why a job need not be tried, or an empty string."""
        if self.closing.is_set():
            return "the run has ended"
        if time.monotonic() >= job.deadline:
            return f"not called: {self.out_of_time()}"
        if self.lost_in_a_row >= MAX_LOST_WORKERS:
            return f"not called: the {MAX_LOST_WORKERS} calls before it all lost their worker process"
        return ""

    def out_of_time(self) -> str:
        return f"all responses together took longer than worker.reward.step_timeout_s={self.step_seconds:g}"

    def collect(self, job: RewardJob, worker: WorkerProcess, message: bytes) -> bool:
        """Receive the outcomes of a job; return whether the worker is still usable."""
        assert self.traits is not None
        seconds = self.setup.timeout_s + (ASYNC_GRACE if self.traits.concurrent else 0.0)
        worker.send(message, min(seconds, job.deadline - time.monotonic()))
        while job.pending:
            left = job.deadline - time.monotonic()
            received = worker.receive(min(seconds, left), self.out_of_time() if left < seconds else None)
            output = worker.output()
            outcomes, ends = read_outcomes(received, job.pending, output)
            self.lost_in_a_row = 0
            for index, outcome in outcomes:
                job.settle(index, outcome)
            if ends:
                self.requeue(job, Outcome(failure=outcomes[-1][1].failure or "its process ended", output=output))
                return False
        return True

    def fail_current(self, job: RewardJob, index: int, failure: Outcome) -> None:
        """Handle a lost worker: the sample that it was at fails; if samples ran concurrently, each is retried."""
        assert self.traits is not None
        if self.traits.concurrent and not self.traits.batch:
            self.retry_one_by_one(job, failure)
        else:
            if not self.traits.batch:
                job.settle(index if index in job.pending else min(job.pending), failure)
            self.requeue(job, failure)

    def retry_one_by_one(self, job: RewardJob, failure: Outcome) -> None:
        if len(job.pending) == 1 or self.fails_together():
            job.settle(None, failure)
        for index in sorted(job.pending):
            self.jobs.put(job.split_off([index]))

    def requeue(self, job: RewardJob, failure: Outcome) -> None:
        """Queue pending samples again. The call of a batch function failed for all of them."""
        if self.fails_together():
            job.settle(None, failure)
        elif job.pending:
            self.jobs.put(job.split_off(sorted(job.pending)))

    def fails_together(self) -> bool:
        return self.closing.is_set() or self.traits is None or self.traits.batch

    def close(self, threads: list[threading.Thread]) -> None:
        """End threads and workers; running calls fail at once."""
        self.closing.set()
        self.jobs.put(None)
        for worker in list(self.alive):
            worker.kill()
        for thread in threads:
            if thread is not threading.current_thread():  # the garbage collector may call from any thread
                thread.join(END_SECONDS)
        self.settle_all()

    def settle_all(self) -> None:
        """Fail the queued jobs, since no thread takes them any more."""
        with suppress(queue.Empty):
            while True:
                if job := self.jobs.get_nowait():
                    job.settle(None, Outcome(failure="the run has ended"))
        self.jobs.put(None)


class Sandbox:
    """`workers` processes that share a queue of samples. The first starts, and loads the function, at once.

    The processes end on close, on garbage collection and at interpreter exit.
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
        setup = WorkerSetup(function, dict(kwargs), timeout_s, memory_bytes or memory_per_worker(workers))
        self._pool = pool = WorkerPool(setup, step_timeout_s)  # the threads refer to it, but never to self
        self._workers = workers
        first = [pool.start(), *[None] * (workers - 1)]
        assert pool.traits is not None, "set by the first worker"
        self.traits = pool.traits
        self.needs = PROVIDED_SIGNALS if self.traits.signals else Needs()
        self.name = self.traits.name or reward_name(function)  # in logs
        threads = [threading.Thread(target=pool.run, args=(worker,), daemon=True) for worker in first]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, pool.close, threads)

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> list[Future[Outcome]]:
        """Start scoring. The time limit of a step begins here, for all samples together."""
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        deadline = time.monotonic() + self._pool.step_seconds
        self._pool.lost_in_a_row = 0
        for rows in split_calls(self.traits, group or range(len(samples)), self._workers):
            self._pool.jobs.put(RewardJob([samples[row] for row in rows], [futures[row] for row in rows], deadline))
        if self._pool.closing.is_set():
            self._pool.settle_all()
        return futures


def copy_containers(value: Any) -> Any:
    """Copy lists and dicts, so that a function in this process may change them."""
    if isinstance(value, Mapping):
        return {key: copy_containers(each) for key, each in value.items()}
    return [copy_containers(each) for each in value] if isinstance(value, list) else value


class InProcess:
    """A Python callable given as an object. It runs in this process, so only its exceptions are caught; reward files
    run in the sandbox."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self.name: str = getattr(function, "__name__", type(function).__name__)
        try:
            self._reward = UserReward(function, kwargs)
        except ValueError as error:
            raise StartError(f"the reward function {self.name}: {error}") from error
        self.needs = PROVIDED_SIGNALS if self._reward.traits.signals else Needs()

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> list[Future[Outcome]]:
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        for rows in split_calls(self._reward.traits, group or range(len(samples)), workers=1):
            job = RewardJob([copy_containers(samples[row]) for row in rows], [futures[row] for row in rows])
            self._reward.score(job.samples, job.settle)
        return futures

    def close(self) -> None: ...
