"""What a process for user code does first: it gets a supervisor, limits and its setup. Imports nothing heavy.

Its arguments are two file descriptors, of a socket and of the shared progress, the parent's process id, and a directory
that must not outlive the parent; `worker_process.py` starts it.
"""

from __future__ import annotations

import os
import pickle
import resource
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any, BinaryIO

from mtrl.sandbox.frames import read_frame
from mtrl.sandbox.supervisor import fork_worker


@dataclass(frozen=True)
class WorkerStart:
    """What a new worker has."""

    connection: socket.socket
    stream: BinaryIO  # frames from the trainer
    progress_fd: int
    contained: bool  # all processes that it starts will end with it
    setup: Any  # the first message; it has a field `memory_bytes`


def start_worker() -> WorkerStart | None:
    """Return in the worker, with its limits set; None if the trainer has gone already."""
    socket_fd, progress_fd, parent = map(int, sys.argv[1:4])
    contained = fork_worker(parent, sys.argv[4], (socket_fd, progress_fd))
    for descriptor in (socket_fd, progress_fd):
        os.set_inheritable(descriptor, False)  # not for processes that user code starts
    connection = socket.socket(fileno=socket_fd)
    stream = connection.makefile("rb")
    first = read_frame(stream)
    if first is None:
        return None
    setup = pickle.loads(first[1])
    limit_memory(setup.memory_bytes)
    allow_open_files()
    return WorkerStart(connection, stream, progress_fd, contained, setup)


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


def exit_if_forked(owner: int, error: BaseException | None = None) -> None:
    """Exit as Python would in a child that user code forked, which must not become a second worker."""
    if os.getpid() == owner:
        return
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    status = error.code if isinstance(error, SystemExit) else int(error is not None)
    os._exit(status if isinstance(status, int) else int(status is not None))
