"""Processes that make prompts ahead of use: reading, decoding and resizing take some 20 ms of a core per image.

They are forked, as for the scan (`parallel.py`). A process receives a position and sends back the prompt; its pixels
are copied once, through a socket. If a process dies or stalls, this process makes its prompts.

torch's DataLoader does not serve: see docs/choices.md.
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

from mtrl.data.parallel import STALLED_S, can_fork, exit_with_parent, usable_cores
from mtrl.data.row_settings import BadRow
from mtrl.types import Prompt

MAX_WORKERS = 8
MIN_PIXELS_PER_ROW = 65_536  # on average; for smaller images threads are as fast as processes
NONE: Any = None
POSITION, HEAD, SIZE = struct.Struct("<q"), struct.Struct("<II"), struct.Struct("<Q")

Load = Callable[[int], Prompt | BadRow]
logger = logging.getLogger(__name__)


def worker_count(requested: int | None, pixels: np.ndarray) -> int:
    """Return the number of processes: `requested`, or one per core if images are large; 0 if forking is unsafe."""
    if not can_fork() or requested == 0:
        return 0
    if requested is None:
        cores = usable_cores()
        return min(MAX_WORKERS, cores) if cores > 1 and len(pixels) and pixels.mean() >= MIN_PIXELS_PER_ROW else 0
    return requested


class DecodeWorkers:
    """Runs `load` in `count` processes; call it from as many threads. `share_pixels` is applied to received prompts."""

    def __init__(self, load: Load, share_pixels: Callable[[Prompt], Prompt], count: int) -> None:
        self._load, self._share_pixels, self._idle = load, share_pixels, queue.SimpleQueue[_Worker | None]()
        context = multiprocessing.get_context("fork")
        workers = [_Worker.start(context, load) for _ in range(count)]
        for worker in workers:
            self._idle.put(worker)
        self.processes = [worker.process for worker in workers]
        self.close = weakref.finalize(self, _kill, workers)  # runs once, also at exit

    def load(self, position: int) -> Prompt | BadRow:
        worker = self._idle.get()
        try:
            if worker is None:  # it has died
                return self._load(position)
            result = worker.request(position)
        except OSError as error:  # a timeout, or the end of the process
            if self.close.alive:
                reason = "has stalled" if isinstance(error, TimeoutError) else "has died (out of memory?)"
                logger.warning("a process that reads data %s; the main process replaces it, which is slower", reason)
            assert worker is not None
            worker.process.kill()
            worker = None
            return self._load(position)
        finally:
            self._idle.put(worker)
        if isinstance(result, _Failed):
            if result.error is not None:
                raise result.error
            return self._load(position)  # a row that cannot be pickled, such as one with a function in it
        return result if isinstance(result, BadRow) else self._share_pixels(result)


@dataclass(frozen=True)
class _Failed:
    error: BaseException | None = None  # None: the result cannot be pickled


@dataclass(frozen=True)
class _Worker:
    process: Any
    connection: socket.socket

    @classmethod
    def start(cls, context: Any, load: Load) -> _Worker:
        ours, theirs = socket.socketpair()
        with warnings.catch_warnings():  # a fork with threads is safe here: the child takes no lock of another thread
            warnings.simplefilter("ignore", DeprecationWarning)
            process = context.Process(target=_serve, args=(theirs, load), name="mtrl-data", daemon=True)
            process.start()
        theirs.close()
        ours.settimeout(STALLED_S)
        return cls(process, ours)

    def request(self, position: int) -> Any:
        self.connection.sendall(POSITION.pack(position))
        length, count = HEAD.unpack(_receive(self.connection, HEAD.size))
        sizes = [SIZE.unpack(_receive(self.connection, SIZE.size))[0] for _ in range(count)]
        data = _receive(self.connection, length)
        return unpack_prompt(pickle.loads(data, buffers=[_receive(self.connection, size) for size in sizes]))


def _serve(connection: socket.socket, load: Load) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # torch's threads do not survive a fork
    threading.Thread(target=exit_with_parent, daemon=True).start()
    while True:
        try:
            (position,) = POSITION.unpack(_receive(connection, POSITION.size))
        except OSError:
            return
        try:
            result: Any = pack_prompt(load(position))
        except BaseException as error:  # raised where the result is used
            result = _Failed(error)
        _send(connection, result)


def _send(connection: socket.socket, result: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(result, 5, buffer_callback=buffers.append)
    except Exception:  # user objects may raise anything
        data, buffers = pickle.dumps(_Failed()), []
    raw = [buffer.raw() for buffer in buffers]
    sizes = b"".join(SIZE.pack(each.nbytes) for each in raw)
    connection.sendall(HEAD.pack(len(data), len(raw)) + sizes + data)
    for each in raw:
        connection.sendall(each)


def _receive(connection: socket.socket, size: int) -> memoryview:
    """Receive `size` bytes without another copy."""
    left = data = np.empty(size, np.uint8).data
    while left:
        count = connection.recv_into(left)
        if not count:
            raise ConnectionError("the other end is closed")
        left = left[count:]
    return data


def pack_prompt(result: Prompt | BadRow) -> Any:
    """Convert the tensors of a prompt to arrays, which pickle sends without a copy."""
    if isinstance(result, BadRow):
        return result
    tensors = [np.ascontiguousarray(each.numpy()) for each in (result.ids, result.engine_ids, result.token_pool)]
    media = [np.ascontiguousarray(each) for each in result.media]
    return replace(result, ids=NONE, engine_ids=NONE, token_pool=NONE, media=()), tensors, media


def unpack_prompt(result: Any) -> Any:
    if not isinstance(result, tuple):
        return result
    prompt, tensors, media = result
    for each in media:
        each.flags.writeable = False  # several prompts may share it
    ids, engine_ids, pool = map(torch.from_numpy, tensors)
    return replace(prompt, ids=ids, engine_ids=engine_ids, token_pool=pool, media=tuple(media))


def _kill(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
        worker.process.kill()  # a worker has no state to lose
    for worker in workers:
        worker.process.join()
