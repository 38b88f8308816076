"""Conversions of values of EasyR1, verl and TRL for `mtrl convert`; foreign_keys.py has the names.

A conversion takes the value of a foreign key and all settings of the foreign file (flat, dotted), and returns values of
our keys. Most keys need none: foreign_keys.py names our key, and the value stays the same.
"""

from typing import Any

from mtrl.config.conversion_steps import (
    Conversion,
    Converted,
    Flat,
    Lost,
    join_texts,
    merge,
    reject,
    replace_words,
    round_up,
    unset_if,
    with_remark,
)
from mtrl.config.foreign_keys import LIKE_ACTOR

KWARGS = "worker.rollout.engine_kwargs"


def _loggers(value: Any, flat: Flat) -> Converted:
    """Files are always written, and the console is on by default."""
    names = [value] if isinstance(value, str) else list(value or [])
    names = [name for name in names if name not in ("file", "none", "console")]
    return Converted({"training.logger": ["console", *names]})


def _output_dir(project: str, experiment: str) -> Conversion:
    """Their folder is that of the run; ours gets the names of project and experiment appended."""

    def convert(value: Any, flat: Flat) -> Converted:
        ending = f"/{flat.get(project)}/{flat.get(experiment)}"
        if str(value).rstrip("/").endswith(ending):
            return Converted({"training.output_dir": str(value).rstrip("/").removesuffix(ending) or "/"})
        return Converted({"training.output_dir": value}, "the project and experiment names are appended to it")

    return convert


def _warmup_steps(learner: str, ratio: str, batch: str, mini_batch: str, epochs: str) -> Conversion:
    """Theirs count rollout steps, ours optimizer steps. Without steps, verl takes the ratio, which may be 0."""

    def convert(value: Any, flat: Flat) -> Converted:
        if value <= 0:
            return Converted({} if flat.get(ratio) else {f"worker.{learner}.optim.warmup_steps": 0})
        updates = max(1, int(flat[batch]) // int(flat[mini_batch])) * int(flat.get(epochs) or 1)
        return Converted({f"worker.{learner}.optim.warmup_steps": value * updates})

    return convert


def _lora(value: Any, flat: Flat) -> Converted:
    if not value:
        return Converted({})
    return Converted({"worker.actor.model.lora_rank": value, "worker.actor.model.peft_type": "lora"})


def _modules(value: Any, flat: Flat) -> Converted:
    if value == "all-linear":
        return Converted({"worker.actor.model.lora_target_modules": None})
    return Converted({"worker.actor.model.lora_target_modules": [value] if isinstance(value, str) else value})


def _fsdp_size(value: Any, flat: Flat) -> Converted:
    if value < 1:
        return Converted({})
    return Converted({"worker.actor.fsdp.sharding_strategy": "HYBRID_SHARD"}, "shards within a node, for any size")


def _val_batch_size(value: Any, flat: Flat) -> Converted:
    """Their -1 means all prompts at once; the batch size does not change the result."""
    return Converted({} if value is None or value < 1 else {"dataset.val_batch_size": value})


def _refills(value: Any, flat: Flat) -> Converted:
    if value is None or value < 1:
        raise Lost("a step must have a limit; optimization.max_refills is the number of additional rounds")
    return Converted({"optimization.max_refills": value - 1, "optimization.on_short_batch": "stop"})


def _dynamic_sampling(value: Any, flat: Flat) -> Converted:
    """verl keeps groups whose rewards differ, EasyR1 those whose mean is within bounds."""
    return Converted({"optimization.online_filtering": value} | ({"optimization.filter_by": "spread"} if value else {}))


_SAME_KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_CHECKPOINT = reject("foreign checkpoints cannot be loaded; set worker.actor.model.model_path to an exported model")
_KL_UNIT = "the KL of a response, summed over its tokens"
_SCHEDULES = {"constant": "constant_with_warmup"}

# FSDP keeps the reference on the CPU, or it is moved there after use: either way it is not on the GPU during updates.
_REF_OFFLOAD_KEYS = ("worker.ref.fsdp.enable_cpu_offload", "worker.ref.offload.offload_params")
_REF_OFFLOAD: dict[str, Conversion] = dict.fromkeys(
    _REF_OFFLOAD_KEYS,
    lambda value, flat: Converted(
        {"worker.ref.offload_params": any(flat.get(key) is True for key in _REF_OFFLOAD_KEYS)}
    ),
)
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}

_EASYR1_BATCHES = ("data.rollout_batch_size", "worker.actor.global_batch_size", "worker.actor.ppo_epochs")
_EASYR1: dict[str, Conversion] = {
    "data.train_files": join_texts("dataset.train_files"),
    "data.val_files": join_texts("dataset.val_files"),
    "data.val_batch_size": _val_batch_size,
    "algorithm.kl_penalty": replace_words("optimization.divergence_penalty", _SAME_KL),
    "algorithm.kl_target": with_remark("optimization.divergence_target", _KL_UNIT),
    "algorithm.kl_horizon": with_remark("optimization.divergence_horizon", "counted in responses"),
    "worker.actor.loss_type": replace_words("optimization.policy_loss", {"default": "ppo"}),
    "worker.actor.loss_avg_mode": replace_words("optimization.loss_type", {"token": "dapo", "seq": "grpo"}),
    "worker.actor.model.lora.rank": _lora,
    "worker.actor.model.lora.target_modules": _modules,
    "worker.actor.optim.lr_warmup_steps": _warmup_steps(
        "actor", "", *_EASYR1_BATCHES
    ),
    "worker.critic.optim.lr_warmup_steps": _warmup_steps(
        "critic", "", *_EASYR1_BATCHES
    ),
    "worker.actor.fsdp.enable_full_shard": replace_words(
        "worker.actor.fsdp.sharding_strategy", {True: "FULL_SHARD", False: "SHARD_GRAD_OP"}
    ),
    "worker.actor.fsdp.fsdp_size": _fsdp_size,
    "worker.actor.optim.lr_scheduler_type": replace_words("worker.actor.optim.lr_scheduler_type", _SCHEDULES),
    "worker.critic.optim.lr_scheduler_type": replace_words("worker.critic.optim.lr_scheduler_type", _SCHEDULES),
    **_REF_OFFLOAD,
    "worker.rollout.limit_images": lambda value, flat: Converted(
        {"worker.rollout.engine_kwargs.limit_mm_per_prompt": {"image": value}} if value else {}
    ),
    "worker.reward.reward_type": replace_words(
        "worker.reward.reward_type", {"batch": "function", "sequential": "function"}
    ),
    "trainer.logger": _loggers,
    "trainer.max_try_make_batch": _refills,
    "trainer.save_checkpoint_path": _output_dir("trainer.project_name", "trainer.experiment_name"),
    "trainer.load_checkpoint_path": _CHECKPOINT,
}  # fmt: skip


def _clip_ratio(value: Any, flat: Flat) -> Converted:
    """verl clips at clip_ratio_low and clip_ratio_high; this key is for losses that have only one number."""
    sides = [flat.get(f"actor_rollout_ref.actor.clip_ratio_{side}") for side in ("low", "high")]
    is_used = value in sides
    return Converted(
        {}, "" if is_used else "verl clips at clip_ratio_low and clip_ratio_high, which are 0.2 unless set"
    )


def _kl_in_reward(value: Any, flat: Flat) -> Converted:
    in_loss = flat.get("actor_rollout_ref.actor.use_kl_loss")
    if value and in_loss:
        raise Lost("the divergence is in the reward or in the loss, not in both; the loss is kept")
    return Converted({} if in_loss else {"optimization.disable_divergence": not value})


def _custom_reward(section: str) -> Conversion:
    def convert(value: Any, flat: Flat) -> Converted:
        name = flat.get(f"{section}.name") or "compute_score"
        return Converted({"worker.reward.reward_fn_path": f"{value}:{name}"} if value else {})

    return convert


def _reward_manager(value: Any, flat: Flat) -> Converted:
    if flat.get("custom_reward_function.path") or flat.get("reward.custom_reward_function.path"):
        return Converted({})
    raise Lost("verl selects the function by the column data_source; name yours in worker.reward.functions")


def _truncation(value: Any, flat: Flat) -> Converted:
    if value in ("error", None):
        return Converted({})
    raise Lost("prompts are never cut; longer ones are dropped by dataset.filter_overlong_prompts")


def _reward_model(value: Any, flat: Flat) -> Converted:
    return Converted({"worker.reward.reward_type": "model"} if value else {})


def _engine_kwargs(value: Any, flat: Flat) -> Converted:
    """verl has a section per engine; only that of vLLM can be used here."""
    others = [engine for engine, settings in value.items() if engine != "vllm" and settings]
    if others:
        raise Lost(f"settings of {' and '.join(others)}; the engines here are vllm and local")
    return Converted({f"{KWARGS}.{name}": item for name, item in (value.get("vllm") or {}).items()})


def _like_actor(name: str) -> Conversion:
    def convert(value: Any, flat: Flat) -> Converted:
        if value != flat.get(f"actor_rollout_ref.actor.{name}", value):
            raise Lost(f"the critic is trained with the {name} of the actor")
        return Converted({})

    return convert


_OPTIMIZERS = {"AdamW": "adamw", "adamw": "adamw", "AdamW8bit": "adamw_8bit"}
_VERL_ACTOR = "actor_rollout_ref.actor"
_VERL_BATCHES = ("data.train_batch_size", f"{_VERL_ACTOR}.ppo_mini_batch_size", f"{_VERL_ACTOR}.ppo_epochs")
_VERL: dict[str, Conversion] = {
    "data.train_files": _EASYR1["data.train_files"],
    "data.val_files": _EASYR1["data.val_files"],
    "data.val_batch_size": _val_batch_size,
    "data.seed": unset_if("dataset.seed", None),
    "data.truncation": _truncation,
    "algorithm.kl_penalty": _EASYR1["algorithm.kl_penalty"],
    "actor_rollout_ref.actor.clip_ratio": _clip_ratio,
    "actor_rollout_ref.actor.policy_loss.loss_mode": replace_words("optimization.policy_loss", {"vanilla": "ppo"}),
    "actor_rollout_ref.actor.loss_agg_mode": replace_words(
        "optimization.loss_type",
        {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"},
    ),
    "actor_rollout_ref.actor.kl_loss_type": replace_words("optimization.divergence_penalty", _SAME_KL),
    "actor_rollout_ref.actor.tis_imp_ratio_cap": lambda value, flat: Converted(
        {"optimization.tis_clip": value if value > 0 else None}
    ),
    "actor_rollout_ref.actor.optim.warmup_style": replace_words("worker.actor.optim.lr_scheduler_type", _SCHEDULES),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": replace_words(
        "worker.actor.optim.lr_scheduler_type", _SCHEDULES
    ),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": _warmup_steps(
        "actor", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", *_VERL_BATCHES
    ),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": unset_if("worker.actor.optim.warmup_ratio", None, 0),
    "critic.optim.warmup_style": replace_words("worker.critic.optim.lr_scheduler_type", _SCHEDULES),
    "critic.optim.lr_scheduler_type": replace_words("worker.critic.optim.lr_scheduler_type", _SCHEDULES),
    "critic.optim.lr_warmup_steps": _warmup_steps(
        "critic", "critic.optim.lr_warmup_steps_ratio", *_VERL_BATCHES
    ),
    "critic.optim.lr_warmup_steps_ratio": unset_if("worker.critic.optim.warmup_ratio", None, 0),
    "actor_rollout_ref.actor.optim.total_training_steps": unset_if("training.max_steps", None, -1),
    "actor_rollout_ref.actor.ppo_micro_batch_size": with_remark(
        "worker.actor.micro_batch_size_per_device_for_update", "responses on one device, not on all"
    ),
    "actor_rollout_ref.model.lora_rank": _lora,
    "actor_rollout_ref.model.target_modules": _modules,
    "actor_rollout_ref.rollout.name": replace_words("worker.rollout.name", {"hf": "local"}),
    "actor_rollout_ref.rollout.mode": replace_words("worker.rollout.mode", {"sync": "inprocess", "async": "inprocess"}),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": lambda value, flat: Converted(
        {} if value else {"worker.rollout.val.temperature": 0.0}
    ),
    "actor_rollout_ref.rollout.engine_kwargs": _engine_kwargs,
    "actor_rollout_ref.actor.optim.optimizer": replace_words("worker.actor.optim.name", _OPTIMIZERS),
    "critic.optim.optimizer": replace_words("worker.critic.optim.name", _OPTIMIZERS),
    "actor_rollout_ref.actor.fsdp_config.model_dtype": replace_words("worker.actor.fsdp.param_dtype", _DTYPES),
    "actor_rollout_ref.actor.fsdp_config.dtype": replace_words("worker.actor.fsdp.mixed_precision_dtype", _DTYPES),
    **{f"critic.{name}": _like_actor(name) for name in LIKE_ACTOR},
    "custom_reward_function.path": _custom_reward("custom_reward_function"),
    "custom_reward_function.name": merge,
    "reward.custom_reward_function.path": _custom_reward("reward.custom_reward_function"),
    "reward.custom_reward_function.name": merge,
    "reward_model.enable": _reward_model,
    "reward.reward_model.enable": _reward_model,
    "reward_model.reward_manager": _reward_manager,
    "reward.reward_manager.name": _reward_manager,
    "algorithm.norm_adv_by_std_in_grpo": replace_words("optimization.scale_rewards", {True: "group", False: "none"}),
    "algorithm.use_kl_in_reward": _kl_in_reward,
    "algorithm.kl_ctrl.target_kl": with_remark("optimization.divergence_target", _KL_UNIT),
    "algorithm.kl_ctrl.horizon": with_remark("optimization.divergence_horizon", "counted in responses"),
    "algorithm.filter_groups.enable": _dynamic_sampling,
    "algorithm.filter_groups.metric": replace_words(
        "optimization.filter_key",
        {"acc": "accuracy", **dict.fromkeys(("score", "reward", "seq_reward", "seq_final_reward"), "overall")},
    ),
    "algorithm.filter_groups.max_num_gen_batches": _refills,
    "trainer.logger": _loggers,
    "trainer.default_local_dir": _output_dir("trainer.project_name", "trainer.experiment_name"),
    "trainer.max_actor_ckpt_to_keep": replace_words("training.save_limit", {}),
    "trainer.resume_mode": replace_words("training.find_last_checkpoint", {"auto": True, "disable": False}),
    "trainer.resume_from_path": _CHECKPOINT,
}  # fmt: skip


# --- TRL ---


def _per_generation(flat: Flat) -> tuple[int, int]:
    """Completions per generation and per optimizer step, on all devices."""
    update = flat["per_device_train_batch_size"] * flat["gradient_accumulation_steps"] * flat.get("devices", 1)
    if flat.get("generation_batch_size"):
        return flat["generation_batch_size"], update
    steps = flat.get("steps_per_generation") or flat["gradient_accumulation_steps"]
    return flat["per_device_train_batch_size"] * steps * flat.get("devices", 1), update


def _batches(value: Any, flat: Flat) -> Converted:
    """TRL counts completions, we count prompts: a group is never split."""
    n = flat["num_generations"]
    generation, update = _per_generation(flat)
    if generation % n:
        raise Lost(f"{generation} completions are not a multiple of num_generations = {n}")
    sizes = {
        "worker.actor.micro_batch_size_per_device_for_update": flat["per_device_train_batch_size"],
        "dataset.rollout_batch_size": generation // n,
    }
    if update % n or generation % update:
        remark = f"an optimizer step of {update} completions splits groups of {n}; converted to one of all {generation}"
        return Converted({**sizes, "worker.actor.global_batch_size": generation // n}, remark)
    return Converted({**sizes, "worker.actor.global_batch_size": update // n})


def _steps(key: str) -> Conversion:
    """TRL counts optimizer steps; our step is a rollout with all its optimizer steps."""

    def convert(value: Any, flat: Flat) -> Converted:
        if value is None or value < 0:
            return Converted({})
        if value < 1:
            raise Lost("a fraction of the run; give a number of steps")
        generation, update = _per_generation(flat)
        updates = max(1, generation // update) * (flat.get("num_iterations") or 1)
        return Converted({key: max(1, -int(-value // updates))})

    return convert


def _beta(value: Any, flat: Flat) -> Converted:
    if not value:
        return Converted({"optimization.disable_divergence": True})
    return Converted(
        {
            "optimization.divergence_coef": value,
            "optimization.use_divergence_loss": True,
            "optimization.divergence_penalty": "low_var_kl",
        }
    )


def _epsilon(value: Any, flat: Flat) -> Converted:
    high = {} if flat.get("epsilon_high") is not None else _epsilon_high(value, flat).values
    return Converted({"worker.actor.clip_ratio_low": value, **high})


def _epsilon_high(value: Any, flat: Flat) -> Converted:
    cispo = flat.get("loss_type") == "cispo"
    return Converted({"optimization.cispo_clip_high" if cispo else "worker.actor.clip_ratio_high": value})


def _loss_type(value: Any, flat: Flat) -> Converted:
    averages = {"cispo": "dapo", "sapo": "grpo"}  # how TRL averages these two
    if value in averages:
        return Converted({"optimization.policy_loss": value, "optimization.loss_type": averages[value]})
    return Converted({"optimization.loss_type": value})


def _warmup(value: Any, flat: Flat) -> Converted:
    is_ratio = isinstance(value, float) and 0 < value < 1
    return Converted({"worker.actor.optim.warmup_ratio" if is_ratio else "worker.actor.optim.warmup_steps": value})


def _scheduler(value: Any, flat: Flat) -> Converted:
    no_warmup = {"worker.actor.optim.warmup_steps": 0} if value == "constant" else {}
    return Converted({"worker.actor.optim.lr_scheduler_type": _SCHEDULES.get(value, value), **no_warmup})


def _fp16(value: Any, flat: Flat) -> Converted:
    if value:
        raise Lost("fp16 would need loss scaling; bf16, the default, has the range of fp32")
    return Converted({})


def _entropy(value: Any, flat: Flat) -> Converted:
    if value == 1:
        return Converted({})
    settings = {"optimization.enable_entropy_filtering": True, "optimization.top_p_entropy_tokens": value}
    return Converted(settings, "the fraction is of each response, not of the batch")


def _server(value: Any, flat: Flat) -> Converted:
    if flat.get("vllm_mode") == "colocate":
        return Converted({})
    host, port = flat.get("vllm_server_host", "0.0.0.0"), flat.get("vllm_server_port", 8000)
    return Converted({"worker.rollout.address": f"{host}:{port}"})


def _strategy(key: str) -> Conversion:
    def convert(value: Any, flat: Flat) -> Converted:
        if value not in ("no", "steps"):
            raise Lost(f"{key} is a number of steps")
        return Converted({key: -1} if value == "no" else {})

    return convert


def _test_split(value: Any, flat: Flat) -> Converted:
    is_used = flat.get("dataset_name") and flat.get("eval_strategy") != "no"
    return Converted({"dataset.val_files": f"{flat['dataset_name'].partition('@')[0]}@{value}"} if is_used else {})


def _sampling_level(value: Any, flat: Flat) -> Converted:
    level, _, action = value.partition("_")
    remark = "ratios above optimization.tis_clip are clipped; TRL leaves these out" if action == "mask" else ""
    return Converted({"optimization.tis_level": level}, remark)


def _reward_functions(value: Any, flat: Flat) -> Converted:
    """TRL's own functions have names, others dotted paths; a script's are read as file.py:name."""
    names = [value] if isinstance(value, str) else list(value)
    if "get_soft_overlong_punishment" in names:
        raise Lost("get_soft_overlong_punishment needs its arguments; see worker.reward.soft_punish_cache")
    paths = [name if ":" in name else f"trl.rewards.{name}" if "." not in name else name for name in names]
    return Converted(
        {"worker.reward.functions": [path if ":" in path else ":".join(path.rsplit(".", 1)) for path in paths]}
    )


_ADAMW = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw")
_ADAMW_8BIT = dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit")

_TRL: dict[str, Conversion] = {
    "per_device_train_batch_size": _batches,
    "gradient_accumulation_steps": merge,
    "generation_batch_size": merge,
    "steps_per_generation": merge,
    "seed": lambda value, flat: Converted({"dataset.seed": value, "worker.rollout.seed": value}),
    "num_train_epochs": round_up("training.total_epochs"),
    "max_steps": _steps("training.max_steps"),
    "save_steps": _steps("training.save_freq"),
    "eval_steps": _steps("training.val_freq"),
    "save_strategy": _strategy("training.save_freq"),
    "eval_strategy": _strategy("training.val_freq"),
    "warmup_steps": _warmup,
    "warmup_ratio": unset_if("worker.actor.optim.warmup_ratio", 0, None),
    "lr_scheduler_type": _scheduler,
    "max_prompt_length": with_remark("dataset.max_prompt_length", "longer prompts are dropped, not cut"),
    "report_to": lambda value, flat: _loggers([] if value in ("none", ["none"]) else value, flat),
    "output_dir": with_remark("training.output_dir", "the project and experiment names are appended to it"),
    "resume_from_checkpoint": reject("TRL's checkpoints cannot be loaded; start from an exported model"),
    "adam_beta1": lambda value, flat: Converted({"worker.actor.optim.betas": [value, flat["adam_beta2"]]}),
    "adam_beta2": merge,
    "optim": replace_words("worker.actor.optim.name", {**_ADAMW, **_ADAMW_8BIT}),
    "bf16": lambda value, flat: Converted({"worker.actor.fsdp.mixed_precision_dtype": "bf16"} if value else {}),
    "fp16": _fp16,
    "beta": _beta,
    "epsilon": _epsilon,
    "epsilon_high": _epsilon_high,
    "loss_type": _loss_type,
    "scale_rewards": replace_words("optimization.scale_rewards", {True: "group", False: "none"}),
    "top_entropy_quantile": _entropy,
    "top_k": lambda value, flat: Converted({"worker.rollout.top_k": value or -1}),
    "use_vllm": lambda value, flat: Converted(
        {"worker.rollout.name": "vllm"} if value else {"optimization.tis_clip": None}  # TRL corrects only vLLM
    ),
    "vllm_mode": replace_words("worker.rollout.mode", {"colocate": "inprocess"}),
    "vllm_server_host": _server,
    "vllm_server_port": _server,
    "vllm_importance_sampling_correction": lambda value, flat: Converted(
        {} if value else {"optimization.tis_clip": None}
    ),
    "vllm_importance_sampling_mode": _sampling_level,
    "dtype": replace_words("worker.actor.fsdp.param_dtype", _DTYPES),
    "torch_dtype": replace_words("worker.actor.fsdp.param_dtype", _DTYPES),
    "reward_funcs": _reward_functions,
    "use_peft": lambda value, flat: Converted({"worker.actor.model.peft_type": "lora"} if value else {}),
    "load_in_4bit": lambda value, flat: Converted({"worker.actor.model.peft_type": "qlora"} if value else {}),
    "lora_target_modules": _modules,
    "reward_model_name_or_path": lambda value, flat: Converted(
        {"worker.reward.reward_type": "model", "worker.reward.model_path": value} if value else {}
    ),
    "dataset_name": lambda value, flat: Converted(
        {"dataset.train_files": value if "@" in value else f"{value}@{flat.get('dataset_train_split', 'train')}"}
    ),
    "dataset_train_split": merge,
    "dataset_test_split": _test_split,
}  # fmt: skip

CONVERSIONS: dict[str, dict[str, Conversion]] = {"EasyR1": _EASYR1, "verl": _VERL, "TRL": _TRL}
