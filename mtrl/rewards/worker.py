"""A reward worker process: loads one user function and calls it until its pipe closes. Imports nothing heavy.

Its arguments are two file descriptors, of a pipe and of the shared place; `process.py` starts it.

It receives a `Setup` and answers ("ready", traits) or ("error", message). Then it receives lists of samples and answers
([(place in the list, fields of its outcome), ..], whether it ends now) as they are done; no place: for all the list.
"""

from __future__ import annotations

import mmap
import os
import pickle
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from mtrl.plugins import PluginError
from mtrl.rewards.loading import PLACE, Setup, load_reward
from mtrl.rewards.outcomes import Outcome

ANSWER_SECONDS = 0.02  # seconds between two answers: at most so much work is done again where a process dies


def end_with(parent: int, scratch: str) -> None:
    """Waits for the end of the parent, then tidies up and ends this process with all that it started: a parent that was
    killed cannot."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


def limit_memory(size: int) -> None:
    """Limits the memory of this process, and of each that it starts: beyond it there is a MemoryError here, rather than
    a machine without memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = [size] + [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(allowed), hard))


def allow_open_files() -> None:
    """Raises the limit of open files as far as the system lets us: an image is an open file until it is looked at, and
    a message may bring thousands."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Answers:
    """Outcomes on their way back, some at a time: a message for each would cost more than a quick function does. Where
    the work is stands in a number that the parent shares, for it to know which sample this process died of."""

    def __init__(self, connection: Connection, place_fd: int, at_once: bool) -> None:
        self.connection, self.at_once = connection, at_once
        self.place = mmap.mmap(place_fd, mmap.PAGESIZE)
        self.waiting: list[tuple[Any, ...]] = []
        self.sent = time.monotonic()

    def add(self, place: int | None, outcome: Outcome, ends: bool = False) -> None:
        self.waiting.append((place, outcome.value, outcome.extras, outcome.failure, outcome.seconds))
        if place is not None:
            PLACE.pack_into(self.place, 0, place + 1)
        if ends or self.at_once or time.monotonic() - self.sent > ANSWER_SECONDS:
            self.flush(ends)

    def flush(self, ends: bool = False) -> None:
        if self.waiting:
            self.connection.send_bytes(pickle.dumps((self.waiting, ends)))
        self.waiting, self.sent = [], time.monotonic()
        if ends:  # out of memory: what the function holds may never come free, and a new process has room again
            os._exit(0)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    setup: Setup = connection.recv()
    threading.Thread(target=end_with, args=(setup.parent, setup.scratch), daemon=True).start()
    limit_memory(setup.memory_bytes)
    allow_open_files()
    try:
        reward = load_reward(setup.function, setup.kwargs, setup.timeout_s)
    except PluginError as error:
        connection.send(("error", str(error)))
        return
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        return
    connection.send(("ready", reward.traits))
    answers = Answers(connection, int(sys.argv[2]), at_once=reward.traits.concurrent)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            samples = [pickle.loads(sample) for sample in pickle.loads(message)]
        except Exception:
            answers.add(None, Outcome(failure=traceback.format_exc()))
        else:
            reward.score(samples, lambda place, outcome: answers.add(place, outcome, ends=reward.out_of_memory))
        answers.flush()
