"""The trainer's handle of a worker process: messages with a time limit, its latest output, and its end."""

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

from mtrl.rewards.messages import FRAME, INVALID, MAX_MESSAGE_BYTES, PROGRESS, WorkerLost, make_frame
from mtrl.rewards.outcomes import sanitize_tail

END_SECONDS = 5.0  # how long a process may outlive the end of its pipe
MAX_OUTPUT_BYTES = 4_000
MAX_POLL_SECONDS = 3600.0  # the system's own limit is 2,147,483
# The current directory comes last in sys.path, or a random.py there would hide Python's.
START = "import sys; sys.path.sort(key=lambda path: path == ''); from mtrl.rewards.worker_main import main; main()"


class WorkerProcess:
    """Starts a worker with its supervisor and exchanges messages with it. Every wait has a time limit.

    The worker's output goes through a pipe, of which only the end is stored, so that it can neither flood a terminal
    nor block. The worker has its own session, so that Ctrl-C reaches only the trainer.
    """

    def __init__(self, scratch: str) -> None:
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
                [sys.executable, "-u", "-c", START, *map(str, descriptors), str(os.getpid()), scratch],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._job, self._received, self._output = -1, bytearray(), b""
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)

    def send(self, message: bytes, seconds: float) -> None:
        """Begin a job; the first is the setup. Raise WorkerLost if the worker does not take it within this time."""
        self._job += 1
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
        deadline = time.monotonic() + seconds
        while (message := self._pop_message()) is None:
            self._wait(select.POLLIN, deadline, late or f"took longer than {seconds:g} s")
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
        if job != self._job or length > MAX_MESSAGE_BYTES:
            raise WorkerLost(INVALID)
        end = FRAME.size + length
        if len(self._received) < end:
            return None
        message = bytes(self._received[FRAME.size : end])
        del self._received[:end]
        return message

    def _wait(self, event: int, deadline: float, late: str) -> None:
        """Wait until the socket is ready, and read the worker's output meanwhile, which would otherwise block it."""
        self._poll.register(self._socket, event)
        while True:
            left = deadline - time.monotonic()
            ready = dict(self._poll.poll(math.ceil(1000 * min(max(0.0, left), MAX_POLL_SECONDS))))
            if ready:
                self._read_output()
            if self._socket.fileno() in ready:
                return
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
