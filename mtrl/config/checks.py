"""Which values cannot stand together, and why. Pure functions of a `Config`; none of them changes it.

Only what can never work is refused here. What is merely not built yet, or what the hardware decides, is refused when
the run starts. A check is skipped where the feature it concerns is switched off.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import reduce
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from mtrl.config.tree import GROUP_ESTIMATORS, Config
from mtrl.rewards.builtin_names import REWARDS, is_bare

# AdamW moves a weight by about lr, and a bf16 weight (8 bits) moves only by 1/512 of itself or more. Of weights of a
# usual size (0.02), three steps change 2% at 1e-6, 15% at 1e-5, 82% at 1e-4.
SMALL_LR_IN_BF16 = 1e-4
# Adam moves every weight by about lr, and weights of a usual size are around 0.02.
SMALL_LR_OF_ADAPTERS = 5e-6
LARGE_LR = 0.01

# More of any of these has no end, or no place on any machine. Far above what anybody needs: it is for slips of a finger
# and for words like "no limit".
LARGEST = {
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
    "worker.rollout.val.n": 10**5,
    "worker.reward.num_cpus": 10**4,
}
MOST_RESPONSES = 10**7  # of one step

ATTENTION_REWARDS = tuple(name for name, reward in REWARDS.items() if reward.attention)


class Conflict(NamedTuple):
    """Keys whose values cannot stand together (or one key whose value contradicts itself), and what to do."""

    keys: tuple[str, ...]
    why: str


def conflicts(config: Config) -> Iterator[Conflict]:
    yield from _folders(config)
    yield from _sizes(config)
    yield from _batches_and_lengths(config)
    yield from _groups(config)
    yield from _filtering(config)
    yield from _divergence(config)
    yield from _credit(config)
    yield from _precision(config)
    yield from _engine(config)
    yield from _reward_functions(config)
    yield from _reward_weights(config)


def warnings(config: Config) -> Iterator[str]:
    """Settings that work, but hardly do what their author hopes for."""
    optimization, val = config.optimization, config.worker.rollout.val
    if val.n > 1 and val.temperature == 0:
        yield (
            f"worker.rollout.val.n = {val.n} with worker.rollout.val.temperature = 0: greedy responses are all the "
            "same, so avg@k and pass@k only repeat the greedy score; set a temperature above 0, or n to 1"
        )
    if optimization.use_divergence_loss and optimization.divergence_penalty == "kl":
        yield (
            "optimization.use_divergence_loss with optimization.divergence_penalty = kl: its gradient has zero mean, "
            "so it does not pull towards the reference; low_var_kl does"
        )
    if config.worker.actor.model.peft_type is not None:
        yield from _warnings_of_adapters(config)
    rates = {"worker.actor.optim.lr": config.worker.actor.optim.lr}
    if optimization.advantage_estimator == "gae":
        rates["worker.critic.optim.lr"] = config.worker.critic.optim.lr
        yield from _warnings_of_critic(config)
    for key, lr in rates.items():
        lossy = config.worker.actor.fsdp.param_dtype == "bf16" and config.worker.actor.fsdp.param_rounding == "none"
        yield from _warnings_of_rate(key, lr, lossy)


def _warnings_of_adapters(config: Config) -> Iterator[str]:
    dropout, lr = config.worker.actor.model.lora_dropout, config.worker.actor.optim.lr
    if dropout > 0:
        yield (
            f"worker.actor.model.lora_dropout = {dropout:g}: updates see another policy than the one that sampled, so "
            "its ratio to itself is no longer 1, and results vary with how a batch is cut into passes; 0 is exact"
        )
    if config.worker.ref.offload_params:
        yield (
            "worker.ref.offload_params with adapters: the reference is the model under them, which has no weights of "
            "its own, so there is nothing to move; set it to false"
        )
    if 0 < lr < SMALL_LR_OF_ADAPTERS:
        yield (
            f"worker.actor.optim.lr = {lr:g} with adapters: they begin at zero and move by about lr a step, so they "
            "take some ten times the rate of all weights; usual are 1e-5 to 1e-4"
        )


def _warnings_of_rate(key: str, lr: float, lossy: bool) -> Iterator[str]:
    if lr > LARGE_LR:
        yield (
            f"{key} = {lr:g}: a step moves every weight by about that much, more than most weights are large: the "
            "model is lost within a few steps; usual are 1e-6 to 1e-4"
        )
    if lossy and 0 < lr < SMALL_LR_IN_BF16:
        yield (
            f"worker.actor.fsdp.param_dtype = bf16 with {key} = {lr:g}: a bf16 weight has 8 bits, so an update below "
            "about 1/512 of the weight is lost, and updates are about as large as lr: "
            f"weights over {512 * lr:.1g} hardly learn; set worker.actor.fsdp.param_rounding to kahan or "
            "stochastic, or keep the master weights in fp32"
        )


def _warnings_of_critic(config: Config) -> Iterator[str]:
    warmup, steps = config.worker.critic.warmup_steps, config.training.max_steps
    if steps is not None and warmup >= steps:
        yield (
            f"worker.critic.warmup_steps = {warmup} with training.max_steps = {steps}: the actor learns nothing, since "
            "the critic learns alone to the end of the run; lower the warm-up, or train longer"
        )
    if config.worker.critic.optim.lr == 0:
        yield (
            "worker.critic.optim.lr = 0: the critic stays as it is, and without worker.critic.model.model_path it says "
            "0 of everything: set a rate, or use reinforce_plus_plus, which needs no critic"
        )


def _folders(config: Config) -> Iterator[Conflict]:
    for name in ("project_name", "experiment_name"):
        value = getattr(config.training, name)
        parts = PurePosixPath(value).parts
        if not value.strip() or not parts or parts[0] == "/" or ".." in parts or re.search(r"[\x00-\x1f\x7f]", value):
            told = "it names a folder inside training.output_dir: not empty or absolute, no .. or control characters"
            yield Conflict((f"training.{name}",), told)


def _sizes(config: Config) -> Iterator[Conflict]:
    for key, largest in LARGEST.items():
        value: Any = reduce(getattr, key.split("."), config)
        if value is not None and value > largest:
            yield Conflict((key,), f"no run of that size ends, or fits anywhere; at most {largest:,} is taken")
    responses = config.dataset.rollout_batch_size * config.rollouts_per_prompt
    if responses > MOST_RESPONSES:
        yield Conflict(
            ("dataset.rollout_batch_size", "worker.rollout.n"),
            f"{responses:,} responses in a step: none of that size ends; at most {MOST_RESPONSES:,} are taken",
        )


def _precision(config: Config) -> Iterator[Conflict]:
    fsdp = config.worker.actor.fsdp
    if fsdp.param_rounding != "none" and fsdp.param_dtype != "bf16":
        told = "float32 weights lose nothing; set worker.actor.fsdp.param_dtype to bf16, or param_rounding to none"
        yield Conflict(("worker.actor.fsdp.param_rounding", "worker.actor.fsdp.param_dtype"), told)
    if fsdp.param_dtype == "bf16" and fsdp.mixed_precision_dtype != "bf16":
        told = "weights in bf16 are multiplied in bf16; set worker.actor.fsdp.mixed_precision_dtype to bf16"
        yield Conflict(("worker.actor.fsdp.param_dtype", "worker.actor.fsdp.mixed_precision_dtype"), told)
    learners = {"actor": config.worker.actor.optim, "critic": config.worker.critic.optim}
    for name, optim in learners.items():
        if fsdp.param_rounding != "none" and optim.name == "adamw_8bit":
            told = "the kernels of 8-bit AdamW round weights to the nearest; use adamw, or set param_rounding to none"
            yield Conflict(("worker.actor.fsdp.param_rounding", f"worker.{name}.optim.name"), told)


def _batches_and_lengths(config: Config) -> Iterator[Conflict]:
    dataset, training, actor = config.dataset, config.training, config.worker.actor
    prompts = dataset.rollout_batch_size
    if prompts % actor.global_batch_size:
        yield Conflict(
            ("dataset.rollout_batch_size", "worker.actor.global_batch_size"),
            "both count prompts, and a step is cut into whole optimizer steps; set worker.actor.global_batch_size to "
            f"{prompts} (one optimizer step per step) or to a divisor of it",
        )
    if dataset.min_pixels > dataset.max_pixels:
        yield Conflict(("dataset.min_pixels", "dataset.max_pixels"), "the smallest size is over the largest")
    if config.max_new_tokens > dataset.max_response_length:
        yield Conflict(
            ("worker.rollout.max_new_tokens", "dataset.max_response_length"),
            "the engine would sample more tokens than a response may have; leave max_new_tokens at null",
        )
    if training.val_only and dataset.train_files and not dataset.val_files:
        yield Conflict(("training.val_only", "dataset.val_files"), "there is nothing to validate on; set val_files")
    gpus = training.nnodes * training.n_gpus_per_node
    if gpus % actor.ulysses_size:
        yield Conflict(
            ("worker.actor.ulysses_size", "training.nnodes", "training.n_gpus_per_node"),
            f"that many GPUs share one sequence, so the {gpus} GPUs of the run must divide into such groups",
        )
    if actor.ulysses_size > 1 and actor.model.attn_implementation not in ("auto", "sdpa"):
        yield Conflict(
            ("worker.actor.ulysses_size", "worker.actor.model.attn_implementation"),
            "GPUs that share one sequence exchange heads in the attention of auto and sdpa alone; set auto, or "
            "worker.actor.ulysses_size to 1",
        )


def _groups(config: Config) -> Iterator[Conflict]:
    estimator, n = config.optimization.advantage_estimator, config.rollouts_per_prompt
    if n > 1 and estimator == "remax" and config.worker.reward.normalize == "normalize_then_sum":
        yield Conflict(
            ("worker.reward.normalize", "optimization.advantage_estimator"),
            "each part is standardised within its group, and the greedy response that remax compares with is alone in "
            "its own; use sum_then_normalize",
        )
    if n > 1:
        return
    group_of_one = ("worker.rollout.n", "optimization.advantage_estimator")
    if estimator in GROUP_ESTIMATORS:
        yield Conflict(
            group_of_one,
            f"{estimator} compares the responses of one prompt and needs at least 2; set worker.rollout.n to 8, or "
            "leave it at null",
        )
    if config.optimization.replay_buffer_size > 0:
        yield Conflict(
            ("optimization.replay_buffer_size", *group_of_one),
            "replay keeps groups whose rewards differ, and one response per prompt never does; set worker.rollout.n to "
            "2 or more, or the buffer to 0",
        )
    if config.worker.reward.normalize == "normalize_then_sum":
        yield Conflict(
            ("worker.reward.normalize", *group_of_one),
            "each part is standardised within its group, and in a group of one every reward would become 0; set "
            "worker.rollout.n to 2 or more, or use sum_then_normalize",
        )


def _filtering(config: Config) -> Iterator[Conflict]:
    optimization, key = config.optimization, "optimization.filter_key"
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
            "one response per prompt has no spread, so every group would be dropped; set worker.rollout.n to 2 or "
            "more, or filter by mean",
        )
    functions = config.reward_functions
    parts = ["overall", *functions, *(["model"] if config.worker.reward.reward_type == "model" else [])]
    if optimization.filter_key not in parts and all(name in REWARDS for name in functions):  # others name parts
        close = get_close_matches(optimization.filter_key, parts, n=1)
        yield Conflict(
            (key, "worker.reward.functions"),
            f"no reward has such a part{f' (did you mean {close[0]}?)' if close else ''}; there are {', '.join(parts)}",
        )


def _divergence(config: Config) -> Iterator[Conflict]:
    optimization = config.optimization
    if not optimization.disable_divergence:
        return
    if optimization.use_divergence_loss:
        yield Conflict(
            ("optimization.disable_divergence", "optimization.use_divergence_loss"),
            "the first drops the reference model that the second needs; set one of them to false",
        )
    if optimization.divergence_type == "adaptive":
        yield Conflict(
            ("optimization.disable_divergence", "optimization.divergence_type"),
            "without a reference model there is no divergence to adapt to; use fixed, or enable the divergence",
        )


def _credit(config: Config) -> Iterator[Conflict]:
    optimization, training = config.optimization, config.training
    if training.record_attention_maps and training.record_rollouts_per_step == 0:
        yield Conflict(
            ("training.record_attention_maps", "training.record_rollouts_per_step"),
            "attention maps are those of recorded responses, and none are; set record_rollouts_per_step to 64",
        )
    low, high = optimization.token_weight_clip
    if low > high:
        yield Conflict(("optimization.token_weight_clip",), "the smallest weight comes first")
    smallest, largest = optimization.trajectory_scaling_min, optimization.trajectory_scaling_max
    if optimization.enable_trajectory_reweighting and largest is not None and largest < smallest:
        yield Conflict(
            ("optimization.trajectory_scaling_min", "optimization.trajectory_scaling_max"),
            "the smallest scale is over the largest",
        )
    if optimization.compute_attention_metrics is not False:
        return
    needs_attention = [name for name in config.reward_functions if name in ATTENTION_REWARDS]
    if needs_attention:
        yield Conflict(
            ("optimization.compute_attention_metrics", "worker.reward.functions"),
            f"{', '.join(needs_attention)} cannot be computed without attention; set compute_attention_metrics to auto",
        )
    # A user's reward function may bring the token weights itself.
    if optimization.enable_token_weights and all(name in REWARDS for name in config.reward_functions):
        yield Conflict(
            ("optimization.compute_attention_metrics", "optimization.enable_token_weights"),
            "token weights come from attention; set compute_attention_metrics to auto",
        )


def _parts_of_an_engine(config: Config) -> Iterator[Conflict]:
    rollout, training = config.worker.rollout, config.training
    if rollout.tensor_parallel_size == 1 or rollout.name == "local":
        return
    if rollout.mode == "server":
        yield Conflict(
            ("worker.rollout.mode", "worker.rollout.tensor_parallel_size"),
            "a server is split over GPUs by its own --tensor-parallel-size; set this to 1",
        )
        return
    gpus, keys = rollout.n_gpus, ["worker.rollout.n_gpus"]
    if gpus is None:
        gpus, keys = training.nnodes * training.n_gpus_per_node, ["training.nnodes", "training.n_gpus_per_node"]
    if gpus % rollout.tensor_parallel_size:
        yield Conflict(
            ("worker.rollout.tensor_parallel_size", *keys),
            f"that many GPUs are one engine, so the {gpus} GPUs of the engines must divide into such groups",
        )


def _engine(config: Config) -> Iterator[Conflict]:
    rollout, model = config.worker.rollout, config.worker.actor.model
    if rollout.name == "local" and rollout.mode != "inprocess":
        yield Conflict(
            ("worker.rollout.name", "worker.rollout.mode"),
            "the local engine samples inside the trainer; use inprocess, or the engine vllm",
        )
    if rollout.name == "local" and rollout.tensor_parallel_size > 1:
        yield Conflict(
            ("worker.rollout.name", "worker.rollout.tensor_parallel_size"),
            "the local engine does not split a model over GPUs; set 1, or use the engine vllm",
        )
    if rollout.mode == "server" and rollout.address is None:
        yield Conflict(("worker.rollout.mode", "worker.rollout.address"), "set the address of the server")
    if config.worker.hybrid_engine != (rollout.n_gpus is None):
        yield Conflict(
            ("worker.hybrid_engine", "worker.rollout.n_gpus"),
            "engines that do not share the devices of the training have so many of their own; set both, or neither",
        )
    if rollout.off_policy_steps and config.optimization.tis_clip is None:
        yield Conflict(
            ("worker.rollout.off_policy_steps", "optimization.tis_clip"),
            "responses of older weights are corrected by a ratio that tis_clip caps; set a cap, such as 2, or lag to 0",
        )
    yield from _parts_of_an_engine(config)
    if model.peft_type is not None and config.worker.ref.sync_every is not None:
        yield Conflict(
            ("worker.ref.sync_every", "worker.actor.model.peft_type"),
            "with adapters the reference is the model under them, which never changes; set refresh_every to null",
        )
    if model.peft_type is not None and model.freeze_vision_tower and model.lora_vision_tower:
        yield Conflict(
            ("worker.actor.model.freeze_vision_tower", "worker.actor.model.lora_vision_tower"),
            "one keeps the vision tower as it is, the other trains adapters in it; set one of them to false",
        )


def _reward_functions(config: Config) -> Iterator[Conflict]:
    reward = config.worker.reward
    if reward.reward_type == "model" and reward.model_path is None:
        yield Conflict(("worker.reward.reward_type", "worker.reward.model_path"), "set the path of the reward model")
    if reward.functions is None:
        return
    if not reward.functions and reward.reward_type == "function":
        yield Conflict(("worker.reward.functions",), "nothing would be rewarded; null means [accuracy, format]")
    for name in reward.functions:
        if is_bare(name) and name not in REWARDS:
            close = get_close_matches(name, REWARDS, n=1)
            yield Conflict(
                ("worker.reward.functions",),
                f"{name} is not built in{f' (did you mean {close[0]}?)' if close else ''}: there are "
                f"{', '.join(REWARDS)}; your own are written file.py:name or package.module:name",
            )
    if reward.reward_fn_path is not None:
        yield Conflict(
            ("worker.reward.functions", "worker.reward.reward_fn_path"),
            "functions lists everything that scores, so reward_fn_path would never be called; add it to the list and "
            "set reward_fn_path to null",
        )


def _reward_weights(config: Config) -> Iterator[Conflict]:
    reward = config.worker.reward
    schedule = reward.weight_schedule
    for name in ("weights", "early_weights"):
        given = getattr(reward, name)
        if given is None:
            continue
        yield from _length_conflict(config, f"worker.reward.{name}", given)
        if schedule is not None:
            yield Conflict(
                ("worker.reward.weight_schedule", f"worker.reward.{name}"),
                "the schedule gives the weights of the whole run; set the other to null",
            )
    if schedule is None:
        return
    for _, weights in schedule:
        yield from _length_conflict(config, "worker.reward.weight_schedule", weights)
    starts = [start for start, _ in schedule]
    if not starts or starts[0] != 0 or starts[-1] > 1 or any(a >= b for a, b in pairwise(starts)):
        yield Conflict(
            ("worker.reward.weight_schedule",),
            "the first share must be 0, each later one larger, none over 1: [[0.0, [...]], [0.3, [...]]]",
        )


def _length_conflict(config: Config, key: str, weights: tuple[float, ...]) -> Iterator[Conflict]:
    functions = config.reward_functions
    model = ("the reward model",) if config.worker.reward.reward_type == "model" else ()
    parts = (*functions, *model)
    if parts and len(weights) != len(parts):
        yield Conflict(
            (key, "worker.reward.functions", *(["worker.reward.reward_type"] if model else [])),
            f"{len(weights)} weights {list(weights)} for {len(parts)} {'parts' if model else 'functions'} "
            f"({', '.join(parts)}); give one weight for each",
        )
