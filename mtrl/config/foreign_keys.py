"""What keys of EasyR1, verl and TRL are called here.

A value is MTRL's key, often with a remark after a semicolon, above all where the unit differs; or `none: ` and what to
do instead. Keys that only changed their section (`data.seed` for `dataset.seed`) need no entry: `MOVED` covers them,
and `SAME` says which of them those projects really have.
"""

from collections.abc import Iterator

from mtrl.config.tree import known_leaves

# Sections of theirs and where their keys live here; longer prefixes first.
MOVED = {
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

_EASYR1_AND_VERL = {
    "algorithm.adv_estimator": "optimization.advantage_estimator",
    "algorithm.kl_penalty": "optimization.divergence_penalty",
    "trainer.critic_warmup": "worker.critic.warmup_steps",
    "trainer.total_epochs": "training.total_epochs",
    "trainer.save_freq": "training.save_freq",
    "data.train_files": "dataset.train_files; one text, several files separated by commas",
    "data.val_files": "dataset.val_files; one text, several files separated by commas",
    "data.max_prompt_length": "dataset.max_prompt_length; expanded media tokens count",
    "data.max_response_length": "dataset.max_response_length",
    "data.filter_overlong_prompts_workers": "none: leave it out",
}

_EASYR1 = {
    "data.rollout_batch_size": "dataset.rollout_batch_size; prompts, as there",
    "data.mini_rollout_batch_size": "none: optimization.max_refills bounds the refills",
    "data.val_batch_size": "dataset.val_batch_size; at least 1, there is no -1",
    "data.format_prompt": "dataset.format_prompt",
    "algorithm.disable_kl": "optimization.disable_divergence",
    "algorithm.use_kl_loss": "optimization.use_divergence_loss",
    "algorithm.kl_coef": "optimization.divergence_coef",
    "algorithm.kl_type": "optimization.divergence_type",
    "algorithm.kl_target": "optimization.divergence_target; the KL of a response, summed over its tokens",
    "algorithm.kl_horizon": "optimization.divergence_horizon; responses",
    "algorithm.online_filtering": "optimization.online_filtering",
    "algorithm.filter_key": "optimization.filter_key",
    "worker.actor.loss_type": "optimization.policy_loss; default is called ppo",
    "worker.actor.loss_avg_mode": "optimization.loss_type; token is called dapo, seq is called grpo",
    "worker.actor.tau_positive": "optimization.tau_positive",
    "worker.actor.tau_negative": "optimization.tau_negative",
    "worker.actor.ulysses_sequence_parallel_size": "worker.actor.ulysses_size",
    "worker.actor.strategy": "none: leave it out; how FSDP shards is worker.actor.fsdp.sharding_strategy",
    "worker.actor.model.override_config": "none: change the config.json of the model",
    "worker.actor.model.lora.rank": "worker.actor.model.lora_rank; switch adapters on by worker.actor.model.peft_type",
    "worker.actor.model.lora.alpha": "worker.actor.model.lora_alpha",
    "worker.actor.model.lora.target_modules": "worker.actor.model.lora_target_modules; a list",
    "worker.actor.optim.strategy": "worker.actor.optim.name",
    "worker.actor.optim.lr_warmup_ratio": "worker.actor.optim.warmup_ratio",
    "worker.actor.optim.lr_warmup_steps": "worker.actor.optim.warmup_steps",
    "worker.critic.optim.strategy": "worker.critic.optim.name",
    "worker.critic.optim.lr_warmup_ratio": "worker.critic.optim.warmup_ratio",
    "worker.critic.optim.lr_warmup_steps": "worker.critic.optim.warmup_steps",
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
    "worker.rollout.enforce_eager": "worker.rollout.engine_kwargs; as enforce_eager",
    "worker.rollout.enable_chunked_prefill": "worker.rollout.engine_kwargs; as enable_chunked_prefill",
    "worker.rollout.max_num_batched_tokens": "worker.rollout.engine_kwargs; as max_num_batched_tokens",
    "worker.rollout.max_model_len": "worker.rollout.engine_kwargs; as max_model_len",
    "worker.rollout.dtype": "worker.rollout.engine_kwargs; as dtype",
    "worker.reward.reward_function": "worker.reward.reward_fn_path; file.py:name",
    "worker.reward.reward_function_kwargs": "worker.reward.reward_fn_kwargs",
    "worker.reward.score_function": "worker.reward.reward_fn_path; file.py:name",
    "worker.reward.skip_special_tokens": "none: leave it out",
    "trainer.total_episodes": "training.total_epochs; passes over the data",
    "trainer.val_freq": "training.val_freq",
    "trainer.save_checkpoint_path": "training.output_dir; the project and experiment names are appended",
    "trainer.load_checkpoint_path": "training.load_checkpoint_path",
    "trainer.find_last_checkpoint": "training.find_last_checkpoint",
    "trainer.max_try_make_batch": "optimization.max_refills; rounds after the first one, there is no -1",
    "trainer.save_model_only": "none: a checkpoint holds all that a run needs to go on",
    "worker.rollout.disable_tqdm": "none: leave it out",
    "worker.rollout.val_override_config.top_p": "none: there is worker.rollout.val.temperature",
    "worker.actor.model.lora.exclude_modules": "none: worker.actor.model.lora_vision_tower is for the vision tower",
    "worker.ref.fsdp.enable_full_shard": "none: leave it out",
    "worker.ref.fsdp.enable_rank0_init": "none: leave it out",
}

_VERL = {
    "data.train_batch_size": "dataset.rollout_batch_size; prompts, as there",
    "data.gen_batch_size": "none: optimization.max_refills bounds the refills",
    "data.tokenizer": "worker.actor.model.tokenizer_path",
    "data.truncation": "dataset.filter_overlong_prompts; prompts are never cut",
    "data.custom_cls.path": "none: every column of the data reaches the reward function",
    "data.reward_fn_key": "none: leave it out; every column of the data reaches the reward function",
    "actor_rollout_ref.model.path": "worker.actor.model.model_path",
    "actor_rollout_ref.model.custom_chat_template": "dataset.override_chat_template",
    "actor_rollout_ref.model.use_remove_padding": "worker.actor.padding_free",
    "actor_rollout_ref.model.lora_rank": "worker.actor.model.lora_rank; switch on by worker.actor.model.peft_type",
    "actor_rollout_ref.model.target_modules": "worker.actor.model.lora_target_modules; a list",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "worker.actor.global_batch_size; prompts, as there",
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
        "none: optimization.use_entropy_penalty has the other sign, it lowers entropy"
    ),
    "actor_rollout_ref.actor.use_kl_loss": "optimization.use_divergence_loss",
    "actor_rollout_ref.actor.kl_loss_coef": "optimization.divergence_coef",
    "actor_rollout_ref.actor.kl_loss_type": "optimization.divergence_penalty",
    "actor_rollout_ref.actor.tis_imp_ratio_cap": "optimization.tis_clip; null switches it off, not -1",
    "actor_rollout_ref.actor.grad_clip": "worker.actor.max_grad_norm",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "worker.actor.ulysses_size",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "worker.actor.offload.offload_params",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "worker.actor.offload.offload_optimizer",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "worker.actor.optim.warmup_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "worker.actor.optim.warmup_ratio",
    "actor_rollout_ref.actor.optim.warmup_style": "worker.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.total_training_steps": "training.max_steps",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "worker.ref.offload_params",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (
        "worker.actor.micro_batch_size_per_device_for_experience; for actor and reference"
    ),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": (
        "worker.actor.micro_batch_size_per_device_for_experience; for actor and reference"
    ),
    "actor_rollout_ref.rollout.gpu_memory_utilization": "worker.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.mode": "worker.rollout.mode; inprocess, process or server",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "worker.rollout.tensor_parallel_size",
    "actor_rollout_ref.rollout.prompt_length": "dataset.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "dataset.max_response_length",
    "actor_rollout_ref.rollout.val_kwargs.n": "worker.rollout.val.n",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "worker.rollout.val.temperature",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "worker.rollout.val.temperature; 0 is greedy",
    "actor_rollout_ref.rollout.calculate_log_probs": "none: the sampler's log-probs are always kept",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "none: there is worker.rollout.val.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_k": "none: there is worker.rollout.val.temperature",
    "actor_rollout_ref.rollout.ignore_eos": "none: a response ends at the end of its text",
    "actor_rollout_ref.rollout.enforce_eager": "worker.rollout.engine_kwargs; as enforce_eager",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "worker.rollout.engine_kwargs; as enable_chunked_prefill",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "worker.rollout.engine_kwargs; as max_num_batched_tokens",
    "actor_rollout_ref.rollout.max_num_seqs": "worker.rollout.engine_kwargs; as max_num_seqs",
    "actor_rollout_ref.rollout.max_model_len": "worker.rollout.engine_kwargs; as max_model_len",
    "actor_rollout_ref.rollout.dtype": "worker.rollout.engine_kwargs; as dtype",
    "actor_rollout_ref.actor.shuffle": "none: the prompts of a step keep their order",
    "custom_reward_function.reward_kwargs": "worker.reward.reward_fn_kwargs",
    "critic.model.path": "worker.critic.model.model_path",
    "critic.optim.lr": "worker.critic.optim.lr",
    "critic.optim.lr_warmup_steps": "worker.critic.optim.warmup_steps",
    "critic.optim.lr_warmup_steps_ratio": "worker.critic.optim.warmup_ratio",
    "critic.optim.warmup_style": "worker.critic.optim.lr_scheduler_type",
    "critic.cliprange_value": "worker.critic.cliprange_value",
    "reward_model.enable": "worker.reward.reward_type; model",
    "reward_model.model.path": "worker.reward.model_path",
    "reward_model.reward_manager": "worker.reward.functions",
    "custom_reward_function.path": "worker.reward.reward_fn_path; file.py:name",
    "custom_reward_function.name": "worker.reward.reward_fn_path; file.py:name",
    "algorithm.norm_adv_by_std_in_grpo": "optimization.scale_rewards; group for true, none for false",
    "algorithm.use_kl_in_reward": (
        "optimization.disable_divergence; the divergence sits in the reward unless use_divergence_loss is set"
    ),
    "algorithm.kl_ctrl.type": "optimization.divergence_type",
    "algorithm.kl_ctrl.kl_coef": "optimization.divergence_coef",
    "algorithm.kl_ctrl.horizon": "optimization.divergence_horizon; responses",
    "algorithm.kl_ctrl.target_kl": "optimization.divergence_target; the KL of a response, summed over its tokens",
    "algorithm.rollout_correction.rollout_is": "optimization.tis_level",
    "algorithm.rollout_correction.rollout_is_threshold": "optimization.tis_clip",
    "algorithm.filter_groups.enable": "optimization.online_filtering; by spread: optimization.filter_by",
    "algorithm.filter_groups.metric": "optimization.filter_key",
    "algorithm.filter_groups.max_num_gen_batches": "optimization.max_refills; 0 is no refill, not no limit",
    "trainer.total_training_steps": "training.max_steps",
    "trainer.test_freq": "training.val_freq",
    "trainer.log_val_generations": "training.val_generations_to_log",
    "trainer.default_local_dir": "training.output_dir; the project and experiment names are appended",
    "trainer.max_actor_ckpt_to_keep": "training.save_limit",
    "trainer.resume_mode": "training.find_last_checkpoint; true for auto, false for disable",
    "trainer.resume_from_path": "training.load_checkpoint_path",
    "trainer.rollout_data_dir": "training.rollout_log_path; rollouts.jsonl is always written",
}

_TRL = {
    "model_name_or_path": "worker.actor.model.model_path",
    "dataset_name": "dataset.train_files; hub id[@split]",
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
    "max_steps": "training.max_steps; rollout steps, each of one or more optimizer steps",
    "save_steps": "training.save_freq",
    "save_strategy": "training.save_freq; -1 for no",
    "eval_strategy": "training.val_freq; -1 for no",
    "push_to_hub": "none: checkpoints load by from_pretrained as they are; push the one you like",
    "save_total_limit": "training.save_limit",
    "eval_steps": "training.val_freq",
    "eval_on_start": "training.val_before_train",
    "resume_from_checkpoint": "training.find_last_checkpoint; or training.load_checkpoint_path for another run's",
    "num_completions_to_print": "training.val_generations_to_log",
    "log_completions": "training.realtime_rollout_logging",
    "num_generations": "worker.rollout.n",
    "num_generations_eval": "worker.rollout.val.n",
    "max_prompt_length": "dataset.max_prompt_length; longer prompts are dropped, not cut",
    "max_completion_length": "dataset.max_response_length",
    "per_device_train_batch_size": (
        "worker.actor.micro_batch_size_per_device_for_update; counts completions, as there, but never changes the "
        "result: prompts per optimizer step are worker.actor.global_batch_size"
    ),
    "per_device_eval_batch_size": "dataset.val_batch_size; prompts of all devices together",
    "gradient_accumulation_steps": (
        "worker.actor.global_batch_size; prompts per optimizer step, accumulation follows from it"
    ),
    "generation_batch_size": "dataset.rollout_batch_size; prompts per step, where TRL counts completions",
    "steps_per_generation": (
        "dataset.rollout_batch_size; prompts per step, this many times worker.actor.global_batch_size"
    ),
    "num_iterations": "worker.actor.ppo_epochs",
    "learning_rate": "worker.actor.optim.lr",
    "weight_decay": "worker.actor.optim.weight_decay",
    "adam_beta1": "worker.actor.optim.betas; the first of the two",
    "adam_beta2": "worker.actor.optim.betas; the second of the two",
    "optim": "worker.actor.optim.name; adamw or adamw_8bit",
    "warmup_steps": "worker.actor.optim.warmup_steps",
    "warmup_ratio": "worker.actor.optim.warmup_ratio",
    "lr_scheduler_type": "worker.actor.optim.lr_scheduler_type",
    "max_grad_norm": "worker.actor.max_grad_norm",
    "gradient_checkpointing": "worker.actor.model.enable_gradient_checkpointing",
    "bf16": "worker.actor.fsdp.mixed_precision_dtype; bf16",
    "fp16": "worker.actor.fsdp.mixed_precision_dtype; bf16 or fp32, since fp16 would need its loss scaled",
    "torch_compile": "worker.actor.use_torch_compile",
    "attn_implementation": "worker.actor.model.attn_implementation",
    "trust_remote_code": "worker.actor.model.trust_remote_code",
    "use_peft": "worker.actor.model.peft_type; lora",
    "load_in_4bit": "worker.actor.model.peft_type; qlora",
    "lora_r": "worker.actor.model.lora_rank",
    "lora_alpha": "worker.actor.model.lora_alpha",
    "lora_dropout": "worker.actor.model.lora_dropout",
    "lora_target_modules": "worker.actor.model.lora_target_modules",
    "beta": "optimization.divergence_coef; TRL's KL is a loss, here optimization.use_divergence_loss",
    "epsilon": "worker.actor.clip_ratio_low",
    "epsilon_high": "worker.actor.clip_ratio_high; for cispo optimization.cispo_clip_high, absolute",
    "delta": "none: TRL caps the ratio; worker.actor.clip_ratio_dual caps the loss for A < 0, to the same end",
    "loss_type": "optimization.loss_type; cispo and sapo are values of optimization.policy_loss",
    "importance_sampling_level": "optimization.importance_sampling_level",
    "scale_rewards": "optimization.scale_rewards; group, batch or none",
    "multi_objective_aggregation": "worker.reward.normalize",
    "mask_truncated_completions": "optimization.mask_truncated_responses",
    "top_entropy_quantile": (
        "optimization.top_p_entropy_tokens; of each response, and switched on by optimization.enable_entropy_filtering"
    ),
    "entropy_coef": "none: optimization.use_entropy_penalty has the other sign, it lowers entropy",
    "sapo_temperature_pos": "optimization.tau_positive",
    "sapo_temperature_neg": "optimization.tau_negative",
    "reward_funcs": "worker.reward.functions",
    "reward_weights": "worker.reward.weights",
    "reward_model_name_or_path": "worker.reward.model_path; with worker.reward.reward_type model",
    "sync_ref_model": "none: worker.ref.sync_every takes the number of steps, which is TRL's ref_model_sync_steps",
    "ref_model_sync_steps": "worker.ref.sync_every",
    "ref_model_mixup_alpha": "none: worker.ref.sync_every takes the whole policy over, without a mixture",
    "temperature": "worker.rollout.temperature",
    "top_p": "worker.rollout.top_p",
    "top_k": "worker.rollout.top_k; -1 for all",
    "min_p": "none: log-probs are of the uncut distribution; cut by worker.rollout.top_p or worker.rollout.top_k",
    "repetition_penalty": "none: the trained and the sampled distribution would differ",
    "use_vllm": "worker.rollout.name; vllm",
    "vllm_mode": "worker.rollout.mode; colocate is called inprocess",
    "vllm_server_base_url": "worker.rollout.address",
    "vllm_server_host": "worker.rollout.address; host and port together",
    "vllm_server_port": "worker.rollout.address; host and port together",
    "vllm_gpu_memory_utilization": "worker.rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "worker.rollout.tensor_parallel_size",
    "vllm_max_model_length": "worker.rollout.engine_kwargs; as max_model_len",
    "vllm_importance_sampling_correction": "optimization.tis_clip; null switches it off",
    "vllm_importance_sampling_cap": "optimization.tis_clip",
    "vllm_importance_sampling_clip_max": "optimization.tis_clip",
    "vllm_importance_sampling_mode": "optimization.tis_level; ratios are cut at optimization.tis_clip, not masked",
}

# Forks of EasyR1 that let the generator collect attention maps.
_COLLECT = "optimization.compute_attention_metrics; attention comes from the trainer, for every engine"
_FORKS = {"rollout.collect_attentions": _COLLECT, "worker.rollout.collect_attentions": _COLLECT}

TABLES = {
    "EasyR1 and verl": _EASYR1_AND_VERL,
    "EasyR1": _EASYR1,
    "verl": _VERL,
    "TRL": _TRL,
    "EasyR1 forks": _FORKS,
}

# Keys that say how their own program runs, and nothing of what is trained; TRL's have no section.
_PROGRAM = {
    "actor_rollout_ref": "nccl_timeout",
    "actor_rollout_ref.actor": "checkpoint ppo_infer_micro_batch_size_per_gpu profiler strategy",
    "actor_rollout_ref.actor.fsdp_config": (
        "forward_prefetch fsdp_size offload_policy reshard_after_forward wrap_policy"
    ),
    "actor_rollout_ref.model": "external_lib fused_kernel_options use_fused_kernels use_liger use_shm",
    "actor_rollout_ref.ref": (
        "fsdp_config log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz strategy ulysses_sequence_parallel_size"
    ),
    "actor_rollout_ref.rollout": (
        "disable_log_stats do_sample free_cache_engine layered_summon load_format log_prob_max_token_len_per_gpu "
        "log_prob_use_dynamic_bsz"
    ),
    "data": "dataloader_num_workers return_full_prompt return_raw_chat return_raw_input_ids use_shm",
    "reward_model": "launch_reward_fn_async strategy",
    "trainer": (
        "balance_batch default_hdfs_dir del_local_ckpt_after_load device max_critic_ckpt_to_keep profile_steps "
        "ray_timeline ray_wait_register_center_timeout remove_previous_ckpt_in_save use_legacy_worker_impl "
        "validation_data_dir"
    ),
    "": (
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor ddp_find_unused_parameters "
        "disable_tqdm gradient_checkpointing_kwargs log_level logging_dir logging_first_step logging_steps "
        "logging_strategy overwrite_output_dir ray_kwargs remove_unused_columns tf32 use_liger_kernel use_liger_loss "
        "vllm_enable_sleep_mode"
    ),
}
_WITHOUT_EFFECT = {f"{section}.{name}".strip(".") for section, names in _PROGRAM.items() for name in names.split()}

# Keys of theirs that have the same name here and at most another section.
SAME = {
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


def names_elsewhere(key: str) -> dict[str, list[str]]:
    """What a key of ours is called in each project, with the remark of the table in brackets."""
    names: dict[str, list[str]] = {"EasyR1": [], "verl": [], "TRL": [], "EasyR1 forks": []}
    for project, name in same_names():
        if moved(name) == key:
            names[project].append(name)
    for projects, table in TABLES.items():
        for name, answer in table.items():
            target, _, remark = answer.partition("; ")
            if target == key:
                for project in projects.split(" and "):
                    names[project].append(f"{name} ({remark})" if remark else name)
    return {project: found for project, found in names.items() if found}


def without_effect(key: str) -> bool:
    """Whether a key of theirs, or the section it is in, only says how their program runs."""
    return any(key == name or key.startswith(f"{name}.") for name in _WITHOUT_EFFECT)


def counterpart(project: str, key: str) -> str | None:
    """What the table says of a key of one project; our own key where only the section differs."""
    for owner, table in TABLES.items():
        if project in owner.split(" and ") and key in table:
            return table[key]
    is_theirs = project != "TRL" and key.partition(".")[0] not in ("dataset", "training", "optimization")
    return moved(key) if is_theirs and moved(key) in known_leaves() else None


def same_names() -> Iterator[tuple[str, str]]:
    """Project and name of each key of `SAME`, as it is written there."""
    for project, sections in SAME.items():
        for section, keys in sections.items():
            yield from ((project, f"{section}.{name}") for name in keys.split())


def translation(key: str) -> str | None:
    """What to do about a key of another project; None for a key that is none of theirs."""
    for project, table in TABLES.items():
        if key in table:
            return _answer(project, table[key])
    if without_effect(key):
        return "a key of another project that says how its program runs: leave it out"
    if moved(key) in known_leaves():
        return _answer("EasyR1 and verl", moved(key))
    for project, table in TABLES.items():
        for theirs, answer in table.items():
            if moved(theirs) == key:  # their key, already put into our section
                return _answer(project, answer)
    # TRL's keys have no section, so people put them into one that looks right. Where our own key only sits in another
    # section (`dataset.temperature`), the nearest key says it better.
    name = key.rsplit(".", 1)[-1]
    ours = any(known.endswith(f".{name}") for known in known_leaves())
    return _answer("TRL", _TRL[name]) if name in _TRL and not ours else None


def _answer(project: str, answer: str) -> str:
    if answer.startswith("none: "):
        return f"a key of {project} without a counterpart: {answer.removeprefix('none: ')}"
    return f"a key of {project}; here it is {answer}"


def moved(key: str) -> str:
    """The key with a section of theirs replaced by ours."""
    for theirs, ours in MOVED.items():
        if key.startswith(theirs + "."):
            return ours + key.removeprefix(theirs)
    return key
