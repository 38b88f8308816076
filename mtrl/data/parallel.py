"""One function over many rows: in forked processes where that is safe and pays, else here.

Forked workers inherit the function, the encoder in it included, so nothing is pickled and nothing imported again (which
costs seconds a worker, and a `__main__` guard in the user's script). A worker that dies or stands still costs time, not
the run: the rest is done in this process.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, TextIO, TypeVar

CHUNK = 128  # rows a worker takes at once
FORK_PAYS = 1000  # rows from which forking pays; fewer are done before a process has started
STALLED_S = 120.0  # seconds without a finished chunk after which the workers are given up

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

_job: Callable[[int], Any] | None = None  # set before the fork, so that workers find it


def map_rows(
    job: Callable[[int], Result],
    rows: Sequence[int],
    label: str,
    *,
    workers: int | None = None,
    stream: TextIO | None = None,
    stalled_s: float = STALLED_S,
) -> list[Result]:
    """`[job(row) for row in rows]`, with a progress bar. An exception of the job is raised here."""
    chunks = [list(rows[start : start + CHUNK]) for start in range(0, len(rows), CHUNK)]
    workers = min(usable_cores() if workers is None else workers, len(chunks))
    done: dict[int, list[Result]] = {}
    with Progress(len(rows), label, stream) as progress:
        if workers > 1 and len(rows) >= FORK_PAYS and may_fork():
            for number, results in _forked(job, chunks, workers, stalled_s):
                done[number] = results
                progress.add(len(results))
        for number, chunk in enumerate(chunks):
            if number not in done:
                done[number] = [job(row) for row in chunk]
                progress.add(len(chunk))
    return [result for number in range(len(chunks)) for result in done[number]]


def _forked(
    job: Callable[[int], Result], chunks: list[list[int]], workers: int, stalled_s: float
) -> Iterator[tuple[int, list[Result]]]:
    """Finished chunks as they come; fewer than all of them when the workers fail."""
    global _job
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_start_worker)
    _job, healthy = job, False
    try:
        with warnings.catch_warnings():  # a fork beside threads: safe here, the job takes no lock another thread holds
            warnings.simplefilter("ignore", DeprecationWarning)
            numbers: dict[Future[Any], int] = {pool.submit(_run_chunk, chunk): i for i, chunk in enumerate(chunks)}
        while numbers:
            finished, _ = wait(numbers, timeout=stalled_s, return_when=FIRST_COMPLETED)
            if not finished:
                logger.warning("the worker processes stand still; going on in this one, which is slower")
                return
            for future in finished:
                yield numbers.pop(future), future.result()
        healthy = True
    except BrokenProcessPool:
        logger.warning("a worker process died (out of memory?); going on in this one, which is slower")
    finally:
        _job = None
        if not healthy:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
        pool.shutdown(wait=healthy, cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizers would warn of the fork; one core each is the point
    threading.Thread(target=leave_with_parent, daemon=True).start()


def leave_with_parent() -> None:
    """Ends this worker with its parent. Else the worker of a run that was killed would wait for ever, and keep the
    run's lock, which it inherited."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_chunk(chunk: list[int]) -> list[Any]:
    assert _job is not None
    return [_job(row) for row in chunk]


def may_fork() -> bool:
    """Linux only (elsewhere system libraries break in forks), and not in a process that may have no children."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """A bar on a terminal, a line every ten seconds elsewhere; nothing for what is done at once."""

    def __init__(self, total: int, label: str, stream: TextIO | None) -> None:
        self.total, self.label, self.stream = total, label, stream or sys.stderr
        self.done, self.started, self.said = 0, time.monotonic(), time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if self.stream.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped]

            self.bar = tqdm(total=self.total, desc=self.label, unit=" rows", file=self.stream, delay=0.5)
        return self

    def add(self, rows: int) -> None:
        self.done += rows
        if self.bar is not None:
            self.bar.update(rows)
        elif time.monotonic() - self.said > 10:
            self._say()

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.close()
        elif kind is None and time.monotonic() - self.started > 2:
            self._say()

    def _say(self) -> None:
        self.said = time.monotonic()
        seconds = self.said - self.started
        print(f"{self.label}: {self.done} of {self.total} rows in {seconds:.0f} s", file=self.stream, flush=True)
