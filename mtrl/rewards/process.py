"""A worker process as its owner sees it: messages with a time limit, the end of what it prints, and its death."""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

from mtrl.rewards.loading import PLACE, Setup

END_SECONDS = 5.0  # how long a process may outlive the end of its pipe
KEPT_OUTPUT = 4_000  # bytes kept of what a worker prints
# The directory we stand in comes last, or a random.py there would hide Python's.
START = "import sys; sys.path.sort(key=lambda place: place == ''); from mtrl.rewards.worker import main; main()"


class WorkerLost(Exception):
    """The worker died or took too long, and must be replaced."""


class WorkerProcess:
    """Starts a worker and talks to it. Everything the worker prints comes through a pipe and is thrown away but for its
    end, so that it can neither flood a terminal nor wait for a reader. It has a session of its own: it is killed with
    all that it started, and Ctrl-C is ours alone."""

    def __init__(self, setup: Setup) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._printed, prints = os.pipe()
        os.set_blocking(self._printed, False)
        with tempfile.TemporaryFile() as shared:
            shared.truncate(mmap.PAGESIZE)
            self._place = mmap.mmap(shared.fileno(), mmap.PAGESIZE)
            handed = [theirs.fileno(), shared.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", START, *map(str, handed)],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                stdout=prints,
                stderr=prints,
                start_new_session=True,
            )
        theirs.close()
        os.close(prints)
        self._output = b""
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLIN)
        self._poll.register(self._printed, select.POLLIN)
        self.send(pickle.dumps(setup))

    def send(self, message: bytes) -> None:
        PLACE.pack_into(self._place, 0, 0)
        try:
            self._connection.send_bytes(message)
        except OSError:
            raise WorkerLost(self._last_words()) from None

    def receive(self, seconds: float) -> Any:
        """The next message. Raises WorkerLost."""
        limit = time.monotonic() + seconds
        while True:
            left = limit - time.monotonic()
            ready = dict(self._poll.poll(None if left == math.inf else max(0, math.ceil(1000 * left))))
            if ready:
                self._take_prints()
            if self._connection.fileno() in ready:
                try:
                    return self._connection.recv()
                except Exception:  # the pipe ended, or holds what the function itself wrote there
                    raise WorkerLost(self._last_words()) from None
            if left <= 0:
                raise WorkerLost(f"took longer than {seconds:g} s")

    @property
    def place(self) -> int:
        """Index, in the last message, of the sample that the worker is at."""
        return int(PLACE.unpack_from(self._place)[0])

    def output(self) -> str:
        """The end of what it printed since it was last asked."""
        printed, self._output = self._output, b""
        return printed.decode(errors="replace")

    def kill(self) -> None:
        """Kills the process, ended or not, and whatever it started; a `receive` in another thread sees its pipe end."""
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def release(self) -> None:
        """Kills it and closes its pipes; nobody may use it any more."""
        self.kill()
        self._connection.close()
        self._place.close()
        os.close(self._printed)

    def _take_prints(self) -> None:
        """Takes the output that is there now: all that was printed before a message that has arrived."""
        for _ in range(4):  # a pipe holds one read's worth; one who prints for ever must not keep us here
            try:
                printed = os.read(self._printed, 1 << 16)
            except BlockingIOError:
                return
            if not printed:  # it closed its output
                with suppress(KeyError):
                    self._poll.unregister(self._printed)
                return
            self._output = (self._output + printed)[-KEPT_OUTPUT:]

    def _last_words(self) -> str:
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process broke its pipe and went on"
        self._take_prints()
        if status >= 0:
            return f"its process ended with status {status}"
        why = " (out of memory?)" if -status == signal.SIGKILL else ""
        return f"its process was killed by {signal.Signals(-status).name}{why}"
