"""Messages to and from a process with user code: a frame with the job's number and a length, then that many bytes.
Imports nothing heavy."""

from __future__ import annotations

import struct
from typing import BinaryIO

FRAME = struct.Struct("!QQ")  # number of the job, bytes that follow
PROGRESS = struct.Struct("qq")  # the worker's job and current sample, in memory shared with the trainer
MAX_MESSAGE_BYTES = 8 << 20  # one message from a worker, unless its owner allows more
INVALID = "its process sent an invalid message"


class WorkerLost(Exception):
    """The worker died, took too long or sent an invalid message, and must be replaced."""


def read_frame(stream: BinaryIO) -> tuple[int, bytes] | None:
    """Return the next job and its message, or None at the end of the stream."""
    frame = stream.read(FRAME.size)
    if len(frame) < FRAME.size:
        return None
    job, length = FRAME.unpack(frame)
    message = stream.read(length)
    return (job, message) if len(message) == length else None


def make_frame(job: int, message: bytes) -> bytes:
    return FRAME.pack(job, len(message)) + message
