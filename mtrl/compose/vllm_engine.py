"""Builds vLLM as the rollout engine: in this process, in a child process or as a server."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from mtrl.compose import algorithm
from mtrl.compose.task_source import has_videos
from mtrl.config import Config, ConfigError
from mtrl.models.checkpoint_files import base_path, is_adapter
from mtrl.models.families import TextEncoder, find_family, load_model_config
from mtrl.models.forward import Forward
from mtrl.models.recurrent import count_states
from mtrl.models.routing import has_experts
from mtrl.models.state_dicts import exported_weights
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.rollout.vllm.inprocess import VllmInProcess
from mtrl.rollout.vllm.process_engine import VllmProcess
from mtrl.rollout.vllm.requests import LOWEST_TEMPERATURE, Host
from mtrl.rollout.vllm.server_engine import VllmServer
from mtrl.rollout.vllm.settings import make_llm_arguments
from mtrl.types import Weights
from mtrl.utils.errors import StartError


def build_vllm(config: Config, path: str, policy: Forward, encoder: TextEncoder, gets_weights: bool) -> VllmGenerator:
    """Start vLLM with the weights at `path`; with adapters it starts with the base and then gets the merged weights.
    `gets_weights`: the engine will be given new weights."""
    backbone, weights = policy.backbone, exported_weights(policy.backbone.model)
    on_gpu, ranked = backbone.device.type == "cuda", backbone.ranks.group is not None
    changes = gets_weights or is_adapter(path)
    engine = build_vllm_engine(config, path, encoder, weights.keys(), backbone.compute_dtype, on_gpu, ranked, changes)
    server = engine.host if isinstance(engine.host, VllmServer) else None  # may hold the weights of an earlier run
    has_others = bool(server and gets_weights) or is_adapter(path)
    if has_others and server and not server.takes_weights:
        raise StartError(f"worker.rollout.address: {server.no_weights}")
    if has_others and not ranked:  # an engine of a rank gets its actor's anyway
        with engine.resident():
            engine.load(Weights(0, weights))
    return engine


def build_vllm_engine(
    config: Config,
    path: str,
    encoder: TextEncoder,
    names: Collection[str],
    dtype: torch.dtype,
    on_gpu: bool,
    ranked: bool = False,
    gets_weights: bool = True,
) -> VllmGenerator:
    """An engine for weights with these `names`; `ranked`: several processes share the model."""
    rollout = config.worker.rollout
    for key, value in (("temperature", rollout.temperature), ("val.temperature", rollout.val.temperature)):
        if 0 < value < LOWEST_TEMPERATURE:
            limit = f"{value:g} is below the minimum of vLLM; set {LOWEST_TEMPERATURE:g} or more"
            raise ConfigError([f"worker.rollout.{key}: {limit}"])
    host = build_host(config, base_path(path), encoder, dtype, on_gpu, ranked, gets_weights)
    family = find_family(load_model_config(path, config.worker.actor.model.trust_remote_code))
    return VllmGenerator(host, encoder, names, compute_dtype=dtype, vllm_names=family.vllm_names)


def build_host(
    config: Config, path: str, encoder: TextEncoder, dtype: torch.dtype, on_gpu: bool, ranked: bool, gets_weights: bool
) -> Host:
    rollout = config.worker.rollout
    if rollout.mode == "server":
        assert rollout.address is not None, "config/checks.py requires it"
        return VllmServer(rollout.address, path, dtype)
    model = load_model_config(path, config.worker.actor.model.trust_remote_code)
    if problem := None if on_gpu else explain_no_cpu_engine(model, dtype, gets_weights):
        raise StartError(problem)
    recurrent = count_states(model.get_text_config()) > 0
    arguments = make_engine_arguments(config, path, dtype, on_gpu, ranked, recurrent)
    image_arguments = encoder.engine_image_arguments()
    if rollout.mode == "process":
        return VllmProcess(arguments, image_arguments, dtype)
    return VllmInProcess(arguments, image_arguments)


def explain_no_cpu_engine(model: Any, dtype: torch.dtype, gets_weights: bool) -> str | None:
    """Why vLLM cannot sample from a model on a CPU (measured with vLLM 0.32); None if it can."""
    text, problem = model.get_text_config(), None
    if has_experts(text) and gets_weights:  # it does not pack new experts into the layout of its kernel
        problem = "on a CPU vLLM does not take new weights of experts; set worker.rollout.name=local"
    elif count_states(text) and dtype != torch.bfloat16:
        problem = (
            "on a CPU vLLM computes recurrent layers in bf16 alone; set worker.rollout.name=local, or "
            "worker.actor.fsdp.mixed_precision_dtype=bf16"
        )
    return problem and f"worker.rollout.name: {problem}"


def make_engine_arguments(
    config: Config, path: str, dtype: torch.dtype, on_gpu: bool, ranked: bool = False, recurrent: bool = False
) -> dict[str, Any]:  # fmt: skip
    rollout, model = config.worker.rollout, config.worker.actor.model
    longest = config.dataset.max_prompt_length + algorithm.make_training_sampling(config).max_new_tokens
    return make_llm_arguments(
        path,
        tokenizer=model.tokenizer_path,
        dtype=str(dtype).removeprefix("torch."),
        max_length=longest if config.dataset.filter_overlong_prompts else None,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        tensor_parallel_size=rollout.tensor_parallel_size,
        enable_prefix_caching=rollout.enable_prefix_caching,
        trust_remote_code=model.trust_remote_code,
        on_gpu=on_gpu,
        among_ranks=ranked and rollout.mode == "inprocess",
        videos=has_videos(config),
        recurrent=recurrent,
        extra=rollout.engine_kwargs,
    )
