"""This machine as `mtrl doctor` sees it: versions, devices, memory, disk, and the libraries of each feature. Light: no
library is imported but torch."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from mtrl.config import Config

GIB = 2**30
CORE = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "pillow", "omegaconf")
CONTAINERS = (  # the limit of a container and what it uses: cgroups of the second version, and of the first
    (Path("/sys/fs/cgroup/memory.max"), "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class Device:
    name: str
    total: int  # bytes
    free: int
    is_gpu: bool = False


@dataclass(frozen=True)
class Feature:
    name: str
    modules: tuple[str, ...]
    install: str
    wanted: Callable[[Config], bool]

    def missing(self) -> list[str]:
        return [module for module in self.modules if find_spec(module) is None]


def _logger(name: str) -> Feature:
    return Feature(f"logger {name}", (name,), "pip install 'mtrl[loggers]'", lambda c: name in c.training.logger)


FEATURES = (
    Feature(
        "rollout by vLLM", ("vllm",), "pip install 'mtrl[vllm]'", lambda c: c.worker.rollout.name == "vllm"
    ),
    Feature(
        "several processes", ("ray",), "pip install 'mtrl[ray]'",
        lambda c: c.training.nnodes * c.training.n_gpus_per_node > 1,
    ),
    Feature(
        "adapters (LoRA)", ("peft",), "pip install 'mtrl[qlora]'", lambda c: c.worker.actor.model.peft_type is not None
    ),
    Feature(
        "QLoRA, 8-bit Adam", ("bitsandbytes",), "pip install 'mtrl[qlora]'",
        lambda c: c.worker.actor.model.peft_type == "qlora" or c.worker.actor.optim.name == "adamw_8bit",
    ),
    Feature("videos", ("av", "torchvision"), "pip install 'mtrl[video]'", lambda c: False),
    Feature(
        "reward `math`", ("math_verify",), "pip install 'mtrl[math]'", lambda c: "math" in c.reward_functions
    ),
    Feature("datasets of the hub", ("datasets",), "pip install datasets", lambda c: False),
    Feature(
        "flash attention", ("flash_attn",), "pip install flash-attn",
        lambda c: c.worker.actor.model.attn_implementation.startswith("flash_attention"),
    ),
    *map(_logger, ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")),
)  # fmt: skip


def versions() -> list[str]:
    found = [f"{name} {package_version(name)}" for name in ("mtrl", *CORE)]
    return [f"Python {platform.python_version()} on {platform.system()} {platform.machine()}", ", ".join(found)]


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def devices() -> list[Device]:
    """What a run computes on: the GPUs that torch can use, or else the processor with the main memory."""
    if not torch.cuda.is_available():
        return [Device(f"CPU, {os.cpu_count()} cores", main_memory(), free_memory())]
    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        found.append(Device(f"GPU {number}, {torch.cuda.get_device_name(number)}", total, free, is_gpu=True))
    return found


def why_no_gpu() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return "this torch is built for the CPU alone"
    return "torch finds no GPU; is the driver loaded (nvidia-smi), and CUDA_VISIBLE_DEVICES right?"


def main_memory() -> int:
    """The machine's, or what a container may use of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in containers())])


def free_memory() -> int:
    """Linux says what could be had without swapping, in a container too; elsewhere all of it is assumed."""
    if not sys.platform.startswith("linux"):
        return main_memory()
    available = 1024 * _fields(Path("/proc/meminfo"))["MemAvailable:"]
    return min([available, *(max(0, limit - used) for limit, used in containers())])


def containers() -> list[tuple[int, int]]:
    """(limit, used) of each that this process is in. Files in the cache of the system, such as a checkpoint that was
    just written, make room when it is needed, so they are not in use."""
    found = []
    for limit, used, cached in CONTAINERS:
        if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
            held = int(limit.with_name(used).read_text()) - _fields(limit.with_name("memory.stat")).get(cached, 0)
            found.append((int(text), held))
    return found


def _fields(path: Path) -> dict[str, int]:
    """`name number` a line."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    path = path.expanduser().absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def free_disk(path: Path) -> int:
    return shutil.disk_usage(existing_parent(path)).free
