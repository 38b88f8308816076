"""Keys of EasyR1, verl and TRL that only control how their program runs."""

# Keys that only control how the other program runs, not what is trained; those of TRL have no section.
_ENTROPY = (
    "entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking pad_to_length rollout_n"
)
_FSDP = (
    f"{_ENTROPY} forward_only forward_prefetch fsdp_size full_determinism offload_policy pad_to_length_bucket "
    "reshard_after_forward seed strategy turbo_config use_no_sync_for_gradient_accumulation use_orig_params "
    "use_torch_compile wrap_policy"
)
_MODEL = (
    "enable_activation_offload external_lib fused_kernel_options hf_config_path use_fused_kernels use_liger use_shm"
)
_PROGRAM = {
    "actor_rollout_ref": "nccl_timeout",
    "actor_rollout_ref.actor": (
        f"{_ENTROPY} calculate_entropy calculate_sum_pi_squared checkpoint data_loader_seed "
        "ppo_infer_micro_batch_size_per_gpu profiler strategy use_fused_kernels use_prefix_grouper use_remove_padding"
    ),
    "actor_rollout_ref.actor.fsdp_config": _FSDP,
    "actor_rollout_ref.actor.optim": "zero_indexed_step",
    "actor_rollout_ref.model": _MODEL,
    "actor_rollout_ref.ref": (
        f"{_ENTROPY} fsdp_config log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz profiler strategy "
        "ulysses_sequence_parallel_size use_torch_compile"
    ),
    "actor_rollout_ref.rollout": (
        "agent checkpoint_engine cudagraph_capture_sizes data_parallel_size disable_log_stats do_sample "
        "expert_parallel_size free_cache_engine full_determinism layered_summon load_format "
        "log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz logprobs_mode moe_load_balance_metrics_interval "
        "multi_stage_wake_up n_gpus_per_node nnodes pipeline_model_parallel_size profiler prometheus scheduling_policy "
        "skip_tokenizer_init trace"
    ),
    "critic": (
        "checkpoint data_loader_seed forward_max_token_len_per_gpu forward_micro_batch_size "
        "forward_micro_batch_size_per_gpu fsdp ppo_max_token_len_per_gpu ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu profiler rollout_n strategy ulysses_sequence_parallel_size use_dynamic_bsz"
    ),
    "critic.model": f"{_MODEL} enable_gradient_checkpointing trust_remote_code use_remove_padding",
    "critic.optim": "zero_indexed_step",
    "data": (
        "dataloader_num_workers image_patch_size return_full_prompt return_multi_modal_inputs return_raw_chat "
        "return_raw_input_ids trust_remote_code use_shm validation_shuffle"
    ),
    "reward": "num_workers reward_manager.module reward_manager.source sandbox_fusion",
    "reward_model": "launch_reward_fn_async strategy",
    "trainer": (
        "balance_batch default_hdfs_dir del_local_ckpt_after_load device esi_redundant_time "
        "max_critic_ckpt_to_keep profile_steps ray_timeline ray_wait_register_center_timeout "
        "remove_previous_ckpt_in_save use_legacy_worker_impl use_v1 v1.colocate_async v1.sampler v1.separate_async "
        "v1.sync validation_data_dir"
    ),
    "worker.actor.fsdp": "mp_buffer_dtype mp_reduce_dtype use_orig_params",
    "worker.ref.fsdp": "mp_buffer_dtype mp_param_dtype mp_reduce_dtype torch_dtype use_orig_params",
    "worker.rollout": "disable_log_stats",
    "": (
        "average_tokens_across_devices batch_eval_metrics bf16_full_eval cache_implementation dataloader_drop_last "
        "dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers "
        "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend "
        "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug "
        "disable_tqdm do_eval do_predict do_train ds3_gather_for_generation enable_jit_checkpoint "
        "eval_accumulation_steps eval_delay eval_do_concat_batches eval_use_gather_object fp16_full_eval "
        "full_determinism global_profiler gradient_checkpointing_kwargs greater_is_better hub_always_push "
        "hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_bias_buffers ignore_data_skip "
        "include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor length_column_name "
        "liger_kernel_config local_rank log_completions_hub_repo log_level log_level_replica log_multimodal "
        "log_on_each_node log_unique_prompts logging_dir logging_first_step logging_nan_inf_filter logging_steps "
        "logging_strategy lora_task_type metric_for_best_model overwrite_output_dir pad_to_multiple_of "
        "prediction_loss_only ray_kwargs remove_unused_columns restore_callback_states_from_checkpoint "
        "save_on_each_node skip skip_memory_metrics tf32 torch_compile_backend torch_compile_mode "
        "torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id transfer_queue "
        "transformers_continuous_batching_config use_cache use_cpu use_liger_kernel use_liger_loss "
        "use_transformers_continuous_batching use_transformers_paged vllm_enable_sleep_mode vllm_group_port "
        "vllm_model_impl vllm_server_timeout"
    ),
}
_WITHOUT_EFFECT = {f"{section}.{name}".strip(".") for section, names in _PROGRAM.items() for name in names.split()}


def has_no_effect(key: str) -> bool:
    """Whether a foreign key, or its section, only controls how the other program runs."""
    return any(key == name or key.startswith(f"{name}.") for name in _WITHOUT_EFFECT)
