"""vLLM in a child process, which isolates its memory, output and crashes. If it dies, it is started again with the
weights that it held."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.rollout.vllm.requests import Request, Response
from mtrl.rollout.vllm.settings import check_installed
from mtrl.rollout.vllm.weight_files import count_bytes, make_folder, write_weights
from mtrl.utils.errors import RunError, StartError

logger = logging.getLogger(__name__)
ERRORS = {"RunError": RunError, "StartError": StartError}
CONNECTION_LOST = (EOFError, ConnectionError, OSError)


class VllmProcess:
    """Takes the arguments of `VllmInProcess`, and the `dtype` that the engine computes in."""

    def __init__(
        self, arguments: Mapping[str, Any], image_arguments: Mapping[str, Any] | None, dtype: torch.dtype
    ) -> None:
        check_installed()
        self._setup, self.dtype = (dict(arguments), dict(image_arguments or {})), dtype
        self.sleeps = bool(arguments.get("enable_sleep_mode"))
        self._folder: Path | None = None  # holds the weights, from the first load on
        self._loaded: tuple[str, str] | None = None  # label and file of the last weights
        self._awake = True
        self._start()

    def generate(self, requests: Sequence[Request], params: Mapping[str, Any]) -> list[list[Response]]:
        responses: list[list[Response]] = self._call("generate", list(requests), dict(params))
        return responses

    def load(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        if self._folder is None:
            self._folder = make_folder(count_bytes(tensors, self.dtype))
        weights = label, str(write_weights(self._folder, tensors, self.dtype))
        self._call("load", *weights)
        self._loaded = weights

    def wake(self, to_load: bool = False) -> None:
        if self.sleeps:
            self._call("wake", to_load)
        self._awake = True

    def sleep(self) -> None:
        if self.sleeps and self._awake:
            self._call("sleep")
        self._awake = False

    def close(self) -> None:
        self._stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---------------------------------------------------------------------------------------------------- the process
    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        watched, self._life = os.pipe()  # the child ends when the trainer's end is closed
        inherited = [theirs.fileno(), watched]
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mtrl.rollout.vllm.child_main", *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env=os.environ | threads | current_gpu() | {"PYTHONPATH": _python_path()},
                start_new_session=True,  # Ctrl-C reaches only the trainer, which ends the child
            )
        os.close(watched)
        self._connection = Connection(ours.detach())
        try:
            self.max_length: int = self._send("start", *self._setup)
        except CONNECTION_LOST:
            raise StartError(f"the process of vLLM ended while it started ({self._exit_reason()})") from None

    def _stop(self) -> None:
        with suppress(OSError):
            self._connection.close()
        with suppress(OSError):
            os.close(self._life)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result, from a new process if the child has died; a second death in the same call is an error. Sampling
        is keyed, so that a repeated call gives the same responses."""
        try:
            return self._send(name, *arguments)
        except CONNECTION_LOST:
            message = "the process of vLLM has ended (%s): it is started again with the weights it held"
            logger.warning(message, self._exit_reason())
        try:
            self._restart()
            return self._send(name, *arguments)
        except StartError as error:  # the run has begun, and keeps what it has saved
            raise RunError(str(error)) from error
        except CONNECTION_LOST:
            raise RunError(
                f"the process of vLLM has ended twice in the same call ({self._exit_reason()}). Its output says why; "
                "to use less memory, lower worker.rollout.gpu_memory_utilization or max_new_tokens"
            ) from None

    def _restart(self) -> None:
        self._stop()
        self._start()
        if self._loaded is not None:
            self._send("load", *self._loaded)
        if not self._awake:
            self._send("sleep")

    def _send(self, name: str, *arguments: Any) -> Any:
        self._connection.send((name, arguments))
        error, result = self._connection.recv()
        if error is not None:
            raise ERRORS[error](result)
        return result

    def _exit_reason(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.returncode
        return "it does not answer" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"


def current_gpu() -> dict[str, str]:
    """The variable that makes the child use the GPU of this process, which may see several."""
    if not torch.cuda.is_available():
        return {}
    visible, number = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.current_device()
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number] if visible else str(number)}


def _python_path() -> str:
    """The child imports mtrl from the same folder."""
    root = str(Path(__file__).parents[3])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
