"""The trainer's handle of a worker process: messages with a time limit, its latest output, and its end."""

from __future__ import annotations

import functools
import logging
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
from collections.abc import Mapping
from contextlib import suppress

from mtrl.sandbox.frames import FRAME, INVALID, MAX_MESSAGE_BYTES, PROGRESS, WorkerLost, make_frame
from mtrl.sandbox.plain_text import sanitize_tail

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # time limit of loading user code: its file may import a large library
MIN_MEMORY_LIMIT = 8 << 30  # bytes per worker, whatever the machine has: libraries reserve more than they use
END_SECONDS = 5.0  # how long a process may outlive the end of its pipe
MAX_OUTPUT_BYTES = 4_000
MAX_POLL_SECONDS = 3600.0  # the system's own limit is 2,147,483
# The current directory comes last in sys.path, or a random.py there would hide Python's.
START = "import sys; sys.path.sort(key=lambda path: path == ''); from {} import main; main()"


def memory_per_worker(workers: int) -> int:
    """Return the memory limit of each worker in bytes: together half of the machine, so that a mistake cannot bring it
    down."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(MIN_MEMORY_LIMIT, machine // (2 * workers))


@functools.cache
def warn_about_strays() -> None:
    logger.warning("this system does not let us end processes that user code moves to a new session (setsid): they "
                   "may outlive the run (this is logged once)")  # fmt: skip


class WorkerProcess:
    """Starts a worker with its supervisor and exchanges messages with it. Every wait has a time limit.

    The worker's output goes through a pipe, of which only the end is stored, so that it can neither flood a terminal
    nor block. The worker has its own session, so that Ctrl-C reaches only the trainer.
    """

    def __init__(
        self,
        scratch: str,
        main: str,  # the module whose `main` it runs
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        variables: Mapping[str, str] | None = None,  # of its environment
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        read_fd, write_fd = os.pipe()
        self._pipe = os.fdopen(read_fd, "rb", buffering=0)
        os.set_blocking(read_fd, False)
        self._progress = tempfile.TemporaryFile()  # noqa: SIM115  The worker may truncate it: we never map it
        self._progress.truncate(mmap.PAGESIZE)
        descriptors = [theirs.fileno(), self._progress.fileno()]
        with theirs, open(write_fd, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", START.format(main), *map(str, descriptors), str(os.getpid()), scratch],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=None if variables is None else os.environ | variables,
            )
        self._job, self._received, self._output = -1, bytearray(), b""
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)

    def send(self, message: bytes, seconds: float, same_job: bool = False) -> None:
        """Begin a job, or add to the current one; the first is the setup. Raise WorkerLost if the worker does not take
        it within this time."""
        self._job += not same_job
        left, deadline = memoryview(make_frame(self._job, message)), time.monotonic() + seconds
        while left:
            self._wait(select.POLLOUT, deadline, f"did not take its samples within {seconds:g} s")
            with suppress(BlockingIOError):
                try:
                    left = left[self._socket.send(left) :]
                except ConnectionError:
                    raise WorkerLost(self._describe_end()) from None

    def receive(self, seconds: float, late: str | None = None) -> bytes:
        """Return the next message of the job. Raise WorkerLost, with the reason `late` if it is not complete within
        this time."""
        message = self.receive_or_wake(seconds, None, late)
        assert message is not None, "only a descriptor ends the wait before"
        return message

    def receive_or_wake(self, seconds: float, wake: int | None, late: str | None = None) -> bytes | None:
        """The same, but return None as soon as the descriptor `wake` can be read."""
        deadline = time.monotonic() + seconds
        while (message := self._pop_message()) is None:
            if not self._wait(select.POLLIN, deadline, late or f"took longer than {seconds:g} s", wake):
                return None
            with suppress(BlockingIOError):
                try:
                    received = self._socket.recv(1 << 16)
                except ConnectionError:
                    received = b""
                if not received:
                    raise WorkerLost(self._describe_end())
                self._received += received
        return message

    @property
    def current_sample(self) -> int:
        """Index, in the job, of the sample that the worker is at."""
        data = os.pread(self._progress.fileno(), PROGRESS.size, 0)
        job, index = PROGRESS.unpack(data) if len(data) == PROGRESS.size else (self._job, 0)
        return int(index) if job == self._job else 0

    def output(self) -> str:
        """Return the end of the output since the last call."""
        output, self._output = self._output, b""
        return sanitize_tail(output.decode(errors="replace"), MAX_OUTPUT_BYTES)

    def kill(self) -> None:
        """Make the supervisor kill the worker and its processes; a `receive` in another thread sees the end of the
        connection."""
        self._process.terminate()

    def release(self) -> None:
        """Kill the worker and close its pipes."""
        self.kill()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # the supervisor was stopped, or cannot end its descendants
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        for each in (self._socket, self._progress, self._pipe):
            each.close()

    def _pop_message(self) -> bytes | None:
        """Return the first received message if it is complete."""
        if len(self._received) < FRAME.size:
            return None
        job, length = FRAME.unpack_from(self._received)
        if job != self._job or length > self._max_message_bytes:
            raise WorkerLost(INVALID)
        end = FRAME.size + length
        if len(self._received) < end:
            return None
        message = bytes(self._received[FRAME.size : end])
        del self._received[:end]
        return message

    def _wait(self, event: int, deadline: float, late: str, wake: int | None = None) -> bool:
        """Wait until the socket is ready, and read the worker's output meanwhile, which would otherwise block it.
        Return False if the descriptor `wake` is ready instead."""
        self._poll.register(self._socket, event)
        if wake is not None:
            self._poll.register(wake, select.POLLIN)
        try:
            return self._poll_socket(deadline, late, wake)
        finally:
            if wake is not None:
                self._poll.unregister(wake)

    def _poll_socket(self, deadline: float, late: str, wake: int | None) -> bool:
        while True:
            left = deadline - time.monotonic()
            ready = dict(self._poll.poll(math.ceil(1000 * min(max(0.0, left), MAX_POLL_SECONDS))))
            if ready:
                self._read_output()
            if self._socket.fileno() in ready:
                return True
            if wake in ready:
                return False
            if left <= 0:
                raise WorkerLost(late)

    def _read_output(self) -> None:
        """Read the available output, which includes all that was printed before a received message."""
        for _ in range(4):  # a pipe holds one read; a worker that prints forever must not keep us here
            output = self._pipe.read(1 << 16)
            if output is None:
                return
            if not output:  # it closed its output
                with suppress(KeyError):
                    self._poll.unregister(self._pipe)
                return
            self._output = (self._output + output)[-MAX_OUTPUT_BYTES:]

    def _describe_end(self) -> str:
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process closed its connection, but still runs"
        self._read_output()
        if status >= 0:
            return f"its process ended with status {status}"
        hint = " (out of memory?)" if -status == signal.SIGKILL else ""
        names = {each.value: each.name for each in signal.Signals}
        return f"its process was killed by {names.get(-status, f'signal {-status}')}{hint}"
