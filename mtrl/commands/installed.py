"""Versions, devices, and the libraries of each optional feature; torch is the only library that is imported."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from mtrl.config import Config
from mtrl.rewards.builtin_names import REWARDS, Library
from mtrl.utils.machine import cpu_memory, free_memory, started_by_torchrun

CORE = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "pillow", "omegaconf")


@dataclass(frozen=True)
class Device:
    name: str
    total: int  # bytes of memory
    free: int
    is_gpu: bool = False


@dataclass(frozen=True)
class Feature:
    name: str
    modules: tuple[str, ...]
    install: str
    is_wanted: Callable[[Config], bool]

    def missing(self) -> list[str]:
        return [module for module in self.modules if find_spec(module) is None]


def _reward_feature(name: str, library: Library) -> Feature:
    return Feature(f"reward `{name}`", (library.module,), library.install, lambda c: name in c.reward_functions)


def _logger_feature(name: str) -> Feature:
    return Feature(f"logger {name}", (name,), "pip install 'mtrl[loggers]'", lambda c: name in c.training.logger)


FEATURES = (
    *(_reward_feature(name, reward.library) for name, reward in REWARDS.items() if reward.library is not None),
    Feature("rollout by vLLM", ("vllm",), "pip install 'mtrl[vllm]'", lambda c: c.engine_name == "vllm"),
    Feature("datasets of the hub", ("datasets",), "pip install 'mtrl[hub]'", lambda c: False),
    Feature(
        "adapters (LoRA)", ("peft",), "pip install 'mtrl[lora]'",
        lambda c: c.worker.actor.model.peft_type == "lora",
    ),
    Feature(
        "several processes", ("ray",), "pip install 'mtrl[cluster]'",
        lambda c: c.training.nnodes * c.training.n_gpus_per_node > 1 and not started_by_torchrun(),
    ),
    *(_logger_feature(name) for name in ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")),
    Feature("videos", ("av",), "pip install 'mtrl[video]'", lambda c: False),  # rows need it, not settings
    Feature("mtrl view", ("starlette", "uvicorn"), "pip install 'mtrl[view]'", lambda c: False),
    Feature(
        "flash attention", ("flash_attn",), "pip install flash-attn",
        lambda c: c.worker.actor.model.attn_implementation.startswith("flash_attention"),
    ),
)  # fmt: skip


def versions() -> list[str]:
    packages = [f"{name} {package_version(name)}" for name in ("mtrl", *CORE)]
    return [f"Python {platform.python_version()} on {platform.system()} {platform.machine()}", ", ".join(packages)]


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def devices() -> list[Device]:
    """The GPUs that torch can use, or else the CPU with its memory."""
    if not torch.cuda.is_available():
        return [Device(f"CPU, {os.cpu_count()} cores", cpu_memory(), free_memory())]
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Device(f"GPU {index}, {torch.cuda.get_device_name(index)}", total, free, is_gpu=True))
    return gpus


def why_no_gpu() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return "this torch is built for the CPU only"
    return "torch finds no GPU; is the driver loaded (nvidia-smi), and CUDA_VISIBLE_DEVICES right?"
