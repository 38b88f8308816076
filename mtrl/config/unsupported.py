"""Settings that are not supported, or need a missing library. They are rejected at the start, never ignored."""

from __future__ import annotations

from importlib.util import find_spec

from mtrl.config import Config, ConfigError
from mtrl.config.tree import LOGGERS
from mtrl.utils.machine import started_by_torchrun


def find_unsupported(config: Config) -> list[str]:
    """Each setting that is on but not supported with the others, and what to set instead."""
    rollout, is_vllm = config.worker.rollout, config.engine_name == "vllm"
    settings = {
        "worker.rollout.engine_kwargs is not supported with the local engine; set it to {}, or worker.rollout.name to "
        "vllm": bool(rollout.engine_kwargs) and not is_vllm,
        "worker.rollout.tensor_parallel_size is not supported with a child process; set it to 1, or "
        "worker.rollout.mode to inprocess": (
            rollout.tensor_parallel_size > 1 and is_vllm and rollout.mode == "process"
        ),
    }
    return [message for message, is_on in settings.items() if is_on]


def find_missing_libraries(config: Config) -> list[str]:
    """Libraries that settings need and that are not installed, except those of rewards, which check it themselves."""
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
    if uses_several_processes(config) and find_spec("ray") is None and not started_by_torchrun():
        start = "pip install 'mtrl[cluster]', or start torchrun --nproc-per-node N -m mtrl train .."
        missing.append(f"training.n_gpus_per_node: several processes need ray; {start}")
    if started_by_torchrun() and not config.worker.hybrid_engine:
        hint = "start mtrl without torchrun, or set it to true"
        missing.append(f"worker.hybrid_engine: false needs Ray, which starts dedicated engines; {hint}")
    return missing


def uses_several_processes(config: Config) -> bool:
    """Whether processes train together: those of torchrun, even a single one, or those that Ray starts."""
    processes = config.training.nnodes * config.training.n_gpus_per_node
    return processes > 1 or not config.worker.hybrid_engine or started_by_torchrun()


def shards_models(config: Config) -> bool:
    """Whether FSDP2 shards the models, over several processes or, with `cpu_offload`, over this one alone."""
    return config.worker.actor.fsdp.cpu_offload or uses_several_processes(config)


def check_supported(config: Config) -> None:
    if errors := find_unsupported(config) or find_missing_libraries(config):
        raise ConfigError(errors)
