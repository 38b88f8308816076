"""Switches of the configuration whose machinery is not there yet. They are refused at the start, never ignored."""

from __future__ import annotations

from importlib.util import find_spec

from mtrl.config import Config, ConfigError
from mtrl.machine import started_by_torchrun


def unbuilt(config: Config) -> list[str]:
    """Each switch that is on and cannot be had, with what to set instead."""
    training, worker = config.training, config.worker
    model, rollout = worker.actor.model, worker.rollout
    ranked = training.nnodes * training.n_gpus_per_node > 1
    switches = {
        "worker.actor.model.peft_type: qlora (it needs a GPU and bitsandbytes); use lora": model.peft_type == "qlora",
        "worker.actor.optim.name: adamw_8bit; use adamw": worker.actor.optim.name != "adamw",
        "worker.critic.optim.name: adamw_8bit; use adamw": worker.critic.optim.name != "adamw",
        "worker.actor.fsdp.cpu_offload (of weights that are split over several GPUs); set it to false": (
            worker.actor.fsdp.cpu_offload
        ),
        "worker.actor.fsdp.mixed_precision_dtype: fp16; use bf16 or fp32": (
            worker.actor.fsdp.mixed_precision_dtype == "fp16"
        ),
        "worker.actor.offload.offload_params (the local engine samples from these weights); set it to false": (
            worker.actor.offload.offload_params
        ),
        "worker.actor.ulysses_size; set it to 1": worker.actor.ulysses_size > 1,
        "worker.hybrid_engine: false; set it to true": not worker.hybrid_engine,
        f"worker.rollout.mode: {rollout.mode}; use inprocess, or worker.rollout.name: vllm": (
            rollout.mode != "inprocess" and rollout.name != "vllm"
        ),
        "worker.rollout.engine_kwargs of the local engine; set it to {}, or worker.rollout.name to vllm": (
            bool(rollout.engine_kwargs) and rollout.name != "vllm"
        ),
        "worker.rollout.tensor_parallel_size; set it to 1": rollout.tensor_parallel_size > 1,
        "worker.rollout.name: vllm on several processes; use local": ranked and rollout.name == "vllm",
        "worker.ref.offload_params on several processes; set it to false": ranked and worker.ref.offload_params,
        f"worker.actor.fsdp.param_rounding: {worker.actor.fsdp.param_rounding} on several processes; use none": (
            ranked and worker.actor.fsdp.param_rounding != "none"
        ),
        "worker.reward.reward_type: model on several processes; use function": (
            ranked and worker.reward.reward_type == "model"
        ),
        f"training.logger: {', '.join(training.logger)}; use [console]": training.logger not in (("console",), ()),
    }
    return [f"{switch} (not built yet)" for switch, on in switches.items() if on]


def missing_libraries(config: Config) -> list[str]:
    """What is switched on and not installed. (Rewards say it of their own, when they are loaded.)"""
    adapted = config.worker.actor.model.peft_type is not None
    if adapted and find_spec("peft") is None:
        return ["worker.actor.model.peft_type: adapters need the library peft; pip install 'mtrl[lora]'"]
    ranked = config.training.nnodes * config.training.n_gpus_per_node > 1
    if ranked and find_spec("ray") is None and not started_by_torchrun():
        start = "torchrun --nproc-per-node N -m mtrl train .."
        return [f"training.n_gpus_per_node: several processes need ray; pip install 'mtrl[cluster]', or start {start}"]
    return []


def refuse_unbuilt(config: Config) -> None:
    if found := unbuilt(config) or missing_libraries(config):
        raise ConfigError(found)
