"""Real engines of vLLM for tests; one of each family lives as long as the tests do: a start takes seconds."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from tiny_models import checkpoint, encoder_of, plain_model

from mtrl.models.families import TextEncoder
from mtrl.models.state_dicts import exported_weights
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.rollout.vllm.inprocess import VllmInProcess
from mtrl.rollout.vllm.process_engine import VllmProcess
from mtrl.rollout.vllm.requests import Host
from mtrl.rollout.vllm.server_engine import VllmServer
from mtrl.rollout.vllm.settings import ON_CPU, make_llm_arguments
from mtrl.rollout.vllm.weight_files import write_weights
from mtrl.types import Weights

INSTALLED = find_spec("vllm") is not None
MAX_LENGTH = 512
_in_process: dict[str, VllmInProcess] = {}
_in_parts: dict[str, InParts] = {}
_servers: list[Begun] = []
_changed: set[Host] = set()  # engines that may hold other weights than those of the checkpoint


def arguments(family: str, parts: int = 1, **extra: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    images = encoder_of(family).image_settings
    split = {"tensor_parallel_size": parts, "among_ranks": parts > 1}
    small = {"kv_cache_memory_bytes": 2**26, **extra}
    return (
        make_llm_arguments(str(checkpoint(family)), dtype="float32", max_length=MAX_LENGTH, extra=small, **split),
        None if images is None else images.processor_arguments(),
    )


def in_process(family: str) -> VllmInProcess:
    """Engines of one process share vLLM's groups: when one is closed (a run has ended), the others are of no use."""
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    if _in_process and not model_parallel_is_initialized():
        end_in_process()
    if family not in _in_process:
        _in_process[family] = VllmInProcess(*arguments(family))
    return _in_process[family]


def end_in_process() -> None:
    """With the group of torch.distributed that they have made: a process that is forked could join no other."""
    for host in _in_process.values():
        host.close()
    _in_process.clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@lru_cache
def child_process(family: str) -> VllmProcess:
    return VllmProcess(*arguments(family), torch.float32)


class InParts:
    """An engine that two processes hold together, a half of each layer each, as two ranks do: both are given the same
    weights, are asked the same, and have to say the same."""

    sleeps = False

    def __init__(self, arguments: dict[str, Any], image_arguments: dict[str, Any] | None, size: int = 2) -> None:
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": "0",
        }
        spawn = multiprocessing.get_context("spawn")
        self.connections, self.processes = [], []
        for number in range(size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=hold_part, args=(theirs, place | {"RANK": str(number)}), daemon=True)
            process.start()
            self.connections.append(ours)
            self.processes.append(process)
        self.max_length: int = self.ask("start", arguments, image_arguments)[0]
        self.folder = Path(tempfile.mkdtemp())

    def ask(self, name: str, *given: Any) -> list[Any]:
        for connection in self.connections:
            connection.send((name, given))
        answers = [connection.recv() for connection in self.connections]
        assert all(error is None for error, _ in answers), answers
        return [answer for _, answer in answers]

    def generate(self, requests: Any, params: Any) -> Any:
        first, *others = self.ask("generate", list(requests), dict(params))
        assert all(other == first for other in others)
        return first

    def load(self, label: str, tensors: Any) -> None:
        self.ask("load", label, str(write_weights(self.folder, tensors, torch.float32)))

    def sizes(self) -> list[dict[str, int]]:
        """Of each weight, by its name, how many numbers each process holds."""
        return self.ask("sizes")

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.folder)


def hold_part(connection: Any, place: dict[str, str]) -> None:
    from mtrl.rollout.vllm import child_main as child

    os.environ |= place
    VllmInProcess.sizes = lambda host: host.llm.apply_model(sizes_of)[0]
    with suppress(EOFError):
        child.serve(connection)


def sizes_of(model: Any) -> dict[str, int]:
    return {name: weight.numel() for name, weight in model.named_parameters()}


def in_parts(family: str) -> InParts:
    """One at a time: each is two processes of a gigabyte."""
    if family not in _in_parts:
        for host in _in_parts.values():
            host.close()
        _in_parts.clear()
        _in_parts[family] = InParts(*arguments(family, parts=2))
    return _in_parts[family]


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


@lru_cache
def server(family: str) -> VllmServer:
    """Started as docs/vllm.md says, for a CPU."""
    return VllmServer(ready(begun_server(str(checkpoint(family)))), str(checkpoint(family)), torch.float32)


@dataclass(frozen=True)
class Begun:
    """A server on its way up, which takes three imports of vLLM one after the other."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def kill(self) -> None:
        """With what it started, which would outlive it."""
        with suppress(psutil.NoSuchProcess):  # killed already
            own = psutil.Process(self.process.pid)
            for each in [own, *own.children(recursive=True)]:
                each.kill()


@lru_cache
def begun_server(model: str, development: bool = True) -> Begun:
    """It ends with the tests. Begin it early: it starts beside them."""
    port = free_port()
    words = (
        f"--model {model} --host 127.0.0.1 --port {port} --dtype float32 --max-model-len {MAX_LENGTH} "
        "--logprobs-mode processed_logprobs --generation-config vllm --enable-scale-out --enforce-eager "
        f"--no-enable-chunked-prefill --max-num-batched-tokens 8192 --kv-cache-memory-bytes {2**26}"
    )
    mode = {"VLLM_SERVER_DEV_MODE": str(int(development)), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = Path(tempfile.gettempdir()) / f"vllm-server-{port}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words.split()],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | ON_CPU | mode,
        )
    begun = Begun(process, port, log)
    _servers.append(begun)
    return begun


@atexit.register
def end_servers() -> None:
    """They take two gigabytes each. One that is told while it starts does not listen."""
    for begun in _servers:
        begun.process.terminate()
    for begun in _servers:
        with suppress(subprocess.TimeoutExpired):
            begun.process.wait(timeout=20)
        begun.kill()
        begun.process.wait()
    _servers.clear()
    begun_server.cache_clear()
    server.cache_clear()


def ready(begun: Begun) -> str:
    """The address of a server that answers."""
    for _ in range(600):
        if begun.process.poll() is not None:
            break
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{begun.port}/health", timeout=5):
            return f"127.0.0.1:{begun.port}"
        time.sleep(1)
    raise AssertionError(f"the server does not start: {begun.log.read_text()[-3000:]}")


def engine_on(
    host: Host, family: str, encoder: TextEncoder | None = None, *, may_change: bool = False
) -> VllmGenerator:
    """An engine at version 0, with the weights of the checkpoint."""
    weights = exported_weights(plain_model(family))
    engine = VllmGenerator(host, encoder or encoder_of(family), weights.keys())
    if host in _changed:
        engine.load(Weights(0, weights))
        _changed.discard(host)
    if may_change:
        _changed.add(host)
    return engine
