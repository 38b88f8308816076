"""Real vLLM engines for tests. There is one per family for the whole session, since a start takes seconds."""

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
from tiny_models import TINY_FAMILIES, checkpoint, get_encoder, plain_model

from mtrl.models.families import TextEncoder, find_family
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
ON_GPU = torch.cuda.is_available()
QUICK_ON_GPU = {"enforce_eager": True, "enable_sleep_mode": False}  # no graphs; usable without `resident`
NOT_HERE = [family for family in TINY_FAMILIES if family.startswith("gemma3")]  # on_vllm/test_families_vllm.py
RECURRENT = [family for family in TINY_FAMILIES if family.startswith("qwen3_5")]  # in bfloat16 alone on a CPU
_in_process: dict[str, VllmInProcess] = {}
_tensor_parallel: dict[str, TensorParallelEngine] = {}
_servers: list[StartedServer] = []
_changed: set[Host] = set()  # engines whose weights may differ from the checkpoint's


def arguments(family: str, parts: int = 1, **extra: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    split = {"tensor_parallel_size": parts, "among_ranks": parts > 1}
    small = {"kv_cache_memory_bytes": 2**26, **(QUICK_ON_GPU if ON_GPU else {}), **extra}
    device = {"on_gpu": ON_GPU, "gpu_memory_utilization": 0.1}
    recurrent = family in RECURRENT
    kind = {"dtype": "bfloat16" if recurrent else "float32", "recurrent": recurrent}
    return (
        make_llm_arguments(str(checkpoint(family)), max_length=MAX_LENGTH, extra=small, **kind, **split, **device),
        get_encoder(family).engine_image_arguments(),
    )


def in_process(family: str) -> VllmInProcess:
    """Engines of one process share vLLM's process groups: when a run closes one, the others become unusable. The first
    engine makes them, and only a model with experts makes one for experts."""
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    lacks_group = family.endswith("moe") and family not in _in_process
    if _in_process and (lacks_group or not model_parallel_is_initialized()):
        end_in_process()
    if family not in _in_process:
        _in_process[family] = VllmInProcess(*arguments(family))
    return _in_process[family]


def end_in_process() -> None:
    """Closes the engines and destroys their torch.distributed group: a forked process could join no other."""
    for host in _in_process.values():
        host.close()
    _in_process.clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@lru_cache
def child_process(family: str) -> VllmProcess:
    return VllmProcess(*arguments(family), torch.float32)


class TensorParallelEngine:
    """An engine split over two processes by tensor parallelism, as over two ranks. Both get the same weights and
    requests and must return the same results."""

    sleeps = False

    def __init__(self, arguments: dict[str, Any], image_arguments: dict[str, Any] | None, size: int = 2) -> None:
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": "0",
        }
        spawn = multiprocessing.get_context("spawn")
        self.connections, self.processes = [], []
        for number in range(size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve_rank, args=(theirs, environment | {"RANK": str(number)}), daemon=True)
            process.start()
            self.connections.append(ours)
            self.processes.append(process)
        self.max_length: int = self.call("start", arguments, image_arguments)[0]
        self.folder = Path(tempfile.mkdtemp())

    def call(self, name: str, *arguments: Any) -> list[Any]:
        for connection in self.connections:
            connection.send((name, arguments))
        answers = [connection.recv() for connection in self.connections]
        assert all(error is None for error, _ in answers), answers
        return [answer for _, answer in answers]

    def generate(self, requests: Any, params: Any) -> Any:
        first, *others = self.call("generate", list(requests), dict(params))
        assert all(other == first for other in others)
        return first

    def load(self, label: str, tensors: Any) -> None:
        self.call("load", label, str(write_weights(self.folder, tensors, torch.float32)))

    def sizes(self) -> list[dict[str, int]]:
        """For each process, the number of elements that it holds of each weight, by name."""
        return self.call("sizes")

    def wake(self, to_load: bool = False) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.folder)


def serve_rank(connection: Any, environment: dict[str, str]) -> None:
    from mtrl.rollout.vllm import child_main as child

    os.environ |= environment
    VllmInProcess.sizes = lambda host: host.llm.apply_model(count_parameters)[0]
    with suppress(EOFError):
        child.serve(connection)


def count_parameters(model: Any) -> dict[str, int]:
    return {name: weight.numel() for name, weight in model.named_parameters()}


def tensor_parallel(family: str) -> TensorParallelEngine:
    """Keeps only one engine at a time: each is two processes of a gigabyte."""
    if family not in _tensor_parallel:
        for host in _tensor_parallel.values():
            host.close()
        _tensor_parallel.clear()
        _tensor_parallel[family] = TensorParallelEngine(*arguments(family, parts=2))
    return _tensor_parallel[family]


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


@lru_cache
def server(family: str) -> VllmServer:
    """A server started as described in docs/vllm.md, on a CPU."""
    return VllmServer(wait_until_ready(start_server(str(checkpoint(family)))), str(checkpoint(family)), torch.float32)


@dataclass(frozen=True)
class StartedServer:
    """A server that is starting, which takes three consecutive imports of vLLM."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def kill(self) -> None:
        """Kills the server and its children, which would outlive it."""
        with suppress(psutil.NoSuchProcess):  # killed already
            process = psutil.Process(self.process.pid)
            for each in [process, *process.children(recursive=True)]:
                each.kill()


@lru_cache
def start_server(model: str, development: bool = True) -> StartedServer:
    """Starts a server that ends with the tests. Call this early: the server starts in the background."""
    port = free_port()
    options = (
        f"--model {model} --host 127.0.0.1 --port {port} --dtype float32 --max-model-len {MAX_LENGTH} "
        "--logprobs-mode processed_logprobs --generation-config vllm --enable-scale-out --enforce-eager "
        f"--no-enable-chunked-prefill --max-num-batched-tokens 8192 --kv-cache-memory-bytes {2**26}"
    )
    mode = {"VLLM_SERVER_DEV_MODE": str(int(development)), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = Path(tempfile.gettempdir()) / f"vllm-server-{port}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options.split()],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | ON_CPU | mode,
        )
    started = StartedServer(process, port, log)
    _servers.append(started)
    return started


@atexit.register
def end_servers() -> None:
    """Ends the servers, which take two gigabytes each; one that is still starting ignores SIGTERM and is killed."""
    for started in _servers:
        started.process.terminate()
    for started in _servers:
        with suppress(subprocess.TimeoutExpired):
            started.process.wait(timeout=20)
        started.kill()
        started.process.wait()
    _servers.clear()
    start_server.cache_clear()
    server.cache_clear()


def wait_until_ready(started: StartedServer) -> str:
    """Waits until the server responds; returns its address."""
    for _ in range(600):
        if started.process.poll() is not None:
            break
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{started.port}/health", timeout=5):
            return f"127.0.0.1:{started.port}"
        time.sleep(1)
    raise AssertionError(f"the server did not start: {started.log.read_text()[-3000:]}")


def engine_on(
    host: Host, family: str, encoder: TextEncoder | None = None, *, may_change: bool = False
) -> VllmGenerator:
    """An engine at version 0, with the weights of the checkpoint."""
    weights = exported_weights(plain_model(family))
    names = find_family(plain_model(family).config).vllm_names
    engine = VllmGenerator(host, encoder or get_encoder(family), weights.keys(), vllm_names=names)
    if host in _changed:
        engine.load(Weights(0, weights))
        _changed.discard(host)
    if may_change:
        _changed.add(host)
    return engine
