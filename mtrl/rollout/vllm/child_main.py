"""The child process of `process_engine.py`: runs the engine, serves calls from a socket, and ends with the trainer."""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from mtrl.utils.errors import RunError, StartError


def serve(connection: Connection) -> None:
    """The first message makes the engine; each later one is a call. Errors are returned as text."""
    from safetensors.torch import load_file

    from mtrl.rollout.vllm.inprocess import VllmInProcess

    host: VllmInProcess | None = None
    while True:
        name, arguments = connection.recv()
        try:
            result: Any = None
            if name == "start":
                host = VllmInProcess(*arguments)
                result = host.max_length
            elif name == "load":
                label, path = arguments
                assert host is not None
                host.load(label, load_file(path))
            else:
                result = getattr(host, name)(*arguments)
            connection.send((None, result))
        except (RunError, StartError) as error:
            connection.send((type(error).__name__, str(error)))


def end_with(trainer: int) -> None:
    """Nobody writes into this pipe: reading it returns when the trainer ends, in whatever way."""
    os.read(trainer, 1)
    os._exit(1)


def main() -> None:
    connection, trainer = Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=end_with, args=(trainer,), daemon=True).start()
    try:
        serve(connection)
    except (EOFError, ConnectionError):
        os._exit(0)  # the trainer has closed it; no need to wait for vLLM's threads


if __name__ == "__main__":
    main()
