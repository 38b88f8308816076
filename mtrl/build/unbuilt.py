"""Switches of the configuration whose machinery is not there yet. They are refused at the start, never ignored."""

from __future__ import annotations

from mtrl.config import Config, ConfigError


def unbuilt(config: Config) -> list[str]:
    """Each switch that is on and cannot be had, with what to set instead."""
    training, worker = config.training, config.worker
    model, rollout = worker.actor.model, worker.rollout
    switches = {
        "worker.actor.model.peft_type; set it to null": model.peft_type is not None,
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
        "worker.rollout.name: vllm; use auto or local": rollout.name == "vllm",
        f"worker.rollout.mode: {rollout.mode}; use inprocess": rollout.mode != "inprocess",
        "worker.rollout.engine_kwargs; set it to {}": bool(rollout.engine_kwargs),
        "worker.rollout.tensor_parallel_size; set it to 1": rollout.tensor_parallel_size > 1,
        "several processes; set training.nnodes and training.n_gpus_per_node to 1": (
            training.nnodes * training.n_gpus_per_node > 1
        ),
        f"training.logger: {', '.join(training.logger)}; use [console]": training.logger not in (("console",), ()),
    }
    return [f"{switch} (not built yet)" for switch, on in switches.items() if on]


def refuse_unbuilt(config: Config) -> None:
    if found := unbuilt(config):
        raise ConfigError(found)
