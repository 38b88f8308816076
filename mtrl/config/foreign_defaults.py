"""Defaults of EasyR1, verl and TRL, values that switch a feature off, and keys without effect."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Flat = Mapping[str, Any]


class SameAs(NamedTuple):
    """A default that equals another key of the same project."""

    key: str
    otherwise: Any


# Their defaults that differ from MTRL's, of verl 0.9.1, TRL 1.16.0 and EasyR1's last stored dataclasses;
# tests/data/foreign_defaults.yaml has all defaults of these releases. Defaults of the machine (GPUs, memory, logger,
# names of folders) and `trust_remote_code` are not taken over.
DEFAULTS: dict[str, dict[str, Any]] = {
    "EasyR1": {
        "data.rollout_batch_size": 512, "data.max_prompt_length": 512, "data.max_response_length": 512, "data.seed": 1,
        "algorithm.adv_estimator": "grpo", "algorithm.lam": 1.0, "algorithm.kl_penalty": "kl",
        "algorithm.kl_coef": 1e-3, "algorithm.kl_target": 0.1,
        "worker.actor.global_batch_size": 256, "worker.actor.optim.betas": [0.9, 0.999],
        "worker.actor.optim.lr_warmup_ratio": 0.0, "worker.actor.loss_avg_mode": "token", "worker.rollout.n": 1,
        "worker.actor.model.lora.alpha": 64, "worker.rollout.name": "vllm",
        "worker.critic.optim.lr": 1e-6, "worker.critic.optim.betas": [0.9, 0.999],
        "worker.critic.optim.lr_warmup_ratio": 0.0,
        "worker.rollout.val_override_config.temperature": SameAs("worker.rollout.temperature", 1.0),
        "trainer.total_epochs": 15, "trainer.save_freq": -1, "trainer.val_freq": -1, "trainer.max_try_make_batch": 20,
    },
    "verl": {
        "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
        "data.filter_overlong_prompts": False,
        "algorithm.adv_estimator": "gae", "algorithm.lam": 1.0, "algorithm.use_kl_in_reward": False,
        "algorithm.kl_ctrl.kl_coef": 1e-3, "algorithm.kl_ctrl.target_kl": 0.1,
        "algorithm.filter_groups.metric": "reward", "algorithm.filter_groups.max_num_gen_batches": 0,
        "algorithm.rollout_correction.rollout_is_threshold": 2.0,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256, "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.2, "actor_rollout_ref.actor.kl_loss_coef": 1e-3,
        "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
        "actor_rollout_ref.actor.optim.betas": [0.9, 0.999], "actor_rollout_ref.actor.optim.lr_warmup_steps": -1,
        "critic.optim.betas": [0.9, 0.999], "critic.optim.lr_warmup_steps": -1,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean", "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.seed": 42, "actor_rollout_ref.model.lora_alpha": 16,
        "trainer.total_epochs": 30, "trainer.save_freq": -1, "trainer.test_freq": -1,
    },
    "TRL": {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8,
        "max_completion_length": 512, "num_train_epochs": 3.0, "learning_rate": 1e-6, "lr_scheduler_type": "linear",
        "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "beta": 0.0, "epsilon": 0.2,
        "loss_type": "dapo", "scale_rewards": "group", "seed": 42, "eval_on_start": False, "save_steps": 500,
        "eval_strategy": "no", "dataset_test_split": "test", "eval_steps": SameAs("logging_steps", 10),
        "use_bias_correction_kl": True, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
        "use_vllm": False, "vllm_mode": "colocate",
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
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
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": (1,),
    "actor_rollout_ref.actor.optim.optimizer_impl": ("torch.optim",), "critic.optim.optimizer_impl": ("torch.optim",),
    "actor_rollout_ref.actor.optim.num_cycles": (0.5,), "critic.optim.num_cycles": (0.5,),
    "actor_rollout_ref.rollout.over_sample_rate": (0,), "critic.model.lora_rank": (0,),
    "data.train_max_samples": (-1,), "data.val_max_samples": (-1,), "data.audio_key": ("audios",),
    "algorithm.rollout_correction.loss_type": ("ppo_clip",), "trainer.v1.trainer_mode": ("sync",),
    "model_revision": ("main",), "adam_epsilon": (1e-8,), "train_sampling_strategy": ("random",),
    "bnb_4bit_quant_type": ("nf4",),
    "actor_rollout_ref.actor.entropy_coeff": (0,), "actor_rollout_ref.rollout.val_kwargs.top_p": (1,),
    "actor_rollout_ref.rollout.val_kwargs.top_k": (-1,), "worker.rollout.val_override_config.top_p": (1,),
    "entropy_coef": (0,), "min_p": (0,), "repetition_penalty": (1,),
}  # fmt: skip


def why_unused(project: str, key: str, flat: Flat) -> str | None:
    """Why a key has no effect in the other project, if another key switches its feature off."""
    for prefix, switch, is_on, why in _UNUSED[project]:
        if (key == prefix or key.startswith(f"{prefix}.")) and not is_on(flat.get(switch)):
            return why
    return _why_section_is_off(key, flat) if project == "verl" else None


def _why_section_is_off(key: str, flat: Flat) -> str | None:
    """verl switches features by a key of their section: `mtp.enable`, `distillation.enabled`."""
    section = key.rpartition(".")[0]
    while section:
        for switch in ("enable", "enabled"):
            if flat.get(f"{section}.{switch}") is False and f"{section}.{switch}" != key:
                return f"{section}.{switch} is false"
        section = section.rpartition(".")[0]
    return None


def _is_gae(value: Any) -> bool:
    return value == "gae"


def _is_adaptive(value: Any) -> bool:
    return value == "adaptive"


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


_STEPS = "lr_warmup_steps is set"
_FIXED_KL = "used only with an adaptive KL weight"
_NO_KL_LOSS, _NO_KL_REWARD = "used only with use_kl_loss", "used only with use_kl_in_reward"
_NO_CRITIC, _NO_ADAPTERS = "the critic is used only with gae", "adapters are off"
_VERL_TIS = "algorithm.rollout_correction"
_VERL_LOSS = "actor_rollout_ref.actor.policy_loss"
_VERL_VAL = "actor_rollout_ref.rollout.val_kwargs"
_TRL_VLLM = (
    "mode server_host server_port server_base_url gpu_memory_utilization tensor_parallel_size max_model_length "
    "importance_sampling_correction importance_sampling_mode importance_sampling_cap importance_sampling_clip_max "
    "importance_sampling_clip_min"
)
_TRL_TIS = tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "cap", "clip_max", "clip_min"))
_TRL_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
_UNUSED: dict[str, list[tuple[str, str, Callable[[Any], bool], str]]] = {
    "EasyR1": [
        ("worker.critic", "algorithm.adv_estimator", _is_gae, _NO_CRITIC),
        ("trainer.critic_warmup", "algorithm.adv_estimator", _is_gae, _NO_CRITIC),
        ("worker.actor.model.lora", "worker.actor.model.lora.rank", bool, _NO_ADAPTERS),
        *((f"worker.{name}.optim.lr_warmup_ratio", f"worker.{name}.optim.lr_warmup_steps",
           lambda steps: steps is None, _STEPS) for name in ("actor", "critic")),
        ("algorithm.lam", "algorithm.adv_estimator", _is_gae, "used only with gae"),
        ("algorithm.kl_target", "algorithm.kl_type", _is_adaptive, _FIXED_KL),
        ("algorithm.kl_horizon", "algorithm.kl_type", _is_adaptive, _FIXED_KL),
        ("trainer.max_try_make_batch", "algorithm.online_filtering", bool, "used only with online_filtering"),
    ],
    "verl": [
        ("critic", "algorithm.adv_estimator", _is_gae, _NO_CRITIC),
        ("trainer.critic_warmup", "algorithm.adv_estimator", _is_gae, _NO_CRITIC),
        ("reward_model.model", "reward_model.enable", bool, "the reward model is off"),
        ("actor_rollout_ref.model.lora", "actor_rollout_ref.model.lora.rank", bool, _NO_ADAPTERS),
        ("critic.model.lora", "critic.model.lora.rank", bool, _NO_ADAPTERS),
        ("critic.model.lora_alpha", "critic.model.lora_rank", bool, _NO_ADAPTERS),
        ("critic.model.target_modules", "critic.model.lora_rank", bool, _NO_ADAPTERS),
        ("actor_rollout_ref.model.lora_alpha", "actor_rollout_ref.model.lora_rank", bool, _NO_ADAPTERS),
        ("actor_rollout_ref.model.target_modules", "actor_rollout_ref.model.lora_rank", bool, _NO_ADAPTERS),
        ("actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.use_kl_loss", bool, _NO_KL_LOSS),
        ("actor_rollout_ref.actor.kl_loss_type", "actor_rollout_ref.actor.use_kl_loss", bool, _NO_KL_LOSS),
        ("algorithm.kl_ctrl", "algorithm.use_kl_in_reward", bool, _NO_KL_REWARD),
        *((f"{name}.optim.lr_warmup_steps_ratio", f"{name}.optim.lr_warmup_steps",
           lambda steps: not _is_positive(steps), _STEPS) for name in ("actor_rollout_ref.actor", "critic")),
        ("algorithm.lam", "algorithm.adv_estimator", _is_gae, "used only with gae"),
        ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.type", _is_adaptive, _FIXED_KL),
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.type", _is_adaptive, _FIXED_KL),
        ("algorithm.kl_penalty", "algorithm.use_kl_in_reward", bool, _NO_KL_REWARD),
        ("algorithm.pf_ppo", "algorithm.use_pf_ppo", bool, "use_pf_ppo is off"),
        *((f"{_VERL_TIS}.{name}", f"{_VERL_TIS}.rollout_is", bool, "rollout_is is null")
          for name in ("rollout_is_threshold", "rollout_is_batch_normalize")),
        *((f"{_VERL_LOSS}.{name}", f"{_VERL_LOSS}.loss_mode", lambda mode: mode in ("clip_cov", "kl_cov", "dro"),
           "a parameter of another loss_mode")
          for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")),
        ("algorithm.filter_groups", "algorithm.filter_groups.enable", bool, "filter_groups is off"),
        (f"{_VERL_VAL}.temperature", f"{_VERL_VAL}.do_sample", bool, "validation is greedy"),
    ],
    "TRL": [
        *((f"vllm_{name}", "use_vllm", bool, "vLLM is off") for name in _TRL_VLLM.split()),
        *((name, "vllm_importance_sampling_correction", bool, "the correction is off") for name in _TRL_TIS),
        *((name, "use_peft", bool, _NO_ADAPTERS) for name in _TRL_LORA),
        *((f"vespo_{name}", "loss_type", lambda loss: loss == "vespo", "used only by vespo")
          for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
        *((f"entropy_{name}", "use_adaptive_entropy", bool, "used only with use_adaptive_entropy")
          for name in ("coef_min", "coef_max", "coef_delta", "target")),
        ("use_bias_correction_kl", "beta", bool, "there is no KL"),
        ("ref_model_sync_steps", "sync_ref_model", bool, "used only with sync_ref_model"),
        ("ref_model_mixup_alpha", "sync_ref_model", bool, "used only with sync_ref_model"),
        ("eval_steps", "eval_strategy", lambda strategy: strategy == "steps", "eval_strategy is not steps"),
        ("save_steps", "save_strategy", lambda strategy: strategy in (None, "steps"), "save_strategy is not steps"),
    ],
}  # fmt: skip
