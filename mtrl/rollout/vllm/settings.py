"""The arguments and the environment with which vLLM starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from mtrl.utils.errors import StartError

CPU_CACHE = 2**30  # bytes of keys and values on a CPU, where gpu_memory_utilization would be a share of CPU memory
ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are in the same process
    "TORCH_COMPILE_DISABLE": "1",  # compiling would take minutes
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the process that starts it, and ends with it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
INSTALL = "pip install 'mtrl[vllm]' (a GPU with CUDA), or set worker.rollout.name=local"


def make_llm_arguments(
    model: str,
    *,
    dtype: str,
    max_length: int | None,  # tokens of a prompt and its response; None: the model's maximum
    tokenizer: str | None = None,
    gpu_memory_utilization: float = 0.4,
    tensor_parallel_size: int = 1,
    enable_prefix_caching: bool = True,
    trust_remote_code: bool = False,
    on_gpu: bool = False,
    among_ranks: bool = False,  # whether torch.distributed is initialized in this process
    videos: bool = False,  # True: the engine reserves memory for the largest video
    recurrent: bool = False,  # whether some layers keep a state instead of keys and values
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The arguments of `vllm.LLM`; `extra` (worker.rollout.engine_kwargs) overrides them."""
    arguments: dict[str, Any] = {
        "model": model,
        "tokenizer": tokenizer,
        "dtype": dtype,
        "max_model_len": max_length,
        "tensor_parallel_size": tensor_parallel_size,
        "enable_prefix_caching": enable_prefix_caching,
        "trust_remote_code": trust_remote_code,
        "limit_mm_per_prompt": {} if videos else {"video": 0},
        "logprobs_mode": "processed_logprobs",  # after temperature, top-p and top-k: the distribution sampled from
        "use_tqdm_on_load": False,
        "generation_config": "vllm",  # ignores a checkpoint's sampling settings
    }
    if on_gpu:
        arguments |= {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": True}
    else:  # without chunked prefill, with which seeded requests crash an engine on a CPU
        arguments |= {"kv_cache_memory_bytes": CPU_CACHE, "enforce_eager": True, "enable_chunked_prefill": False}
        arguments |= {"max_num_batched_tokens": max(max_length or 32768, 8192)}
        if recurrent:  # vLLM caches states only together with chunked prefill
            arguments |= {"enable_prefix_caching": False}
    if among_ranks:  # it uses the existing process group; its tensor-parallel parts are in neighbouring processes
        arguments |= {"distributed_executor_backend": "external_launcher"}
        if tensor_parallel_size > 1 and not on_gpu:
            arguments |= {"worker_cls": "mtrl.rollout.vllm.cpu_shared_memory.CpuPart"}
    return arguments | dict(extra or {})


def prepare_environment() -> None:
    """Call it before vLLM is imported. Variables that the user has set stay."""
    check_installed()
    for name, value in (ENVIRONMENT if torch.cuda.is_available() else ENVIRONMENT | ON_CPU).items():
        os.environ.setdefault(name, value)
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":  # torch has read its environment already
        torch._dynamo.config.disable = True


def check_installed() -> None:
    if find_spec("vllm") is None:
        raise StartError(f"worker.rollout.name: vllm is not installed; {INSTALL}")
