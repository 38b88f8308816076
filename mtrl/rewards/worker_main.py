"""A reward worker process: loads one user function and calls it until its socket closes. Imports nothing heavy.

Its arguments are two file descriptors, of a socket and of the shared progress, the parent's process id, and a directory
that must not outlive the parent; `worker_process.py` starts it.

It receives a `WorkerSetup` and sends the function's traits, or why it cannot be loaded. Then it receives lists of
samples and sends outcomes as they are done (`messages.py`).
"""

from __future__ import annotations

import mmap
import os
import pickle
import resource
import socket
import sys
import time
import traceback

from mtrl.rewards.loading import WorkerSetup, load_reward
from mtrl.rewards.messages import (
    FLUSH_BYTES,
    PROGRESS,
    encode_outcome,
    encode_outcomes,
    encode_start,
    make_frame,
    read_frame,
)
from mtrl.rewards.outcomes import Outcome, sanitize_tail
from mtrl.rewards.signatures import UserReward
from mtrl.rewards.supervisor import fork_worker
from mtrl.utils.plugins import PluginError

FLUSH_SECONDS = 0.02  # between two messages; at most this much work is repeated if the process dies


def limit_memory(size: int) -> None:
    """Limit the memory of this process and of its children, so that an excess is a MemoryError here and does not take
    the machine's memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = [size] + [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(allowed), hard))


def allow_open_files() -> None:
    """Raise the limit of open files to the system's maximum: an image is an open file until its pixels are read, and a
    message may contain thousands."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class OutcomeSender:
    """Sends outcomes in batches, since one message each would take longer than a fast function. The current sample is
    in memory shared with the parent, which shows where this process died."""

    def __init__(self, connection: socket.socket, progress_fd: int, at_once: bool) -> None:
        self.connection, self.at_once = connection, at_once
        self.progress = mmap.mmap(progress_fd, mmap.PAGESIZE)
        self.job, self.unsent, self.size = 0, list[str](), 0
        self.sent_at = time.monotonic()

    def add(self, index: int | None, outcome: Outcome, ends: bool = False) -> None:
        self.unsent.append(encode_outcome(index, outcome))
        self.size += len(self.unsent[-1])
        if index is not None:
            PROGRESS.pack_into(self.progress, 0, self.job, index + 1)
        if ends or self.at_once or self.size > FLUSH_BYTES or time.monotonic() - self.sent_at > FLUSH_SECONDS:
            self.flush(ends)

    def flush(self, ends: bool = False) -> None:
        if self.unsent:
            self.connection.sendall(make_frame(self.job, encode_outcomes(self.unsent, ends)))
        self.unsent, self.size, self.sent_at = [], 0, time.monotonic()
        if ends:  # out of memory: the function may never release its memory, but a new process has none of it
            os._exit(0)


def load(setup: WorkerSetup) -> tuple[UserReward | None, str]:
    """Return the function, or why it cannot be loaded."""
    try:
        return load_reward(setup.function, setup.kwargs, setup.timeout_s), ""
    except PluginError as error:
        return None, str(error)
    except BaseException:
        return None, traceback.format_exc()


def main() -> None:
    socket_fd, progress_fd, parent = map(int, sys.argv[1:4])
    contained = fork_worker(parent, sys.argv[4], (socket_fd, progress_fd))
    for descriptor in (socket_fd, progress_fd):
        os.set_inheritable(descriptor, False)  # not for processes that a function starts
    connection = socket.socket(fileno=socket_fd)
    stream = connection.makefile("rb")
    first = read_frame(stream)
    if first is None:
        return
    setup: WorkerSetup = pickle.loads(first[1])
    limit_memory(setup.memory_bytes)
    allow_open_files()
    reward, error = load(setup)
    connection.sendall(make_frame(0, encode_start(reward.traits if reward else None, error, contained)))
    if reward is None:
        return
    sender = OutcomeSender(connection, progress_fd, at_once=reward.traits.concurrent)
    while frame := read_frame(stream):
        sender.job, message = frame
        try:
            samples = [pickle.loads(sample) for sample in pickle.loads(message)]
        except Exception:
            sender.add(None, Outcome(failure=sanitize_tail(traceback.format_exc())))
        else:
            reward.score(samples, lambda index, outcome: sender.add(index, outcome, ends=reward.out_of_memory))
        sender.flush()
