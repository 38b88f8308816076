"""Processes that make prompts ahead of use: reading, decoding and resizing take a core for some 20 ms a picture.

Forked, as for the scan (`parallel.py`). A process is asked for a position and answers with the whole prompt; its pixels
travel once, from the memory of one into that of the other. One that dies, or stands still, costs time and not the run:
what it was asked is made in this process.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import queue
import signal
import socket
import struct
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mtrl.data.parallel import STALLED_S, leave_with_parent, may_fork, usable_cores
from mtrl.data.row_settings import BadRow
from mtrl.types import Prompt

MOST_WORKERS = 8
WORKER_PAYS = 65_536  # pixels of a row, on average, from which a process is worth its answers' way
NONE: Any = None
POSITION, HEAD, SIZE = struct.Struct("<q"), struct.Struct("<II"), struct.Struct("<Q")

Load = Callable[[int], Prompt | BadRow]
logger = logging.getLogger(__name__)


def worker_count(asked: int | None, pixels: np.ndarray) -> int:
    """`asked`, or as many as pay for rows of so many pixels; 0 where processes cannot be forked."""
    if not may_fork() or asked == 0:
        return 0
    if asked is None:
        cores = usable_cores()
        return min(MOST_WORKERS, cores) if cores > 1 and len(pixels) and pixels.mean() >= WORKER_PAYS else 0
    return asked


class DecodeWorkers:
    """`load` in so many processes. Call it from as many threads."""

    def __init__(self, load: Load, count: int) -> None:
        self._load, self._idle = load, queue.SimpleQueue[_Worker | None]()
        context = multiprocessing.get_context("fork")
        workers = [_Worker.start(context, load) for _ in range(count)]
        for worker in workers:
            self._idle.put(worker)
        self.processes = [worker.process for worker in workers]
        self.close = weakref.finalize(self, _end, workers)  # runs once, at exit at the latest

    def load(self, position: int) -> Prompt | BadRow:
        worker = self._idle.get()
        try:
            if worker is None:  # it has died
                return self._load(position)
            answer = worker.ask(position)
        except OSError as error:  # a timeout is one, and so is the end of the process
            if self.close.alive:
                what = "stands still" if isinstance(error, TimeoutError) else "has died (out of memory?)"
                logger.warning("a process that reads data %s; this one takes its place, which is slower", what)
            assert worker is not None
            worker.process.kill()
            worker = None
            return self._load(position)
        finally:
            self._idle.put(worker)
        if isinstance(answer, _Failed):
            if answer.error is not None:
                raise answer.error
            return self._load(position)  # a row that cannot be sent, such as one with a function in it
        return answer


@dataclass(frozen=True)
class _Failed:
    error: BaseException | None = None  # None: the answer cannot be pickled


@dataclass(frozen=True)
class _Worker:
    process: Any
    connection: socket.socket

    @classmethod
    def start(cls, context: Any, load: Load) -> _Worker:
        ours, theirs = socket.socketpair()
        with warnings.catch_warnings():  # a fork beside threads: what the child does takes no lock that one may hold
            warnings.simplefilter("ignore", DeprecationWarning)
            process = context.Process(target=_serve, args=(theirs, load), name="mtrl-data", daemon=True)
            process.start()
        theirs.close()
        ours.settimeout(STALLED_S)
        return cls(process, ours)

    def ask(self, position: int) -> Any:
        self.connection.sendall(POSITION.pack(position))
        length, count = HEAD.unpack(_received(self.connection, HEAD.size))
        sizes = [SIZE.unpack(_received(self.connection, SIZE.size))[0] for _ in range(count)]
        data = _received(self.connection, length)
        return unpacked(pickle.loads(data, buffers=[_received(self.connection, size) for size in sizes]))


def _serve(connection: socket.socket, load: Load) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # threads do not outlive a fork
    threading.Thread(target=leave_with_parent, daemon=True).start()
    while True:
        try:
            (position,) = POSITION.unpack(_received(connection, POSITION.size))
        except OSError:
            return
        try:
            answer: Any = packed(load(position))
        except BaseException as error:  # whatever it is, it is raised where the result is asked for
            answer = _Failed(error)
        _send(connection, answer)


def _send(connection: socket.socket, answer: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(answer, 5, buffer_callback=buffers.append)
    except Exception:  # objects of the user's raise anything
        data, buffers = pickle.dumps(_Failed()), []
    raw = [buffer.raw() for buffer in buffers]
    sizes = b"".join(SIZE.pack(each.nbytes) for each in raw)
    connection.sendall(HEAD.pack(len(data), len(raw)) + sizes + data)
    for each in raw:
        connection.sendall(each)


def _received(connection: socket.socket, size: int) -> memoryview:
    """So many bytes, straight to where they stay."""
    left = data = np.empty(size, np.uint8).data
    while left:
        count = connection.recv_into(left)
        if not count:
            raise ConnectionError("the other end is closed")
        left = left[count:]
    return data


def packed(answer: Prompt | BadRow) -> Any:
    """A prompt with its tensors as arrays, which travel without a copy."""
    if isinstance(answer, BadRow):
        return answer
    tensors = [np.ascontiguousarray(each.numpy()) for each in (answer.ids, answer.engine_ids, answer.token_pool)]
    media = [np.ascontiguousarray(each) for each in answer.media]
    return replace(answer, ids=NONE, engine_ids=NONE, token_pool=NONE, media=()), tensors, media


def unpacked(answer: Any) -> Any:
    if not isinstance(answer, tuple):
        return answer
    prompt, tensors, media = answer
    for each in media:
        each.flags.writeable = False  # several prompts may share it
    ids, engine_ids, pool = map(torch.from_numpy, tensors)
    return replace(prompt, ids=ids, engine_ids=engine_ids, pool=pool, media=tuple(media))


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
        worker.process.kill()  # it holds nothing that could be lost
    for worker in workers:
        worker.process.join()
