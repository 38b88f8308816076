"""Map a function over many rows: in forked processes if that is safe and worthwhile, else in this process.

Forked workers inherit the function with its encoder, so nothing is pickled or imported again (which would take seconds
per worker, and a `__main__` guard in the user's script). If a worker dies or stalls, this process does the rest.
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
from typing import Any, TextIO, TypeVar

CHUNK = 128  # rows per task of a worker
MIN_ROWS_TO_FORK = 1000  # fewer are done before a process has started
STALLED_S = 120.0  # seconds without a result after which workers count as stalled

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

_job: Callable[[int], Any]  # in a worker


def map_rows(
    job: Callable[[int], Result],
    rows: Sequence[int],
    label: str,
    *,
    workers: int | None = None,
    stalled_s: float = STALLED_S,
) -> list[Result]:
    """Return `[job(row) for row in rows]`, with a progress bar. An exception of the job is raised here."""
    chunks = [list(rows[start : start + CHUNK]) for start in range(0, len(rows), CHUNK)]
    workers = min(usable_cores() if workers is None else workers, len(chunks))
    done: dict[int, list[Result]] = {}
    with Progress(len(rows), label) as progress:
        if workers > 1 and len(rows) >= MIN_ROWS_TO_FORK and can_fork():
            for number, results in _map_in_processes(job, chunks, workers, stalled_s):
                done[number] = results
                progress.add(len(results))
        for number, chunk in enumerate(chunks):
            if number not in done:
                done[number] = [job(row) for row in chunk]
                progress.add(len(chunk))
    return [result for number in range(len(chunks)) for result in done[number]]


def _map_in_processes(
    job: Callable[[int], Result], chunks: list[list[int]], workers: int, stalled_s: float
) -> Iterator[tuple[int, list[Result]]]:
    """Yield finished chunks as they come; not all of them if the workers fail."""
    others, healthy = set(multiprocessing.active_children()), False
    context = multiprocessing.get_context("fork")  # which does not pickle the job
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(job,))
    try:
        with warnings.catch_warnings():  # a fork with threads is safe here: the job takes no lock of another thread
            warnings.simplefilter("ignore", DeprecationWarning)
            numbers: dict[Future[Any], int] = {pool.submit(_run_chunk, chunk): i for i, chunk in enumerate(chunks)}
        while numbers:
            finished, _ = wait(numbers, timeout=stalled_s, return_when=FIRST_COMPLETED)
            if not finished:
                logger.warning("the worker processes have stalled; continuing in this process, which is slower")
                return
            for future in finished:
                yield numbers.pop(future), future.result()
        healthy = True
    except BrokenProcessPool:
        logger.warning("a worker process died (out of memory?); continuing in this process, which is slower")
    finally:
        if not healthy:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
        pool.shutdown(wait=healthy, cancel_futures=True)


def _start_worker(job: Callable[[int], Any]) -> None:
    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warn about the fork; a worker uses one core
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    """Exit this worker when its parent ends. Otherwise the worker of a killed run would wait forever and hold the
    run's lock, which it inherited."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_chunk(chunk: list[int]) -> list[Any]:
    return [_job(row) for row in chunk]


def can_fork() -> bool:
    """Linux only (elsewhere system libraries break in forks), and not in a daemon process: it may have no children."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """A bar on a terminal, elsewhere a line every ten seconds; nothing for short work."""

    def __init__(self, total: int, label: str, stream: TextIO | None = None) -> None:
        self.total, self.label, self.stream = total, label, stream or sys.stderr
        self.done, self.started_at, self.printed_at = 0, time.monotonic(), time.monotonic()
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
        elif time.monotonic() - self.printed_at > 10:
            self._print()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        elif kind is None and time.monotonic() - self.started_at > 2:
            self._print()

    def _print(self) -> None:
        self.printed_at = time.monotonic()
        seconds = self.printed_at - self.started_at
        print(f"{self.label}: {self.done} of {self.total} rows in {seconds:.0f} s", file=self.stream, flush=True)
