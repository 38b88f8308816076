"""The names that keys of EasyR1, verl and TRL have in MTRL.

A table maps a foreign key to MTRL's key, with a remark after a semicolon (mostly if the unit differs), or to `none: `
and what to do instead. Keys that only differ in their section (`data.seed` for `dataset.seed`) have no entry:
`RENAMED_SECTIONS` covers them, and `SAME_NAMES` lists those that the projects really have.
"""

from collections.abc import Iterator

from mtrl.config.program_keys import has_no_effect
from mtrl.config.tree import known_leaves

# Foreign section -> our section; longer prefixes first.
RENAMED_SECTIONS = {
    "actor_rollout_ref.actor": "worker.actor",
    "actor_rollout_ref.rollout": "worker.rollout",
    "actor_rollout_ref.ref": "worker.ref",
    "actor_rollout_ref.model": "worker.actor.model",
    "actor_rollout_ref": "worker",
    "algorithm": "optimization",
    "critic": "worker.critic",
    "data": "dataset",
    "reward_model": "worker.reward",
    "trainer": "training",
}


_VLLM = "enforce_eager enable_chunked_prefill max_num_batched_tokens"


# Keys of verl's critic that are settings of both models here.
LIKE_ACTOR = ("ppo_mini_batch_size", "ppo_epochs", "shuffle", "loss_agg_mode", "grad_clip", "loss_scale_factor")
_CRITIC = "the critic is trained with the settings of the actor"


def _engine_kwargs(section: str, names: str) -> dict[str, str]:
    return {f"{section}.{name}": f"worker.rollout.engine_kwargs; as {name}" for name in names.split()}


def _warmup(section: str, learner: str, ratio: str) -> dict[str, str]:
    optim = f"worker.{learner}.optim"
    return {f"{section}.lr_warmup_steps": f"{optim}.warmup_steps", f"{section}.{ratio}": f"{optim}.warmup_ratio"}


_EASYR1_AND_VERL = {
    "algorithm.adv_estimator": "optimization.advantage_estimator",
    "algorithm.kl_penalty": "optimization.divergence_penalty",
    "trainer.critic_warmup": "worker.critic.warmup_steps",
    "trainer.total_epochs": "training.total_epochs",
    "trainer.save_freq": "training.save_freq",
    "data.train_files": "dataset.train_files; several files are one text, separated by commas",
    "data.val_files": "dataset.val_files; several files are one text, separated by commas",
    "data.max_prompt_length": "dataset.max_prompt_length; includes media tokens",
    "data.max_response_length": "dataset.max_response_length",
    "data.filter_overlong_prompts_workers": "none: leave it out",
}

_EASYR1 = {
    "data.rollout_batch_size": "dataset.rollout_batch_size; both count prompts",
    "data.mini_rollout_batch_size": "none: optimization.max_refills limits the refills",
    "data.val_batch_size": "dataset.val_batch_size; at least 1, not -1",
    "data.format_prompt": "dataset.format_prompt",
    "algorithm.disable_kl": "optimization.disable_divergence",
    "algorithm.use_kl_loss": "optimization.use_divergence_loss",
    "algorithm.kl_coef": "optimization.divergence_coef",
    "algorithm.kl_type": "optimization.divergence_type",
    "algorithm.kl_target": "optimization.divergence_target; the KL of a response, summed over its tokens",
    "algorithm.kl_horizon": "optimization.divergence_horizon; counts responses",
    "algorithm.online_filtering": "optimization.online_filtering",
    "algorithm.filter_key": "optimization.filter_key",
    "worker.actor.loss_type": "optimization.policy_loss; default is called ppo",
    "worker.actor.loss_avg_mode": "optimization.loss_type; token is called dapo, seq is called grpo",
    "worker.actor.tau_positive": "optimization.tau_positive",
    "worker.actor.tau_negative": "optimization.tau_negative",
    "worker.actor.ulysses_sequence_parallel_size": "worker.actor.ulysses_size",
    "worker.actor.strategy": "none: leave it out; see worker.actor.fsdp.sharding_strategy",
    "worker.actor.model.override_config": "none: change the config.json of the model",
    "worker.actor.model.lora.rank": "worker.actor.model.lora_rank; enable adapters by worker.actor.model.peft_type",
    "worker.actor.model.lora.alpha": "worker.actor.model.lora_alpha",
    "worker.actor.model.lora.target_modules": "worker.actor.model.lora_target_modules; a list",
    "worker.actor.optim.strategy": "worker.actor.optim.name",
    **_warmup("worker.actor.optim", "actor", "lr_warmup_ratio"),
    "worker.critic.optim.strategy": "worker.critic.optim.name",
    **_warmup("worker.critic.optim", "critic", "lr_warmup_ratio"),
    "worker.actor.fsdp.enable_full_shard": "worker.actor.fsdp.sharding_strategy; FULL_SHARD or SHARD_GRAD_OP",
    "worker.actor.fsdp.enable_cpu_offload": "worker.actor.fsdp.cpu_offload",
    "worker.actor.fsdp.enable_rank0_init": "none: leave it out",
    "worker.actor.fsdp.torch_dtype": "worker.actor.fsdp.param_dtype",
    "worker.actor.fsdp.mp_param_dtype": "worker.actor.fsdp.mixed_precision_dtype",
    "worker.actor.fsdp.fsdp_size": "worker.actor.fsdp.sharding_strategy; HYBRID_SHARD shards within a node",
    "worker.ref.fsdp.enable_cpu_offload": "worker.ref.offload_params",
    "worker.ref.offload.offload_params": "worker.ref.offload_params",
    "worker.rollout.val_override_config.n": "worker.rollout.val.n",
    "worker.rollout.val_override_config.temperature": "worker.rollout.val.temperature",
    "worker.rollout.limit_images": "worker.rollout.engine_kwargs; as limit_mm_per_prompt",
    **_engine_kwargs("worker.rollout", f"{_VLLM} max_model_len dtype"),
    "worker.reward.reward_function": "worker.reward.reward_fn_path; file.py:name",
    "worker.reward.reward_function_kwargs": "worker.reward.reward_fn_kwargs",
    "worker.reward.score_function": "worker.reward.reward_fn_path; file.py:name",
    "worker.reward.skip_special_tokens": "none: leave it out",
    "trainer.total_episodes": "training.total_epochs; passes over the data",
    "trainer.val_freq": "training.val_freq",
    "trainer.save_checkpoint_path": "training.output_dir; the project and experiment names are appended",
    "trainer.load_checkpoint_path": "training.load_checkpoint_path",
    "trainer.find_last_checkpoint": "training.find_last_checkpoint",
    "trainer.max_try_make_batch": "optimization.max_refills; rounds after the first one, not -1",
    "trainer.save_model_only": "none: a checkpoint always holds everything a run needs to resume",
    "worker.rollout.disable_tqdm": "none: leave it out",
    "worker.rollout.val_override_config.top_p": "none: validation only has worker.rollout.val.temperature",
    "worker.actor.model.lora.exclude_modules": "none: worker.actor.model.lora_vision_tower is for the vision tower",
    "worker.ref.strategy": "none: leave it out",
    "worker.ref.fsdp.fsdp_size": "none: leave it out",
    "worker.ref.offload.offload_optimizer": "none: leave it out; the reference has no optimizer",
    "worker.rollout.ignore_eos": "none: a response always ends at its end-of-sequence token",
    "worker.ref.fsdp.enable_full_shard": "none: leave it out",
    "worker.ref.fsdp.enable_rank0_init": "none: leave it out",
}

_REWARD = ("custom_reward_function", "reward.custom_reward_function")
_VERL = {
    "data.train_batch_size": "dataset.rollout_batch_size; both count prompts",
    "data.gen_batch_size": "none: optimization.max_refills limits the refills",
    "data.tokenizer": "worker.actor.model.tokenizer_path",
    "data.truncation": "dataset.filter_overlong_prompts; prompts are never cut",
    "data.custom_cls.path": "none: every column of the data reaches the reward function",
    "data.reward_fn_key": "none: leave it out; every column of the data reaches the reward function",
    "actor_rollout_ref.model.path": "worker.actor.model.model_path",
    "actor_rollout_ref.model.custom_chat_template": "dataset.override_chat_template",
    "actor_rollout_ref.model.use_remove_padding": "worker.actor.padding_free",
    "actor_rollout_ref.model.lora_rank": "worker.actor.model.lora_rank; enabled by worker.actor.model.peft_type",
    "actor_rollout_ref.model.target_modules": "worker.actor.model.lora_target_modules; a list",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "worker.actor.global_batch_size; both count prompts",
    "actor_rollout_ref.actor.ppo_micro_batch_size": (
        "worker.actor.micro_batch_size_per_device_for_update; responses on one device, not on all"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "worker.actor.micro_batch_size_per_device_for_update",
    "actor_rollout_ref.actor.use_dynamic_bsz": "worker.actor.dynamic_batching",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "worker.actor.tokens_per_micro_batch",
    "actor_rollout_ref.actor.clip_ratio": "worker.actor.clip_ratio_low; and worker.actor.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_c": "worker.actor.clip_ratio_dual",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "optimization.policy_loss; vanilla is called ppo",
    "actor_rollout_ref.actor.loss_agg_mode": (
        "optimization.loss_type; token-mean is dapo, seq-mean-token-mean is grpo, seq-mean-token-sum-norm is dr_grpo"
    ),
    "actor_rollout_ref.actor.entropy_coeff": (
        "none: optimization.use_entropy_penalty has the opposite sign, it lowers entropy"
    ),
    "actor_rollout_ref.actor.use_kl_loss": "optimization.use_divergence_loss",
    "actor_rollout_ref.actor.kl_loss_coef": "optimization.divergence_coef",
    "actor_rollout_ref.actor.kl_loss_type": "optimization.divergence_penalty",
    "actor_rollout_ref.actor.tis_imp_ratio_cap": "optimization.tis_clip; null disables it, not -1",
    "actor_rollout_ref.actor.grad_clip": "worker.actor.max_grad_norm",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "worker.actor.ulysses_size",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "worker.actor.offload.offload_params",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "worker.actor.offload.offload_optimizer",
    **_warmup("actor_rollout_ref.actor.optim", "actor", "lr_warmup_steps_ratio"),
    "actor_rollout_ref.actor.optim.warmup_style": "worker.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.total_training_steps": "training.max_steps",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "worker.ref.offload_params",
    **dict.fromkeys(
        [f"actor_rollout_ref.{part}.log_prob_micro_batch_size_per_gpu" for part in ("ref", "rollout")],
        "worker.actor.micro_batch_size_per_device_for_experience; for actor and reference",
    ),
    "actor_rollout_ref.rollout.gpu_memory_utilization": "worker.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.mode": "worker.rollout.mode; inprocess, process or server",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "worker.rollout.tensor_parallel_size",
    "actor_rollout_ref.rollout.prompt_length": "dataset.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "dataset.max_response_length",
    "actor_rollout_ref.rollout.val_kwargs.n": "worker.rollout.val.n",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "worker.rollout.val.temperature",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "worker.rollout.val.temperature; 0 is greedy",
    "actor_rollout_ref.rollout.calculate_log_probs": "none: leave it out; the sampler's log-probs are always stored",
    "actor_rollout_ref.rollout.engine_kwargs": "worker.rollout.engine_kwargs; those of vllm, without its name",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": "none: the routing of experts is not replayed",
    "actor_rollout_ref.rollout.over_sample_rate": "none: optimization.max_refills limits additional prompts",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "none: validation only has worker.rollout.val.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_k": "none: validation only has worker.rollout.val.temperature",
    "actor_rollout_ref.rollout.ignore_eos": "none: a response always ends at its end-of-sequence token",
    **_engine_kwargs("actor_rollout_ref.rollout", f"{_VLLM} max_num_seqs max_model_len dtype"),
    "actor_rollout_ref.actor.tau_pos": "optimization.tau_positive",
    "actor_rollout_ref.actor.tau_neg": "optimization.tau_negative",
    "actor_rollout_ref.actor.freeze_vision_tower": "worker.actor.model.freeze_vision_tower",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "worker.actor.fsdp.param_dtype",
    "actor_rollout_ref.actor.fsdp_config.dtype": "worker.actor.fsdp.mixed_precision_dtype; bf16 or fp32",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": "none: set worker.actor.ulysses_size",
    "actor_rollout_ref.actor.optim.optimizer": "worker.actor.optim.name; adamw or adamw_8bit",
    "actor_rollout_ref.actor.optim.optimizer_impl": "none: worker.actor.optim.name has adamw and adamw_8bit",
    "actor_rollout_ref.actor.optim.clip_grad": "none: leave it out; verl sets it from actor.grad_clip",
    "actor_rollout_ref.actor.optim.num_cycles": "none: the cosine schedule always has half a cycle",
    "actor_rollout_ref.model.lora.rank": "none: adapters of Megatron; set actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.actor.shuffle": "none: the prompts of a step are not shuffled",
    "custom_reward_function.reward_kwargs": "worker.reward.reward_fn_kwargs",
    "critic.model.path": "worker.critic.model.model_path",
    "critic.optim.lr": "worker.critic.optim.lr",
    **_warmup("critic.optim", "critic", "lr_warmup_steps_ratio"),
    "critic.optim.warmup_style": "worker.critic.optim.lr_scheduler_type",
    "critic.cliprange_value": "worker.critic.cliprange_value",
    "critic.optim.optimizer": "worker.critic.optim.name; adamw or adamw_8bit",
    "critic.optim.optimizer_impl": "none: worker.critic.optim.name has adamw and adamw_8bit",
    "critic.optim.clip_grad": "none: leave it out; verl sets it from critic.grad_clip",
    "critic.optim.num_cycles": "none: the cosine schedule always has half a cycle",
    "critic.optim.total_training_steps": "none: leave it out; the critic is trained as long as the actor",
    "critic.model.lora_rank": "none: the critic has no adapters",
    **{f"critic.{name}": f"none: {_CRITIC}" for name in LIKE_ACTOR},
    **dict.fromkeys(("data.train_max_samples", "data.val_max_samples"), "none: write a shorter file"),
    "data.audio_key": "none: a prompt has text, images and videos",
    "reward_model.enable": "worker.reward.reward_type; model",
    "reward_model.model.path": "worker.reward.model_path",
    "reward_model.reward_manager": "worker.reward.functions",
    **{
        f"{where}.{name}": "worker.reward.reward_fn_path; file.py:name"
        for where in _REWARD
        for name in ("path", "name")
    },
    "reward.custom_reward_function.reward_kwargs": "worker.reward.reward_fn_kwargs",
    "reward.reward_manager.name": "worker.reward.functions",
    "reward.reward_model.enable": "worker.reward.reward_type; model",
    "reward.reward_model.model_path": "worker.reward.model_path",
    "algorithm.norm_adv_by_std_in_grpo": "optimization.scale_rewards; group for true, none for false",
    "algorithm.use_kl_in_reward": (
        "optimization.disable_divergence; the divergence is in the reward unless use_divergence_loss is set"
    ),
    "algorithm.kl_ctrl.type": "optimization.divergence_type",
    "algorithm.kl_ctrl.kl_coef": "optimization.divergence_coef",
    "algorithm.kl_ctrl.horizon": "optimization.divergence_horizon; counts responses",
    "algorithm.kl_ctrl.target_kl": "optimization.divergence_target; the KL of a response, summed over its tokens",
    "algorithm.rollout_correction.rollout_is": "optimization.tis_level",
    "algorithm.rollout_correction.rollout_is_threshold": "optimization.tis_clip",
    "algorithm.rollout_correction.rollout_rs": "none: responses are weighted (optimization.tis_clip), never rejected",
    "algorithm.rollout_correction.bypass_mode": "none: the log-probs before the update are always computed",
    "algorithm.rollout_correction.loss_type": "none: optimization.policy_loss is the loss",
    "algorithm.rollout_correction.rollout_is_batch_normalize": "none: the weights are not normalized",
    "algorithm.use_pf_ppo": "none: rollouts are not sampled again by their reward",
    "algorithm.filter_groups.enable": "optimization.online_filtering; with optimization.filter_by spread",
    "algorithm.filter_groups.metric": "optimization.filter_key",
    "algorithm.filter_groups.max_num_gen_batches": "optimization.max_refills; 0 means no refill, not no limit",
    "trainer.total_training_steps": "training.max_steps",
    "trainer.test_freq": "training.val_freq",
    "trainer.log_val_generations": "training.val_generations_to_log",
    "trainer.default_local_dir": "training.output_dir; the project and experiment names are appended",
    "trainer.max_actor_ckpt_to_keep": "training.save_limit",
    "trainer.resume_mode": "training.find_last_checkpoint; true for auto, false for disable",
    "trainer.resume_from_path": "training.load_checkpoint_path",
    "trainer.v1.trainer_mode": "none: worker.rollout.off_policy_steps samples ahead of the updates",
    "trainer.rollout_data_dir": "training.rollout_log_path; rollouts.jsonl is always written",
}

_SHARDING = ("deepspeed", "fsdp", "fsdp_config", "accelerator_config", "parallelism_config")
_ADAPTIVE = ("coef_min", "coef_max", "coef_delta", "target")
_VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
_TRL = {
    "model_name_or_path": "worker.actor.model.model_path",
    "model_revision": "none: download that revision and set worker.actor.model.model_path to its folder",
    "model_init_kwargs": "none: set worker.actor.fsdp.param_dtype and worker.actor.model.attn_implementation",
    **dict.fromkeys(("dtype", "torch_dtype"), "worker.actor.fsdp.param_dtype; fp32 or bf16"),
    "dataset_name": "dataset.train_files; hub id[@split]",
    "dataset_config": "none: store the subset as a file and set dataset.train_files",
    "dataset_streaming": "none: the data is stored on disk, not streamed",
    "dataset_train_split": "dataset.train_files; written hub-id@split",
    "dataset_test_split": "dataset.val_files; written hub-id@split",
    "train_dataset": "dataset.train_files; file or hub id[@split]",
    "eval_dataset": "dataset.val_files; file or hub id[@split]",
    "shuffle_dataset": "dataset.shuffle",
    "seed": "dataset.seed; and worker.rollout.seed for the sampled tokens",
    "data_seed": "dataset.seed",
    "output_dir": "training.output_dir; the project and experiment names are appended",
    "run_name": "training.experiment_name",
    "project": "training.project_name",
    "report_to": "training.logger; a list",
    "num_train_epochs": "training.total_epochs; a whole number",
    "max_steps": "training.max_steps; counts rollout steps, each of one or more optimizer steps",
    "save_steps": "training.save_freq",
    "save_strategy": "training.save_freq; -1 for no",
    "eval_strategy": "training.val_freq; -1 for no",
    "push_to_hub": "none: push a checkpoint yourself (mtrl export --push)",
    "save_total_limit": "training.save_limit",
    "save_only_model": "none: a checkpoint always holds everything a run needs to resume",
    "load_best_model_at_end": "none: training.best_metric names the checkpoint that is kept as the best",
    "eval_steps": "training.val_freq",
    "eval_on_start": "training.val_before_train",
    "resume_from_checkpoint": "training.find_last_checkpoint; or training.load_checkpoint_path for another run",
    "num_completions_to_print": "training.val_generations_to_log",
    "log_completions": "training.realtime_rollout_logging",
    "num_generations": "worker.rollout.n",
    "num_generations_eval": "worker.rollout.val.n",
    "max_prompt_length": "dataset.max_prompt_length; longer prompts are dropped, not cut",
    "max_completion_length": "dataset.max_response_length",
    "per_device_train_batch_size": (
        "worker.actor.micro_batch_size_per_device_for_update; counts completions, too, but does not change the result: "
        "prompts per optimizer step are worker.actor.global_batch_size"
    ),
    "per_device_eval_batch_size": "dataset.val_batch_size; counts prompts on all devices together",
    "gradient_accumulation_steps": (
        "worker.actor.global_batch_size; prompts per optimizer step, which determines the accumulation"
    ),
    "generation_batch_size": "dataset.rollout_batch_size; prompts per step, TRL counts completions",
    "steps_per_generation": "dataset.rollout_batch_size; this many times worker.actor.global_batch_size",
    "num_iterations": "worker.actor.ppo_epochs",
    "learning_rate": "worker.actor.optim.lr",
    "weight_decay": "worker.actor.optim.weight_decay",
    "adam_beta1": "worker.actor.optim.betas; the first of the two",
    "adam_beta2": "worker.actor.optim.betas; the second of the two",
    "optim": "worker.actor.optim.name; adamw or adamw_8bit",
    "warmup_steps": "worker.actor.optim.warmup_steps",
    "warmup_ratio": "worker.actor.optim.warmup_ratio",
    "lr_scheduler_type": "worker.actor.optim.lr_scheduler_type",
    "adam_epsilon": "none: AdamW adds 1e-8",
    "optim_args": "none: set worker.actor.optim.betas and worker.actor.optim.weight_decay",
    "optim_target_modules": "none: every trained weight has the same optimizer",
    "lr_scheduler_kwargs": "none: worker.actor.optim.min_lr_ratio is the end of the cosine",
    "neftune_noise_alpha": "none: no noise is added to the embeddings",
    "auto_find_batch_size": "none: set worker.actor.micro_batch_size_per_device_for_update",
    "train_sampling_strategy": "none: dataset.shuffle is random or not",
    "max_grad_norm": "worker.actor.max_grad_norm",
    "gradient_checkpointing": "worker.actor.model.enable_gradient_checkpointing",
    "bf16": "worker.actor.fsdp.mixed_precision_dtype; bf16",
    "fp16": "worker.actor.fsdp.mixed_precision_dtype; bf16 or fp32, since fp16 would need loss scaling",
    "torch_compile": "worker.actor.use_torch_compile",
    "attn_implementation": "worker.actor.model.attn_implementation",
    "trust_remote_code": "worker.actor.model.trust_remote_code",
    **dict.fromkeys(_SHARDING, "none: leave it out; see worker.actor.fsdp.sharding_strategy"),
    "router_aux_loss_coef": "none: experts have no auxiliary loss",
    "disable_dropout": "none: set the dropout in the config.json of the model",
    "cast_lm_head_to_fp32": "none: all layers compute in worker.actor.fsdp.mixed_precision_dtype",
    "load_in_8bit": "none: worker.actor.model.peft_type has lora and qlora, which is 4 bits",
    **dict.fromkeys(("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"), "none: qlora is nf4"),
    **dict.fromkeys(("use_rslora", "use_dora"), "none: worker.actor.model.peft_type has lora and qlora"),
    "lora_modules_to_save": "none: only the adapters are trained",
    "lora_target_parameters": "none: see worker.actor.model.lora_target_modules",
    "use_peft": "worker.actor.model.peft_type; lora",
    "load_in_4bit": "worker.actor.model.peft_type; qlora",
    "lora_r": "worker.actor.model.lora_rank",
    "lora_alpha": "worker.actor.model.lora_alpha",
    "lora_dropout": "worker.actor.model.lora_dropout",
    "lora_target_modules": "worker.actor.model.lora_target_modules",
    "beta": "optimization.divergence_coef; TRL's KL is a loss term, set optimization.use_divergence_loss",
    "epsilon": "worker.actor.clip_ratio_low",
    "epsilon_high": "worker.actor.clip_ratio_high; for cispo optimization.cispo_clip_high, absolute",
    "delta": "none: TRL caps the ratio; worker.actor.clip_ratio_dual caps the loss for A < 0 instead",
    "loss_type": "optimization.loss_type; cispo and sapo are values of optimization.policy_loss",
    "importance_sampling_level": "optimization.importance_sampling_level",
    "scale_rewards": "optimization.scale_rewards; group, batch or none",
    "multi_objective_aggregation": "worker.reward.normalize",
    "mask_truncated_completions": "optimization.mask_truncated_responses",
    "top_entropy_quantile": (
        "optimization.top_p_entropy_tokens; per response, enabled by optimization.enable_entropy_filtering"
    ),
    "entropy_coef": "none: optimization.use_entropy_penalty has the opposite sign, it lowers entropy",
    "use_adaptive_entropy": "none: the weight of optimization.use_entropy_penalty does not change",
    **{f"entropy_{name}": "none: see use_adaptive_entropy" for name in _ADAPTIVE},
    **dict.fromkeys(_VESPO, "none: there is no loss vespo"),
    "off_policy_mask_threshold": "none: optimization.tis_clip limits the weight of such responses instead",
    "use_bias_correction_kl": "none: the divergence is not multiplied by the ratio of new to old probability",
    "max_tool_calling_iterations": "worker.rollout.max_turns; tools are in worker.rollout.environment",
    "sapo_temperature_pos": "optimization.tau_positive",
    "sapo_temperature_neg": "optimization.tau_negative",
    "reward_funcs": "worker.reward.functions",
    "reward_weights": "worker.reward.weights",
    "reward_model_name_or_path": "worker.reward.model_path; with worker.reward.reward_type model",
    "sync_ref_model": "none: set worker.ref.sync_every to the number of steps, TRL's ref_model_sync_steps",
    "ref_model_sync_steps": "worker.ref.sync_every",
    "ref_model_mixup_alpha": "none: worker.ref.sync_every copies the policy without mixing",
    "temperature": "worker.rollout.temperature",
    "top_p": "worker.rollout.top_p",
    "top_k": "worker.rollout.top_k; -1 for all",
    "min_p": "none: use worker.rollout.top_p or worker.rollout.top_k",
    "repetition_penalty": "none: the sampled distribution would differ from the trained one",
    "generation_kwargs": "none: set worker.rollout.temperature, worker.rollout.top_p and worker.rollout.top_k",
    "chat_template_kwargs": "none: write the template to a file and set dataset.override_chat_template",
    "use_vllm": "worker.rollout.name; vllm",
    "vllm_structured_outputs_regex": "none: the sampled distribution would differ from the trained one",
    "vllm_mode": "worker.rollout.mode; colocate is called inprocess",
    "vllm_server_base_url": "worker.rollout.address",
    "vllm_server_host": "worker.rollout.address; host and port together",
    "vllm_server_port": "worker.rollout.address; host and port together",
    "vllm_gpu_memory_utilization": "worker.rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "worker.rollout.tensor_parallel_size",
    "vllm_max_model_length": "worker.rollout.engine_kwargs; as max_model_len",
    "vllm_importance_sampling_correction": "optimization.tis_clip; null disables it",
    "vllm_importance_sampling_cap": "optimization.tis_clip",
    "vllm_importance_sampling_clip_max": "optimization.tis_clip",
    "vllm_importance_sampling_clip_min": "none: small ratios are not clipped",
    "vllm_importance_sampling_mode": "optimization.tis_level; ratios are clipped at optimization.tis_clip, not masked",
}

# Forks of EasyR1 whose generator collects attention maps.
_COLLECT = "optimization.compute_attention_metrics; the trainer measures attention, with any engine"
_FORKS = {"rollout.collect_attentions": _COLLECT, "worker.rollout.collect_attentions": _COLLECT}

TABLES = {"EasyR1 and verl": _EASYR1_AND_VERL, "EasyR1": _EASYR1, "verl": _VERL, "TRL": _TRL, "EasyR1 forks": _FORKS}

# Foreign keys with the same name here, though perhaps in another section.
SAME_NAMES = {
    "EasyR1": {
        "data": (
            "prompt_key answer_key image_key video_key image_dir video_fps min_pixels max_pixels shuffle seed "
            "filter_overlong_prompts override_chat_template"
        ),
        "algorithm": "gamma lam filter_low filter_high",
        "worker": "hybrid_engine",
        "worker.actor": (
            "global_batch_size micro_batch_size_per_device_for_update micro_batch_size_per_device_for_experience "
            "clip_ratio_low clip_ratio_high clip_ratio_dual max_grad_norm ppo_epochs padding_free dynamic_batching "
            "ulysses_size use_torch_compile"
        ),
        "worker.actor.model": (
            "model_path tokenizer_path trust_remote_code enable_gradient_checkpointing freeze_vision_tower"
        ),
        "worker.actor.optim": "lr betas weight_decay lr_scheduler_type min_lr_ratio",
        "worker.actor.offload": "offload_params offload_optimizer",
        "worker.critic": "cliprange_value",
        "worker.critic.model": "model_path",
        "worker.critic.optim": "lr betas weight_decay lr_scheduler_type min_lr_ratio",
        "worker.rollout": "name n temperature top_p top_k seed gpu_memory_utilization tensor_parallel_size",
        "worker.reward": "reward_type num_cpus",
        "trainer": (
            "max_steps project_name experiment_name logger nnodes n_gpus_per_node val_before_train val_only "
            "val_generations_to_log save_limit"
        ),
    },
    "verl": {
        "data": "prompt_key image_key video_key val_batch_size shuffle seed filter_overlong_prompts",
        "algorithm": "gamma lam",
        "actor_rollout_ref": "hybrid_engine",
        "actor_rollout_ref.actor": "clip_ratio_low clip_ratio_high ppo_epochs use_torch_compile",
        "actor_rollout_ref.actor.optim": "lr betas weight_decay min_lr_ratio",
        "critic.optim": "betas weight_decay min_lr_ratio",
        "actor_rollout_ref.model": "tokenizer_path trust_remote_code enable_gradient_checkpointing lora_alpha",
        "actor_rollout_ref.rollout": "name n temperature top_p top_k enable_prefix_caching",
        "trainer": "project_name experiment_name logger nnodes n_gpus_per_node val_before_train val_only",
    },
}


def foreign_names(key: str) -> dict[str, list[str]]:
    """The names of our key in each project, with the remark of the table in brackets."""
    names: dict[str, list[str]] = {"EasyR1": [], "verl": [], "TRL": [], "EasyR1 forks": []}
    for project, name in iterate_same_names():
        if rename_section(name) == key:
            names[project].append(name)
    for projects, table in TABLES.items():
        for name, entry in table.items():
            target, _, remark = entry.partition("; ")
            if target == key:
                for project in projects.split(" and "):
                    names[project].append(f"{name} ({remark})" if remark else name)
    return {project: keys for project, keys in names.items() if keys}


def find_counterpart(project: str, key: str) -> str | None:
    """The table entry of a project's key; our own key if only the section differs."""
    for owner, table in TABLES.items():
        if project in owner.split(" and ") and key in table:
            return table[key]
    is_theirs = project != "TRL" and key.partition(".")[0] not in ("dataset", "training", "optimization")
    return rename_section(key) if is_theirs and rename_section(key) in known_leaves() else None


def iterate_same_names() -> Iterator[tuple[str, str]]:
    """The project and key of each entry of `SAME_NAMES`."""
    for project, sections in SAME_NAMES.items():
        for section, keys in sections.items():
            yield from ((project, f"{section}.{name}") for name in keys.split())


def translate_key(key: str) -> str | None:
    """Advice for a key of another project; None if it is unknown there."""
    for project, table in TABLES.items():
        if key in table:
            return _advice(project, table[key])
    if has_no_effect(key):
        return "a key of another project that only controls its program: leave it out"
    if rename_section(key) in known_leaves():
        return _advice("EasyR1 and verl", rename_section(key))
    for project, table in TABLES.items():
        for theirs, entry in table.items():
            if rename_section(theirs) == key:  # their key in our section
                return _advice(project, entry)
    # TRL's keys have no section, so users put them into one that looks right. If our own key is merely in another
    # section (`dataset.temperature`), the suggestion of the nearest key is better.
    name = key.rsplit(".", 1)[-1]
    ours = any(known.endswith(f".{name}") for known in known_leaves())
    return _advice("TRL", _TRL[name]) if name in _TRL and not ours else None


def _advice(project: str, entry: str) -> str:
    if entry.startswith("none: "):
        return f"a key of {project} without a counterpart: {entry.removeprefix('none: ')}"
    return f"a key of {project}; here it is {entry}"


def rename_section(key: str) -> str:
    """The key with a foreign section replaced by ours."""
    for theirs, ours in RENAMED_SECTIONS.items():
        if key.startswith(theirs + "."):
            return ours + key.removeprefix(theirs)
    return key
