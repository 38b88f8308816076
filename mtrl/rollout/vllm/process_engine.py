"""vLLM in a process of its own: what it allocates, prints or breaks is not the trainer's. If it dies it is started
again, with the weights that it held."""

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
from mtrl.rollout.vllm.weight_files import new_folder, tensor_bytes, write_weights
from mtrl.utils.errors import RunError, StartError

logger = logging.getLogger(__name__)
ERRORS = {"RunError": RunError, "StartError": StartError}
LOST = (EOFError, ConnectionError, OSError)


class VllmProcess:
    """Arguments as those of `VllmInProcess`; `dtype`: what the engine computes in."""

    def __init__(
        self, arguments: Mapping[str, Any], image_arguments: Mapping[str, Any] | None, dtype: torch.dtype
    ) -> None:
        check_installed()
        self._setup, self.dtype = (dict(arguments), dict(image_arguments or {})), dtype
        self.sleeps = bool(arguments.get("enable_sleep_mode"))
        self._folder: Path | None = None  # of the weights, from the first load on
        self._held: tuple[str, str] | None = None  # label and file of the weights that it was given last
        self._awake = True
        self._start()

    def generate(self, requests: Sequence[Request], params: Mapping[str, Any]) -> list[list[Response]]:
        answers: list[list[Response]] = self._call("generate", list(requests), dict(params))
        return answers

    def load(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        if self._folder is None:
            self._folder = new_folder(tensor_bytes(tensors, self.dtype))
        held = label, str(write_weights(self._folder, tensors, self.dtype))
        self._call("load", *held)
        self._held = held

    def wake(self) -> None:
        if self.sleeps and not self._awake:
            self._call("wake")
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
        watched, self._life = os.pipe()
        handed = [theirs.fileno(), watched]
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mtrl.rollout.vllm.child_main", *map(str, handed)],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                env=os.environ | threads | own_gpu() | {"PYTHONPATH": _python_path()},
                start_new_session=True,  # Ctrl-C is for the trainer, which ends it
            )
        os.close(watched)
        self._connection = Connection(ours.detach())
        try:
            self.max_length: int = self._ask("start", *self._setup)
        except LOST:
            raise StartError(f"the process of vLLM ended while it started ({self._end()})") from None

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
        """An answer, if need be from a new process; one that dies of the same call again is not started a third time.
        Sampling is keyed, so that the same call gives the same responses."""
        try:
            return self._ask(name, *arguments)
        except LOST:
            logger.warning(
                "the process of vLLM has ended (%s): it is started again with the weights it held", self._end()
            )
        try:
            self._restart()
            return self._ask(name, *arguments)
        except StartError as error:  # the run has begun: it ends with what it has
            raise RunError(str(error)) from error
        except LOST:
            raise RunError(
                f"the process of vLLM has ended twice in the same call ({self._end()}). What it printed says why; less "
                "memory is taken with smaller worker.rollout.gpu_memory_utilization or max_new_tokens"
            ) from None

    def _restart(self) -> None:
        self._stop()
        self._start()
        if self._held is not None:
            self._ask("load", *self._held)
        if not self._awake:
            self._ask("sleep")

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._connection.send((name, arguments))
        error, answer = self._connection.recv()
        if error is not None:
            raise ERRORS[error](answer)
        return answer

    def _end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.returncode
        return "it does not answer" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"


def own_gpu() -> dict[str, str]:
    """The child computes on the GPU of this process, which may be one of several that it sees."""
    if not torch.cuda.is_available():
        return {}
    seen, number = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.current_device()
    return {"CUDA_VISIBLE_DEVICES": seen.split(",")[number] if seen else str(number)}


def _python_path() -> str:
    """The child finds mtrl where we did."""
    here = str(Path(__file__).parents[3])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
