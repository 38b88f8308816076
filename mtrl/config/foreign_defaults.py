"""Defaults of EasyR1, verl and TRL, values that switch a feature off, and keys without effect."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Flat = Mapping[str, Any]


class SameAs(NamedTuple):
    """A default that equals another key of the same project."""

    key: str
    otherwise: Any


# Their defaults that differ from MTRL's.
DEFAULTS: dict[str, dict[str, Any]] = {
    "EasyR1": {
        "data.rollout_batch_size": 512, "data.max_prompt_length": 512, "data.max_response_length": 512, "data.seed": 1,
        "algorithm.adv_estimator": "gae", "algorithm.kl_penalty": "kl", "algorithm.kl_coef": 1e-3,
        "worker.actor.global_batch_size": 256, "worker.actor.optim.betas": [0.9, 0.999],
        "worker.actor.optim.lr_warmup_ratio": 0.0, "worker.actor.loss_avg_mode": "token", "worker.rollout.n": 1,
        "worker.critic.optim.lr": 1e-6, "worker.critic.optim.betas": [0.9, 0.999],
        "worker.critic.optim.lr_warmup_ratio": 0.0,
        "worker.rollout.val_override_config.temperature": SameAs("worker.rollout.temperature", 1.0),
        "trainer.total_epochs": 15, "trainer.save_freq": -1,
        "trainer.val_freq": -1,
    },
    "verl": {
        "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
        "algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256, "actor_rollout_ref.actor.clip_ratio": 0.2,
        "actor_rollout_ref.actor.optim.betas": [0.9, 0.999], "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
        "critic.optim.betas": [0.9, 0.999], "critic.optim.lr_warmup_steps": 0,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean", "actor_rollout_ref.rollout.n": 1,
        "trainer.total_epochs": 30, "trainer.save_freq": -1, "trainer.test_freq": -1,
    },
    "TRL": {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8,
        "max_completion_length": 256, "num_train_epochs": 3.0, "learning_rate": 1e-6, "lr_scheduler_type": "linear",
        "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "beta": 0.0, "epsilon": 0.2,
        "loss_type": "dapo", "scale_rewards": "group", "seed": 42, "eval_on_start": False,
        "use_vllm": False,
    },
}  # fmt: skip

# Our keys without a counterpart, as their code behaves: no correction of the sampler's distribution unless requested,
# all checkpoints kept, and no dual clip in TRL.
IMPLIED: dict[str, dict[str, Any]] = {
    "EasyR1": {"optimization.tis_clip": None, "training.save_limit": -1},
    "verl": {"optimization.tis_clip": None, "training.save_limit": -1},
    "TRL": {"worker.actor.clip_ratio_dual": None, "training.save_limit": -1},
}

# Values that switch off a feature without a counterpart here, so nothing is lost.
OFF: dict[str, tuple[Any, ...]] = {
    "actor_rollout_ref.actor.entropy_coeff": (0,), "actor_rollout_ref.rollout.val_kwargs.top_p": (1,),
    "actor_rollout_ref.rollout.val_kwargs.top_k": (-1,), "worker.rollout.val_override_config.top_p": (1,),
    "entropy_coef": (0,), "min_p": (0,), "repetition_penalty": (1,), "vllm_server_timeout": (240,),
}  # fmt: skip


def why_unused(project: str, key: str, flat: Flat) -> str | None:
    """Why a key has no effect in the other project, if another key switches its feature off."""
    for prefix, switch, is_on, why in _UNUSED[project]:
        if (key == prefix or key.startswith(f"{prefix}.")) and not is_on(flat.get(switch)):
            return why
    return None


def _is_gae(value: Any) -> bool:
    return value == "gae"


_NO_KL_LOSS, _NO_KL_REWARD = "used only with use_kl_loss", "used only with use_kl_in_reward"
_NO_CRITIC, _NO_ADAPTERS = "the critic is used only with gae", "adapters are off"
_VERL_VAL = "actor_rollout_ref.rollout.val_kwargs"
_TRL_VLLM = "mode server_host server_port gpu_memory_utilization tensor_parallel_size max_model_length"
_UNUSED: dict[str, list[tuple[str, str, Callable[[Any], bool], str]]] = {
    "EasyR1": [
        ("worker.critic", "algorithm.adv_estimator", _is_gae, _NO_CRITIC),
        ("trainer.critic_warmup", "algorithm.adv_estimator", _is_gae, _NO_CRITIC),
        ("worker.actor.model.lora", "worker.actor.model.lora.rank", bool, _NO_ADAPTERS),
        ("trainer.max_try_make_batch", "algorithm.online_filtering", bool, "used only with online_filtering"),
    ],
    "verl": [
        ("critic", "algorithm.adv_estimator", _is_gae, _NO_CRITIC),
        ("trainer.critic_warmup", "algorithm.adv_estimator", _is_gae, _NO_CRITIC),
        ("reward_model.model", "reward_model.enable", bool, "the reward model is off"),
        ("actor_rollout_ref.model.lora_alpha", "actor_rollout_ref.model.lora_rank", bool, _NO_ADAPTERS),
        ("actor_rollout_ref.model.target_modules", "actor_rollout_ref.model.lora_rank", bool, _NO_ADAPTERS),
        ("actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.use_kl_loss", bool, _NO_KL_LOSS),
        ("actor_rollout_ref.actor.kl_loss_type", "actor_rollout_ref.actor.use_kl_loss", bool, _NO_KL_LOSS),
        ("algorithm.kl_ctrl", "algorithm.use_kl_in_reward", bool, _NO_KL_REWARD),
        ("algorithm.kl_penalty", "algorithm.use_kl_in_reward", bool, _NO_KL_REWARD),
        ("algorithm.filter_groups", "algorithm.filter_groups.enable", bool, "filter_groups is off"),
        (f"{_VERL_VAL}.temperature", f"{_VERL_VAL}.do_sample", bool, "validation is greedy"),
    ],
    "TRL": [(f"vllm_{name}", "use_vllm", bool, "vLLM is off") for name in _TRL_VLLM.split()],
}
