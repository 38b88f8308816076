"""A worker process as its owner sees it: messages with a time limit, the end of what it prints, and its death."""

from __future__ import annotations

import math
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

from mtrl.rewards.messages import FRAME, MOST_BYTES, PLACE, WorkerLost, framed
from mtrl.rewards.outcomes import last_words

END_SECONDS = 5.0  # how long a process may outlive the end of its pipe
KEPT_OUTPUT = 4_000  # bytes kept of what a worker prints
LONGEST_POLL = 3600.0  # seconds: the system's own limit is 2,147,483
# The directory we stand in comes last, or a random.py there would hide Python's.
START = "import sys; sys.path.sort(key=lambda place: place == ''); from mtrl.rewards.worker_main import main; main()"


class WorkerProcess:
    """Starts a worker with its supervisor and talks to it. Nothing here waits for the worker longer than it is told to.

    Everything the worker prints comes through a pipe and is thrown away but for its end, so that it can neither flood a
    terminal nor wait for a reader. It has a session of its own, so that Ctrl-C is ours alone.
    """

    def __init__(self, scratch: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        printed, prints = os.pipe()
        self._printed = os.fdopen(printed, "rb", buffering=0)
        os.set_blocking(printed, False)
        self._place = tempfile.TemporaryFile()  # noqa: SIM115  The worker may cut it short: we never map it
        self._place.truncate(mmap.PAGESIZE)
        handed = [theirs.fileno(), self._place.fileno()]
        with theirs, open(prints, "wb") as prints_file:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", START, *map(str, handed), str(os.getpid()), scratch],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                stdout=prints_file,
                stderr=prints_file,
                start_new_session=True,
            )
        self._job, self._received, self._output = -1, bytearray(), b""
        self._poll = select.poll()
        self._poll.register(self._printed, select.POLLIN)

    def send(self, message: bytes, seconds: float) -> None:
        """Begins a job; the first is the setup. Raises WorkerLost, also where the worker does not take the message
        within this time."""
        self._job += 1
        left, limit = memoryview(framed(self._job, message)), time.monotonic() + seconds
        while left:
            self._wait(select.POLLOUT, limit, f"did not take its samples within {seconds:g} s")
            with suppress(BlockingIOError):
                try:
                    left = left[self._socket.send(left) :]
                except ConnectionError:
                    raise WorkerLost(self._last_words()) from None

    def receive(self, seconds: float, late: str | None = None) -> bytes:
        """The next message on the job. Raises WorkerLost, with the reason `late` where it does not come within this
        time, or only half of it does."""
        limit = time.monotonic() + seconds
        while (message := self._message()) is None:
            self._wait(select.POLLIN, limit, late or f"took longer than {seconds:g} s")
            with suppress(BlockingIOError):
                try:
                    received = self._socket.recv(1 << 16)
                except ConnectionError:
                    received = b""
                if not received:
                    raise WorkerLost(self._last_words())
                self._received += received
        return message

    @property
    def place(self) -> int:
        """Index, among the samples of the job, of the one that the worker is at."""
        there = os.pread(self._place.fileno(), PLACE.size, 0)
        job, place = PLACE.unpack(there) if len(there) == PLACE.size else (self._job, 0)
        return int(place) if job == self._job else 0

    def output(self) -> str:
        """The end of what it printed since it was last asked."""
        printed, self._output = self._output, b""
        return last_words(printed.decode(errors="replace"), KEPT_OUTPUT)

    def kill(self) -> None:
        """Asks its supervisor to kill it and whatever it started; a `receive` in another thread sees its pipe end."""
        self._process.terminate()

    def release(self) -> None:
        """Kills it and closes its pipes; nobody may use it any more."""
        self.kill()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # the supervisor was stopped, or cannot end what stands below it
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        for each in (self._socket, self._place, self._printed):
            each.close()

    def _message(self) -> bytes | None:
        """The message at the head of what was received, once it is whole."""
        if len(self._received) < FRAME.size:
            return None
        job, length = FRAME.unpack_from(self._received)
        if job != self._job or length > MOST_BYTES:
            raise WorkerLost("its process sent what is no answer")
        end = FRAME.size + length
        if len(self._received) < end:
            return None
        message = bytes(self._received[FRAME.size : end])
        del self._received[:end]
        return message

    def _wait(self, event: int, limit: float, late: str) -> None:
        """Until its socket is ready for this. Takes meanwhile what it prints, or it would wait for us."""
        self._poll.register(self._socket, event)
        while True:
            left = limit - time.monotonic()
            ready = dict(self._poll.poll(math.ceil(1000 * min(max(0.0, left), LONGEST_POLL))))
            if ready:
                self._take_prints()
            if self._socket.fileno() in ready:
                return
            if left <= 0:
                raise WorkerLost(late)

    def _take_prints(self) -> None:
        """Takes the output that is there now: all that was printed before a message that has arrived."""
        for _ in range(4):  # a pipe holds one read's worth; one who prints for ever must not keep us here
            printed = self._printed.read(1 << 16)
            if printed is None:
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
        known = {each.value: each.name for each in signal.Signals}
        return f"its process was killed by {known.get(-status, f'signal {-status}')}{why}"
