"""A reward worker process: loads one user function and calls it until its socket closes. Imports nothing heavy.

It receives a `WorkerSetup` and sends the function's traits, or why it cannot be loaded. Then it receives lists of
samples and sends outcomes as they are done (`messages.py`).
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import time
import traceback

from mtrl.rewards.loading import WorkerSetup, load_reward
from mtrl.rewards.messages import FLUSH_BYTES, encode_outcome, encode_outcomes, encode_start
from mtrl.rewards.outcomes import Outcome
from mtrl.rewards.signatures import UserReward
from mtrl.sandbox.frames import PROGRESS, make_frame, read_frame
from mtrl.sandbox.plain_text import sanitize_tail
from mtrl.sandbox.worker_start import start_worker
from mtrl.utils.plugins import PluginError

FLUSH_SECONDS = 0.02  # between two messages; at most this much work is repeated if the process dies


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
    worker = start_worker()
    if worker is None:
        return
    reward, error = load(worker.setup)
    traits = reward.traits if reward else None
    worker.connection.sendall(make_frame(0, encode_start(traits, error, worker.contained)))
    if reward is None:
        return
    sender = OutcomeSender(worker.connection, worker.progress_fd, at_once=reward.traits.concurrent)
    while frame := read_frame(worker.stream):
        sender.job, message = frame
        try:
            samples = [pickle.loads(sample) for sample in pickle.loads(message)]
        except Exception:
            sender.add(None, Outcome(failure=sanitize_tail(traceback.format_exc())))
        else:
            reward.score(samples, lambda index, outcome: sender.add(index, outcome, ends=reward.out_of_memory))
        sender.flush()
