"""A reward worker process: loads one user function and calls it until its socket closes. Imports nothing heavy.

Its arguments are two file descriptors, of a socket and of the shared place, the parent's process id, and a directory
that must not outlive the parent; `process.py` starts it.

It receives a `Setup` and answers with the function's traits, or why it has none. Then it receives lists of samples and
answers with outcomes as they are done (`messages.py`); no place in the list: for all the list.
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

from mtrl.rewards.loading import Setup, load_reward
from mtrl.rewards.messages import ENOUGH, PLACE, framed, read_frame, written_answer, written_answers, written_start
from mtrl.rewards.outcomes import Outcome, last_words
from mtrl.rewards.signatures import UserReward
from mtrl.rewards.supervisor import supervised
from mtrl.utils.plugins import PluginError

ANSWER_SECONDS = 0.02  # seconds between two answers: at most so much work is done again where a process dies


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


class AnswerPipe:
    """Outcomes on their way back, some at a time: a message for each would cost more than a quick function does. Where
    the work is stands in a number that the parent shares, for it to know which sample this process died of."""

    def __init__(self, connection: socket.socket, place_fd: int, at_once: bool) -> None:
        self.connection, self.at_once = connection, at_once
        self.place = mmap.mmap(place_fd, mmap.PAGESIZE)
        self.job, self.waiting, self.size = 0, list[str](), 0
        self.sent = time.monotonic()

    def add(self, place: int | None, outcome: Outcome, ends: bool = False) -> None:
        self.waiting.append(written_answer(place, outcome))
        self.size += len(self.waiting[-1])
        if place is not None:
            PLACE.pack_into(self.place, 0, self.job, place + 1)
        if ends or self.at_once or self.size > ENOUGH or time.monotonic() - self.sent > ANSWER_SECONDS:
            self.flush(ends)

    def flush(self, ends: bool = False) -> None:
        if self.waiting:
            self.connection.sendall(framed(self.job, written_answers(self.waiting, ends)))
        self.waiting, self.size, self.sent = [], 0, time.monotonic()
        if ends:  # out of memory: what the function holds may never come free, and a new process has room again
            os._exit(0)


def load(setup: Setup) -> tuple[UserReward | None, str]:
    """The function, or why there is none."""
    try:
        return load_reward(setup.function, setup.kwargs, setup.timeout_s), ""
    except PluginError as error:
        return None, str(error)
    except BaseException:
        return None, traceback.format_exc()


def main() -> None:
    socket_fd, place_fd, parent = map(int, sys.argv[1:4])
    contained = supervised(parent, sys.argv[4], (socket_fd, place_fd))
    for descriptor in (socket_fd, place_fd):
        os.set_inheritable(descriptor, False)  # what a function starts has no business there
    connection = socket.socket(fileno=socket_fd)
    stream = connection.makefile("rb")
    first = read_frame(stream)
    if first is None:
        return
    setup: Setup = pickle.loads(first[1])
    limit_memory(setup.memory_bytes)
    allow_open_files()
    reward, error = load(setup)
    connection.sendall(framed(0, written_start(reward.traits if reward else None, error, contained)))
    if reward is None:
        return
    answers = AnswerPipe(connection, place_fd, at_once=reward.traits.concurrent)
    while frame := read_frame(stream):
        answers.job, message = frame
        try:
            samples = [pickle.loads(sample) for sample in pickle.loads(message)]
        except Exception:
            answers.add(None, Outcome(failure=last_words(traceback.format_exc())))
        else:
            reward.score(samples, lambda place, outcome: answers.add(place, outcome, ends=reward.out_of_memory))
        answers.flush()
