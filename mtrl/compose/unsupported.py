"""Switches of the configuration whose machinery is not there yet. They are refused at the start, never ignored."""

from __future__ import annotations

from importlib.util import find_spec

from mtrl.config import Config, ConfigError
from mtrl.utils.machine import started_by_torchrun

LOGGERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")


def unbuilt(config: Config) -> list[str]:
    """Each switch that is on and cannot be had, with what to set instead."""
    worker = config.worker
    model, rollout = worker.actor.model, worker.rollout
    ranked = several_processes(config)
    names = {worker.actor.optim.name, worker.critic.optim.name}
    switches = {
        "worker.actor.fsdp.cpu_offload on one process (it is for weights that are split); set it to false": (
            worker.actor.fsdp.cpu_offload and not ranked
        ),
        "worker.actor.offload.offload_params (the local engine samples from these weights); set it to false, or "
        "worker.rollout.name to vllm": (worker.actor.offload.offload_params and rollout.name != "vllm"),
        f"worker.rollout.mode: {rollout.mode} of engines apart, which have processes of their own; use inprocess": (
            not worker.hybrid_engine and rollout.name == "vllm" and rollout.mode == "process"
        ),
        f"worker.rollout.mode: {rollout.mode}; use inprocess, or worker.rollout.name: vllm": (
            rollout.mode != "inprocess" and rollout.name != "vllm"
        ),
        "worker.rollout.engine_kwargs of the local engine; set it to {}, or worker.rollout.name to vllm": (
            bool(rollout.engine_kwargs) and rollout.name != "vllm"
        ),
        "worker.rollout.tensor_parallel_size of the local engine; set it to 1, or worker.rollout.name to vllm": (
            rollout.tensor_parallel_size > 1 and rollout.name != "vllm"
        ),
        "worker.rollout.tensor_parallel_size in a child process; set it to 1, or worker.rollout.mode to inprocess": (
            rollout.tensor_parallel_size > 1 and rollout.name == "vllm" and rollout.mode == "process"
        ),
        "worker.rollout.mode: server on several processes; use inprocess or process": (
            ranked and rollout.name == "vllm" and rollout.mode == "server"
        ),
        "worker.actor.offload.offload_params on several processes; set it to false": (
            ranked and rollout.name == "vllm" and worker.actor.offload.offload_params
        ),
        "worker.actor.model.peft_type: qlora on several processes; use lora": ranked and model.peft_type == "qlora",
        "worker.actor.optim.name: adamw_8bit on several processes; use adamw": ranked and names != {"adamw"},
        f"worker.actor.fsdp.param_rounding: {worker.actor.fsdp.param_rounding} on several processes; use none": (
            ranked and worker.actor.fsdp.param_rounding != "none"
        ),
    }
    return [f"{switch} (not built yet)" for switch, on in switches.items() if on]


def missing_libraries(config: Config) -> list[str]:
    """What is switched on and not installed. (Rewards say it of their own, when they are loaded.)"""
    kind = config.worker.actor.model.peft_type
    optimizers = {"actor": config.worker.actor.optim.name, "critic": config.worker.critic.optim.name}
    missing = []
    if kind is not None and find_spec("peft") is None:
        missing.append("worker.actor.model.peft_type: adapters need the library peft; pip install 'mtrl[lora]'")
    if find_spec("bitsandbytes") is None:
        need = "needs the library bitsandbytes; pip install 'mtrl[qlora]', or use"
        missing += [f"worker.actor.model.peft_type: qlora {need} lora"] if kind == "qlora" else []
        eight_bit = [learner for learner, name in optimizers.items() if name == "adamw_8bit"]
        missing += [f"worker.{name}.optim.name: adamw_8bit {need} adamw" for name in eight_bit]
    for name in LOGGERS[1:]:
        if name in config.training.logger and find_spec(name) is None:
            missing.append(f"training.logger: {name} is not installed; pip install {name}")
    ranked = several_processes(config)
    if ranked and find_spec("ray") is None and not started_by_torchrun():
        start = "torchrun --nproc-per-node N -m mtrl train .."
        told = f"several processes need ray; pip install 'mtrl[cluster]', or start {start}"
        missing.append(f"training.n_gpus_per_node: {told}")
    if started_by_torchrun() and not config.worker.hybrid_engine:
        told = "false needs Ray, which starts the processes of engines; start mtrl without torchrun, or set it to true"
        missing.append(f"worker.hybrid_engine: {told}")
    return missing


def several_processes(config: Config) -> bool:
    """Whether models are split over ranks: torchrun's, be it a single one, or those of a crew of Ray."""
    ranks = config.training.nnodes * config.training.n_gpus_per_node
    return ranks > 1 or not config.worker.hybrid_engine or started_by_torchrun()


def check_supported(config: Config) -> None:
    if found := unbuilt(config) or missing_libraries(config):
        raise ConfigError(found)
