"""Finds values that contradict each other, and values that are probably mistakes. No check changes the `Config`.

Only combinations that can never work are errors here. Unsupported ones (config/unsupported.py), and those that depend
on the hardware, are reported when the run starts. A check is skipped if its feature is switched off.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import reduce
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from mtrl.config.tree import GROUP_ESTIMATORS, Config
from mtrl.rewards.builtin_names import REWARDS, is_builtin_name

# AdamW moves a weight by about lr, and an update below 1/512 of a bf16 weight (8 bits) is lost. Of weights of a usual
# size (0.02), three steps change 2% at 1e-6, 15% at 1e-5, 82% at 1e-4.
SMALL_LR_IN_BF16 = 1e-4
SMALL_LR_OF_ADAPTERS = 5e-6
LARGE_LR = 0.01

# Far above any real run: these limits catch typing mistakes and values that mean "no limit".
MAX_VALUES = {
    "dataset.min_pixels": 10**9,
    "dataset.max_prompt_length": 10**7,
    "dataset.max_response_length": 10**7,
    "dataset.rollout_batch_size": 10**6,
    "dataset.val_batch_size": 10**6,
    "training.total_epochs": 10**6,
    "training.max_steps": 10**9,
    "training.nnodes": 10**5,
    "training.n_gpus_per_node": 10**3,
    "optimization.max_refills": 10**4,
    "optimization.blur_radius": 10**4,
    "optimization.token_weight_smooth_sigma": 10**6,
    "optimization.replay_buffer_size": 10**6,
    "worker.actor.model.lora_rank": 10**5,
    "worker.actor.ppo_epochs": 10**3,
    "worker.critic.warmup_steps": 10**9,
    "worker.rollout.n": 10**5,
    "worker.rollout.noise_mid_step": 10**9,
    "worker.rollout.val.n": 10**5,
    "worker.reward.num_cpus": 10**4,
}
MAX_RESPONSES_PER_STEP = 10**7

ATTENTION_REWARDS = tuple(name for name, reward in REWARDS.items() if reward.attention)


class Conflict(NamedTuple):
    """Keys whose values contradict each other (or one key with an impossible value), and what to do."""

    keys: tuple[str, ...]
    why: str


def find_conflicts(config: Config) -> Iterator[Conflict]:
    checks = [
        _check_run_names, _check_sizes, _check_batches_and_lengths, _check_groups, _check_filtering, _check_divergence,
        _check_credit, _check_precision, _check_environment, _check_engine, _check_tensor_parallel, _check_adapters,
        _check_reward_functions, _check_reward_weights,
    ]  # fmt: skip
    for check in checks:
        yield from check(config)


def find_warnings(config: Config) -> Iterator[str]:
    """Settings that work, but probably not as intended."""
    optimization, val = config.optimization, config.worker.rollout.val
    if val.n > 1 and val.temperature == 0:
        yield (
            f"worker.rollout.val.n = {val.n} with worker.rollout.val.temperature = 0: all greedy responses are the "
            "same, so avg@k and pass@k equal the greedy score; set a temperature above 0, or n to 1"
        )
    if optimization.use_divergence_loss and optimization.divergence_penalty == "kl":
        yield (
            "optimization.use_divergence_loss with optimization.divergence_penalty = kl: its gradient has zero mean, "
            "so it does not pull towards the reference; use low_var_kl"
        )
    if config.worker.actor.model.peft_type is not None:
        yield from _warn_about_adapters(config)
    if config.worker.actor.fsdp.cpu_offload and config.worker.actor.offload.offload_params:
        yield (
            "worker.actor.offload.offload_params with worker.actor.fsdp.cpu_offload, which keeps the weights in CPU "
            "memory all the time: offload_params changes nothing"
        )
    rates = {"worker.actor.optim.lr": config.worker.actor.optim.lr}
    if config.estimator_name == "gae":
        rates["worker.critic.optim.lr"] = config.worker.critic.optim.lr
        yield from _warn_about_critic(config)
    for key, lr in rates.items():
        is_lossy = config.worker.actor.fsdp.param_dtype == "bf16" and config.worker.actor.fsdp.param_rounding == "none"
        yield from _warn_about_lr(key, lr, is_lossy)


def _warn_about_adapters(config: Config) -> Iterator[str]:
    dropout, lr = config.worker.actor.model.lora_dropout, config.worker.actor.optim.lr
    if dropout > 0:
        yield (
            f"worker.actor.model.lora_dropout = {dropout:g}: the updated policy differs from the sampling one, so "
            "the ratio is no longer 1 and results depend on the micro-batches; 0 is exact"
        )
    if config.worker.ref.offload_params:
        yield (
            "worker.ref.offload_params with adapters: the reference is the base model of the policy, so there is "
            "nothing to offload; set it to false"
        )
    if 0 < lr < SMALL_LR_OF_ADAPTERS:
        yield (
            f"worker.actor.optim.lr = {lr:g} with adapters: they start at zero and move by about lr per step, so they "
            "need about ten times the learning rate of full training; 1e-5 to 1e-4 is usual"
        )


def _warn_about_lr(key: str, lr: float, is_lossy: bool) -> Iterator[str]:
    if lr > LARGE_LR:
        yield (
            f"{key} = {lr:g}: a step moves every weight by about that much, which is more than most weights, so the "
            "model is lost within a few steps; 1e-6 to 1e-4 is usual"
        )
    if is_lossy and 0 < lr < SMALL_LR_IN_BF16:
        yield (
            f"worker.actor.fsdp.param_dtype = bf16 with {key} = {lr:g}: a bf16 weight has 8 bits, so an update below "
            f"about 1/512 of the weight is lost, and updates are about as large as lr: weights over {512 * lr:.1g} "
            "hardly learn; set worker.actor.fsdp.param_rounding to kahan or stochastic, or param_dtype to fp32"
        )


def _warn_about_critic(config: Config) -> Iterator[str]:
    warmup, steps = config.worker.critic.warmup_steps, config.training.max_steps
    if steps is not None and warmup >= steps:
        yield (
            f"worker.critic.warmup_steps = {warmup} with training.max_steps = {steps}: only the critic "
            "is trained until the run ends; lower the warm-up, or train longer"
        )
    if config.worker.critic.optim.lr == 0:
        yield (
            "worker.critic.optim.lr = 0: the critic is not trained, and without worker.critic.model.model_path it "
            "predicts 0 everywhere; set a rate, or use reinforce_plus_plus, which needs no critic"
        )


def _check_run_names(config: Config) -> Iterator[Conflict]:
    for name in ("project_name", "experiment_name"):
        value = getattr(config.training, name)
        parts = PurePosixPath(value).parts
        if not value.strip() or not parts or parts[0] == "/" or ".." in parts or re.search(r"[\x00-\x1f\x7f]", value):
            why = "it names a folder inside training.output_dir: not empty or absolute, no .. or control characters"
            yield Conflict((f"training.{name}",), why)


def _check_sizes(config: Config) -> Iterator[Conflict]:
    for key, largest in MAX_VALUES.items():
        value: Any = reduce(getattr, key.split("."), config)
        if value is not None and value > largest:
            yield Conflict((key,), f"this is too large for any run; the maximum is {largest:,}")
    responses = config.dataset.rollout_batch_size * config.rollouts_per_prompt
    if responses > MAX_RESPONSES_PER_STEP:
        yield Conflict(
            ("dataset.rollout_batch_size", "worker.rollout.n"),
            f"{responses:,} responses per step are too many; the maximum is {MAX_RESPONSES_PER_STEP:,}",
        )


def _check_precision(config: Config) -> Iterator[Conflict]:
    fsdp = config.worker.actor.fsdp
    if fsdp.param_rounding != "none" and fsdp.param_dtype != "bf16":
        why = "float32 weights need no rounding; set worker.actor.fsdp.param_dtype to bf16, or param_rounding to none"
        yield Conflict(("worker.actor.fsdp.param_rounding", "worker.actor.fsdp.param_dtype"), why)
    if fsdp.param_dtype == "bf16" and fsdp.mixed_precision_dtype != "bf16":
        why = "bf16 weights are multiplied in bf16; set worker.actor.fsdp.mixed_precision_dtype to bf16"
        yield Conflict(("worker.actor.fsdp.param_dtype", "worker.actor.fsdp.mixed_precision_dtype"), why)
    for name, optim in {"actor": config.worker.actor.optim, "critic": config.worker.critic.optim}.items():
        if fsdp.param_rounding != "none" and optim.name == "adamw_8bit":
            why = "8-bit AdamW always rounds weights to nearest; use adamw, or set param_rounding to none"
            yield Conflict(("worker.actor.fsdp.param_rounding", f"worker.{name}.optim.name"), why)


def _check_batches_and_lengths(config: Config) -> Iterator[Conflict]:
    dataset, training, actor = config.dataset, config.training, config.worker.actor
    prompts = dataset.rollout_batch_size
    if prompts % actor.global_batch_size:
        yield Conflict(
            ("dataset.rollout_batch_size", "worker.actor.global_batch_size"),
            "both count prompts, and a step consists of whole optimizer steps; set worker.actor.global_batch_size to "
            f"{prompts} (one optimizer step per step) or a divisor of it",
        )
    if dataset.min_pixels > dataset.max_pixels:
        yield Conflict(("dataset.min_pixels", "dataset.max_pixels"), "min_pixels must not exceed max_pixels")
    if config.max_new_tokens > dataset.max_response_length:
        yield Conflict(
            ("worker.rollout.max_new_tokens", "dataset.max_response_length"),
            "the engine would sample more tokens than a response may have; set max_new_tokens to null",
        )
    if training.val_only and dataset.train_files and not dataset.val_files:
        yield Conflict(("training.val_only", "dataset.val_files"), "there is no validation data; set val_files")
    gpus = training.nnodes * training.n_gpus_per_node
    if gpus % actor.ulysses_size:
        yield Conflict(
            ("worker.actor.ulysses_size", "training.nnodes", "training.n_gpus_per_node"),
            f"each sequence is split over that many GPUs, which must divide the {gpus} GPUs of the run",
        )
    if actor.ulysses_size > 1 and actor.model.attn_implementation not in ("auto", "sdpa"):
        yield Conflict(
            ("worker.actor.ulysses_size", "worker.actor.model.attn_implementation"),
            "sequence parallelism needs the attention auto or sdpa; set auto, or worker.actor.ulysses_size to 1",
        )


def _check_groups(config: Config) -> Iterator[Conflict]:
    estimator, n = config.estimator_name, config.rollouts_per_prompt
    if n > 1 and estimator == "remax" and config.worker.reward.normalize == "normalize_then_sum":
        yield Conflict(
            ("worker.reward.normalize", "optimization.advantage_estimator"),
            "each reward is standardised within its group, and the greedy baseline of remax is a group of one; use "
            "sum_then_normalize",
        )
    if config.worker.rollout.noisy_half and n % 2:
        yield Conflict(
            ("worker.rollout.noisy_half", "worker.rollout.n", "optimization.advantage_estimator"),
            f"noisy_half needs an even number of responses to a prompt, not {n}; set worker.rollout.n to an even "
            "number, or noisy_half to false",
        )
    if n > 1:
        return
    group_of_one = ("worker.rollout.n", "optimization.advantage_estimator")
    if estimator in GROUP_ESTIMATORS:
        yield Conflict(
            group_of_one,
            f"{estimator} compares the responses to one prompt and needs at least 2; set worker.rollout.n to 8 or null",
        )
    if config.optimization.replay_buffer_size > 0:
        yield Conflict(
            ("optimization.replay_buffer_size", *group_of_one),
            "replay stores groups whose rewards differ, which needs several responses per prompt; set worker.rollout.n "
            "to 2 or more, or the buffer to 0",
        )
    if config.worker.reward.normalize == "normalize_then_sum":
        yield Conflict(
            ("worker.reward.normalize", *group_of_one),
            "each reward is standardised within its group, and in a group of one every reward becomes 0; set "
            "worker.rollout.n to 2 or more, or use sum_then_normalize",
        )


def _check_filtering(config: Config) -> Iterator[Conflict]:
    optimization = config.optimization
    if not optimization.online_filtering:
        return
    if optimization.filter_by == "mean" and optimization.filter_low >= optimization.filter_high:
        yield Conflict(
            ("optimization.filter_low", "optimization.filter_high"),
            "no group lies between them; filter_low must be below filter_high",
        )
    if optimization.filter_by == "spread" and config.rollouts_per_prompt == 1:
        yield Conflict(
            ("optimization.filter_by", "worker.rollout.n"),
            "a single response has no spread, so every group would be dropped; set worker.rollout.n to 2 or more, or "
            "filter by mean",
        )
    functions = config.reward_functions
    parts = ["overall", *functions, *(["model"] if config.worker.reward.reward_type == "model" else [])]
    if optimization.filter_key not in parts and all(name in REWARDS for name in functions):
        close = get_close_matches(optimization.filter_key, parts, n=1)
        yield Conflict(
            ("optimization.filter_key", "worker.reward.functions"),
            f"there is no such reward{f' (did you mean {close[0]}?)' if close else ''}; use one of {', '.join(parts)}",
        )


def _check_divergence(config: Config) -> Iterator[Conflict]:
    optimization = config.optimization
    if not optimization.disable_divergence:
        return
    if optimization.use_divergence_loss:
        yield Conflict(
            ("optimization.disable_divergence", "optimization.use_divergence_loss"),
            "use_divergence_loss needs the reference model that disable_divergence removes; set one of them to false",
        )
    if optimization.divergence_type == "adaptive":
        yield Conflict(
            ("optimization.disable_divergence", "optimization.divergence_type"),
            "an adaptive coefficient needs the divergence; use fixed, or set disable_divergence to false",
        )


def _check_credit(config: Config) -> Iterator[Conflict]:
    optimization, training = config.optimization, config.training
    if training.record_attention_maps and training.record_rollouts_per_step == 0:
        yield Conflict(
            ("training.record_attention_maps", "training.record_rollouts_per_step"),
            "only recorded responses have attention maps, and none are recorded; set record_rollouts_per_step to 64",
        )
    low, high = optimization.token_weight_clip
    if low > high:
        yield Conflict(("optimization.token_weight_clip",), "the smaller weight must come first")
    smallest, largest = optimization.trajectory_scaling_min, optimization.trajectory_scaling_max
    if optimization.enable_trajectory_reweighting and largest is not None and largest < smallest:
        yield Conflict(
            ("optimization.trajectory_scaling_min", "optimization.trajectory_scaling_max"),
            "the minimum must not exceed the maximum",
        )
    if optimization.compute_attention_metrics is not False:
        return
    needs_attention = [name for name in config.reward_functions if name in ATTENTION_REWARDS]
    if needs_attention:
        yield Conflict(
            ("optimization.compute_attention_metrics", "worker.reward.functions"),
            f"{', '.join(needs_attention)} needs attention; set compute_attention_metrics to auto",
        )
    # A user's reward function may return the token weights itself.
    if optimization.enable_token_weights and all(name in REWARDS for name in config.reward_functions):
        yield Conflict(
            ("optimization.compute_attention_metrics", "optimization.enable_token_weights"),
            "token weights are computed from attention; set compute_attention_metrics to auto",
        )


def _check_tensor_parallel(config: Config) -> Iterator[Conflict]:
    rollout, training = config.worker.rollout, config.training
    if rollout.tensor_parallel_size == 1 or config.engine_name != "vllm":
        return
    if rollout.mode == "server":
        yield Conflict(
            ("worker.rollout.mode", "worker.rollout.tensor_parallel_size"),
            "a server has its own --tensor-parallel-size; set this to 1",
        )
        return
    gpus, keys = rollout.n_gpus, ["worker.rollout.n_gpus"]
    if gpus is None:
        gpus, keys = training.nnodes * training.n_gpus_per_node, ["training.nnodes", "training.n_gpus_per_node"]
    if gpus % rollout.tensor_parallel_size:
        yield Conflict(
            ("worker.rollout.tensor_parallel_size", *keys),
            f"each engine uses that many GPUs, which must divide the {gpus} GPUs of the engines",
        )


def _check_environment(config: Config) -> Iterator[Conflict]:
    rollout, optimization = config.worker.rollout, config.optimization
    if rollout.environment is None:
        return
    not_with = {
        ("worker.hybrid_engine", "set it to true"): not config.worker.hybrid_engine,
        ("worker.rollout.off_policy_steps", "set it to 0"): rollout.off_policy_steps > 0,
        ("worker.rollout.noisy_half", "set it to false"): rollout.noisy_half,
        ("optimization.replay_buffer_size", "what tools showed is not stored; set it to 0"): (
            optimization.replay_buffer_size > 0
        ),
        ("worker.actor.ulysses_size", "set it to 1"): config.worker.actor.ulysses_size > 1,
    }
    for (key, advice), is_on in not_with.items():
        if is_on:
            yield Conflict(("worker.rollout.environment", key), f"not supported with an environment; {advice}")


def _check_engine(config: Config) -> Iterator[Conflict]:
    rollout = config.worker.rollout
    if config.engine_name != "vllm" and rollout.mode != "inprocess":
        yield Conflict(
            ("worker.rollout.name", "worker.rollout.mode"),
            "only vLLM runs outside of the trainer; use inprocess, or the engine vllm",
        )
    elif rollout.mode == "server" and rollout.address is None:
        yield Conflict(("worker.rollout.mode", "worker.rollout.address"), "set the address of the server")
    elif rollout.mode == "server" and not config.worker.hybrid_engine:
        yield Conflict(
            ("worker.rollout.mode", "worker.hybrid_engine"),
            "a server has its own GPUs, for which the run starts no processes; set hybrid_engine to true and n_gpus to "
            "null",
        )
    if config.engine_name != "vllm" and rollout.tensor_parallel_size > 1:
        yield Conflict(
            ("worker.rollout.name", "worker.rollout.tensor_parallel_size"),
            "only vLLM splits a model over GPUs; set 1, or use the engine vllm",
        )
    if config.worker.hybrid_engine != (rollout.n_gpus is None):
        yield Conflict(
            ("worker.hybrid_engine", "worker.rollout.n_gpus"),
            "dedicated engines need hybrid_engine: false and the number of their GPUs; set both, or neither",
        )
    if rollout.off_policy_steps and config.optimization.tis_clip is None:
        yield Conflict(
            ("worker.rollout.off_policy_steps", "optimization.tis_clip"),
            "off-policy responses are corrected by importance weights that tis_clip caps; set it to 2, or "
            "off_policy_steps to 0",
        )


def _check_adapters(config: Config) -> Iterator[Conflict]:
    model = config.worker.actor.model
    if model.peft_type is not None and config.worker.ref.sync_every is not None:
        yield Conflict(
            ("worker.ref.sync_every", "worker.actor.model.peft_type"),
            "with adapters the reference is the base model, which never changes; set sync_every to null",
        )
    if model.peft_type is not None and model.freeze_vision_tower and model.lora_vision_tower:
        yield Conflict(
            ("worker.actor.model.freeze_vision_tower", "worker.actor.model.lora_vision_tower"),
            "the first freezes the vision tower, the second trains adapters in it; set one of them to false",
        )


def _check_reward_functions(config: Config) -> Iterator[Conflict]:
    reward = config.worker.reward
    if reward.reward_type == "model" and reward.model_path is None:
        yield Conflict(("worker.reward.reward_type", "worker.reward.model_path"), "set the path of the reward model")
    if reward.functions is None:
        return
    if not reward.functions and reward.reward_type == "function":
        yield Conflict(
            ("worker.reward.functions",),
            "there would be no reward; name a function, or set null for [accuracy, format]",
        )
    for name in reward.functions:
        if is_builtin_name(name) and name not in REWARDS:
            close = get_close_matches(name, REWARDS, n=1)
            yield Conflict(
                ("worker.reward.functions",),
                f"{name} is not a built-in reward{f' (did you mean {close[0]}?)' if close else ''}: there are "
                f"{', '.join(REWARDS)}; write your own as file.py:name or package.module:name",
            )
    if reward.reward_fn_path is not None:
        yield Conflict(
            ("worker.reward.functions", "worker.reward.reward_fn_path"),
            "functions lists all reward functions, so reward_fn_path would never be called; add it to the list and set "
            "reward_fn_path to null",
        )


def _check_reward_weights(config: Config) -> Iterator[Conflict]:
    reward = config.worker.reward
    schedule = reward.weight_schedule
    for name in ("weights", "early_weights"):
        weights = getattr(reward, name)
        if weights is None:
            continue
        yield from _check_weight_count(config, f"worker.reward.{name}", weights)
        if schedule is not None:
            yield Conflict(
                ("worker.reward.weight_schedule", f"worker.reward.{name}"),
                "the schedule contains the weights of the whole run; set the other to null",
            )
    if schedule is None:
        return
    for _, weights in schedule:
        yield from _check_weight_count(config, "worker.reward.weight_schedule", weights)
    starts = [start for start, _ in schedule]
    if not starts or starts[0] != 0 or starts[-1] > 1 or any(a >= b for a, b in pairwise(starts)):
        yield Conflict(
            ("worker.reward.weight_schedule",),
            "the first fraction must be 0, each later one larger, none above 1: [[0.0, [...]], [0.3, [...]]]",
        )


def _check_weight_count(config: Config, key: str, weights: tuple[float, ...]) -> Iterator[Conflict]:
    functions = config.reward_functions
    model = ("the reward model",) if config.worker.reward.reward_type == "model" else ()
    parts = (*functions, *model)
    if parts and len(weights) != len(parts):
        yield Conflict(
            (key, "worker.reward.functions", *(["worker.reward.reward_type"] if model else [])),
            f"{len(weights)} weights {list(weights)} for {len(parts)} rewards ({', '.join(parts)}); give one for each",
        )
