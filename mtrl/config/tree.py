"""The configuration tree: every key with its type, default, allowed values and meaning.

The classes only hold values. `load_config.py` fills them from YAML and overrides, `utils/value_types.py` checks a value
against its annotation and range, `checks.py` finds values that contradict each other. No field is derived from another:
if the meaning of `null` depends on other keys, a property computes it, so a saved configuration equals the written one.

Ranges are intervals in the usual notation: `[0, 1)` contains 0 but not 1; `(0, inf]` allows `.inf`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_type_hints

from mtrl.config.paths import PathKind
from mtrl.utils.plugin_registry import spec_name
from mtrl.utils.value_types import check_names, validate

GROUP_ESTIMATORS = ("grpo", "rloo")  # compare the responses to one prompt
SINGLE_RESPONSE_ESTIMATORS = ("gae", "remax", "reinforce_plus_plus")  # one response per prompt by default
DEFAULT_GROUP_SIZE = 8

LOGGERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")


def key(
    default: Any,
    meaning: str,
    within: str | None = None,
    may_change: bool = False,
    path_kind: PathKind | None = None,
    names: tuple[str, ...] = (),
) -> Any:
    """A leaf of the tree. `within` is the interval of a number, or of each number in a list. A key that `may_change`
    does not affect the numbers of a step, so a run may be resumed with another value. A key with a `path_kind` names
    files, which are looked up next to the YAML that sets it (paths.py). A key with `names` takes one of them, or a
    user's class (utils/plugin_registry.py)."""
    path_kind = "code" if names else path_kind
    metadata = {
        "meaning": meaning, "within": within, "may_change": may_change, "path_kind": path_kind, "names": names,
    }  # fmt: skip
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


run_key = partial(key, may_change=True)

RENAMED_KEYS = {  # old name -> new name; the old ones are still accepted
    "worker.rollout.lag": "worker.rollout.off_policy_steps",
    "worker.ref.refresh_every": "worker.ref.sync_every",
    "worker.actor.model.encoder": "worker.actor.model.family",
}


@dataclass(frozen=True)
class DatasetConfig:
    train_files: str = key(
        "", "file, directory, hub id[@split], or a comma-separated list; empty: embedded task", path_kind="data"
    )
    val_files: str = key("", "validation data, written like train_files", path_kind="data")
    prompt_key: str = key("prompt", "column with the question: text or chat messages")
    answer_key: str = key("answer", "column with the ground truth; may be missing")
    image_key: str = key("images", "column with an image or a list of images")
    video_key: str = key("videos", "column with a video or a list of videos")
    options_key: str = key("options", "column with the choices of a multiple-choice question")
    image_dir: str | None = key(None, "directory that relative media paths start from", path_kind="folder")
    video_fps: float = key(2.0, "frames taken per second of video", "(0, inf)")
    video_max_frames: int = key(64, "maximum number of frames taken from one video", "[1, inf)")
    video_max_pixels: int | None = key(None, "frames with more pixels are scaled down; null: 768 tokens", "[1, inf)")
    min_pixels: int = key(262144, "images with fewer pixels are scaled up to this", "[1, inf)")
    max_pixels: int = key(4194304, "images with more pixels are scaled down to this", "[1, inf)")
    max_image_side: int | None = key(None, "maximum length of the longer side, in pixels", "[1, inf)")
    big_images: Literal["resize", "filter"] = key("resize", "scale images over max_image_side down, or drop rows")
    max_prompt_length: int = key(2048, "maximum tokens per prompt, with media tokens", "[1, inf)")
    max_response_length: int = key(512, "maximum tokens per response", "[1, inf)")
    rollout_batch_size: int = key(256, "prompts per step", "[1, inf)")
    val_batch_size: int = key(64, "prompts per validation batch", "[1, inf)")
    shuffle: bool = key(True, "shuffle the prompts anew in each epoch")
    seed: int = key(42, "seed for shuffling and for image perturbations", "[0, inf)")
    filter_overlong_prompts: bool = key(True, "drop prompts longer than max_prompt_length")
    on_bad_row: Literal["scan", "error", "skip"] = run_key(
        "scan", "bad rows; scan: an error at the start, skipped later"
    )
    check_images: Literal["sample", "full"] = run_key("sample", "images decoded completely at the start")
    dataloader_num_workers: int | None = run_key(
        None, "processes that decode media in advance; null: up to 8", "[0, inf)"
    )
    on_missing: Literal["error", "warn"] = key("error", "media that no key reads, or missing answers for a reward")
    on_unread_media: Literal["error", "ignore"] = run_key("error", "image or video files in a column that no key reads")
    format_prompt: str | None = key(None, "Jinja template applied to each question", path_kind="template")
    system_prompt: str | None = key(None, "text of the system message")
    allow_special_tokens: bool = key(False, "parse special tokens in rows as tokens, not as text")
    override_chat_template: str | None = key(None, "chat template to use instead of the model's")


@dataclass(frozen=True)
class TrainingConfig:
    total_epochs: int = run_key(10, "passes over the training data", "[1, inf)")
    max_steps: int | None = run_key(None, "stop after this many steps", "[1, inf)")
    project_name: str = run_key("mtrl", "directory and logger project of the run")
    experiment_name: str = run_key("run", "directory and logger name of the run")
    output_dir: str = run_key("outputs", "the run is <output_dir>/<project_name>/<experiment_name>")
    logger: tuple[str | Mapping[str, Any], ...] = run_key(("console",), "loggers besides the files", names=LOGGERS)
    nnodes: int = run_key(1, "number of machines", "[1, inf)")
    n_gpus_per_node: int = run_key(1, "training processes per machine, one per GPU", "[1, inf)")
    max_restarts: int = run_key(3, "restarts from the last checkpoint after losing a process", "[0, inf)")
    heartbeat_s: float = run_key(60.0, "seconds without a reply until a process is lost", "[1, inf)")
    save_freq: int = run_key(500, "steps between checkpoints; -1: only at the end", "[-1, inf)")
    save_minutes: float | None = run_key(
        30.0, "also save after so many minutes, unless save_freq is -1; null: by steps alone", "(0, inf)"
    )
    save_limit: int = run_key(3, "newest checkpoints to keep, besides the best; -1: all", "[-1, inf)")
    best_metric: str | None = run_key(
        "val/reward_score", "validation metric that selects best_model, higher is better; null: none"
    )
    val_freq: int = run_key(100, "steps between validations; -1: only at the end", "[-1, inf)")
    val_before_train: bool = run_key(True, "validate before the first step")
    val_only: bool = run_key(False, "only validate, do not train")
    val_generations_to_log: int = run_key(4, "validation responses to print and log", "[0, inf)")
    find_last_checkpoint: bool = run_key(True, "resume from the run's newest checkpoint")
    fresh: bool = run_key(False, "never resume; fail if the run directory exists")
    load_checkpoint_path: str | None = run_key(None, "step directory, run directory or best_model to start from")
    realtime_rollout_logging: bool = run_key(
        True, "log the rollouts of every step; false: only of steps with validation"
    )
    record_rollouts_per_step: int = run_key(
        64, "responses per step recorded token by token for mtrl view; -1: all, 0: none", "[-1, inf)"
    )
    record_attention_maps: bool = run_key(
        False, "also record their attention maps over the image; costs one more forward pass"
    )
    record_limit_gib: float = run_key(
        1.0, "maximum size of that record; the oldest steps are deleted first", "(0, inf)"
    )
    rollout_log_path: str | None = run_key(None, "rollout Markdown log; null: in the run directory")
    attention_diag_log_path: str | None = run_key(None, "attention Markdown log; null: in the run directory")
    log_preview_chars: int = run_key(2000, "maximum characters of a preview; 0: no previews", "[0, inf)")
    colorize_output: bool = run_key(True, "use colours on a terminal")


@dataclass(frozen=True)
class OptimizationConfig:
    gamma: float = key(1.0, "discount factor of later rewards", "[0, 1]")
    lam: float = key(0.95, "lambda of GAE", "[0, 1]")
    advantage_estimator: str | Mapping[str, Any] = key(
        "grpo", "how advantages are estimated", names=("gae", "grpo", "rloo", "remax", "reinforce_plus_plus")
    )
    scale_rewards: Literal["group", "batch", "none"] = key("group", "grpo: standard deviation to divide by")
    disable_divergence: bool = key(False, "no reference model and no divergence term")
    use_divergence_loss: bool = key(False, "put the divergence into the loss, not the reward")
    divergence_penalty: Literal["kl", "abs", "mse", "low_var_kl", "full"] = key("kl", "estimator of the divergence")
    divergence_coef: float = key(0.01, "coefficient of the divergence", "[0, inf)")
    divergence_type: Literal["fixed", "adaptive"] = key("fixed", "fixed, or adapted to divergence_target")
    divergence_target: float = key(6.0, "adaptive: target KL per response", "(0, inf)")
    divergence_horizon: float = key(10000.0, "adaptive: responses over which the coefficient adapts", "(0, inf)")
    online_filtering: bool = key(False, "dynamic sampling: replace uninformative groups")
    filter_by: Literal["mean", "spread"] = key("mean", "keep groups by their mean, or if rewards differ")
    filter_key: str = key("overall", "reward that online filtering uses; overall: the total")
    filter_low: float = key(0.01, "mean: replace groups with a mean not above this", "[-inf, inf)")
    filter_high: float = key(0.99, "mean: replace groups with a mean not below this", "(-inf, inf]")
    max_refills: int = key(4, "maximum rounds of new prompts per step", "[0, inf)")
    on_short_batch: Literal["continue", "stop"] = run_key(
        "continue", "if groups are still missing: train without them, or stop"
    )
    policy_loss: str | Mapping[str, Any] = key("ppo", "policy-gradient loss", names=("ppo", "gspo", "cispo", "sapo"))
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = key("dapo", "how token losses are averaged")
    importance_sampling_level: Literal["token", "sequence"] = key("token", "importance ratio per token or response")
    cispo_clip_high: float = key(5.0, "cispo: maximum importance ratio, absolute", "(0, inf]")
    tau_positive: float = key(1.0, "sapo: temperature for A > 0", "(0, inf)")
    tau_negative: float = key(1.05, "sapo: temperature for A < 0", "(0, inf)")
    tis_clip: float | None = key(2.0, "cap of the sampler's importance weights; null: no correction", "(0, inf]")
    tis_level: Literal["token", "sequence"] = key("token", "those weights per token or response")
    mask_truncated_responses: bool = key(False, "give truncated responses no policy gradient")
    loss_token_denominator: Literal["all", "selected"] = key("all", "tokens that the loss is divided by")
    enable_entropy_filtering: bool = key(False, "train on the highest-entropy tokens only")
    top_p_entropy_tokens: float = key(0.2, "fraction of a response's tokens kept by entropy", "(0, 1]")
    enable_perception_filtering: bool = key(False, "train on the most image-dependent tokens only")
    top_p_perception_tokens: float = key(0.2, "fraction of a response's tokens kept by visual dependency", "(0, 1]")
    perception_estimator: Literal["low_var_kl", "full_kl"] = key("low_var_kl", "estimator of visual dependency")
    perturbation: str = key("random_patch_blackening", "name of the image perturbation")
    patch_size: int | Literal["auto"] = key(14, "side of a patch in pixels; auto: the model's", "[1, inf)")
    black_prob: float = key(0.5, "random_patch_blackening: probability per patch", "[0, 1]")
    noise_std: float = key(189.0, "gaussian_noise: standard deviation, for pixels in 0 to 255", "[0, inf)")
    blur_radius: float = key(6.0, "gaussian_blur: radius in pixels", "[0, inf)")
    enable_trajectory_reweighting: bool = key(False, "scale advantages by a response's visual dependency")
    trajectory_scaling_min: float = key(0.8, "smallest factor of an advantage", "[0, 1]")
    trajectory_scaling_max: float | None = key(2.0, "largest factor of an advantage; null: no cap", "(0, inf)")
    use_entropy_penalty: bool = key(False, "add a loss term that lowers the entropy")
    entropy_penalty_coef: float = key(0.06, "coefficient of the entropy penalty", "[0, inf)")
    compute_attention_metrics: bool | Literal["auto"] = key(
        "auto", "measure attention; auto: if needed, else every 10th step"
    )
    attention_last_k_layers: int | None = key(None, "last layers in the segment `all`; null: all layers", "[1, inf)")
    enable_token_weights: bool = key(False, "weight tokens by their attention to image and text")
    token_weight_target: Literal["advantage", "mask"] = key("advantage", "what token weights multiply")
    token_weight_clip: tuple[float, float] = key((0.2, 3.0), "smallest and largest token weight", "[0, inf]")
    token_weight_smooth_sigma: float = key(0.0, "sigma of the smoothing, in tokens; 0: none", "[0, inf)")
    token_weight_last_k_layers: int | None = key(None, "last layers to use; null: segment `all`", "[1, inf)")
    token_weight_top_ratio: float | None = key(None, "fraction of tokens that keep their weight; null: all", "(0, 1]")
    loss_terms: tuple[str | Mapping[str, Any], ...] = key(
        (), "additional loss terms: name, file.py:Name, or {name: .., arguments}", path_kind="code"
    )
    signals: tuple[str | Mapping[str, Any], ...] = key(
        (), "your own signals per token: file.py:Name, or {name: .., arguments}", path_kind="code"
    )
    replay_buffer_size: int = key(0, "size of the replay buffer, in groups; 0: off", "[0, inf)")
    replay_var_epsilon: float = key(1e-6, "minimum standard deviation of a stored group", "[0, inf)")
    filter_min_reward: float = key(0.0, "minimum mean reward of a stored group", "[-inf, inf)")
    credit: tuple[str | Mapping[str, Any], ...] = key(
        (), "additional credit rules: name, file.py:name, or {name: .., arguments}", path_kind="code"
    )


@dataclass(frozen=True)
class ActorModelConfig:
    model_path: str | None = key(None, "hub id or directory; null: embedded model; scenes, lookagain: others")
    tokenizer_path: str | None = key(None, "hub id or directory of the tokenizer; null: model_path")
    trust_remote_code: bool = key(False, "run Python code that comes with the model")
    family: str | None = key(
        None, "model family from your own file, as file.py:Name; null: that of the model", path_kind="code"
    )
    enable_gradient_checkpointing: bool | Literal["auto", "mlp", "attention"] = run_key(
        "auto", "recompute activations; auto: if need be"
    )
    freeze_vision_tower: bool = key(False, "do not train the vision tower")
    attn_implementation: str = key("auto", "attention in transformers: auto, sdpa, flash_attention_2, ...")
    peft_type: Literal["lora", "qlora"] | None = key(None, "train adapters; qlora: 4-bit base; null: all weights")
    lora_rank: int = key(8, "rank of the adapters", "[1, inf)")
    lora_alpha: int = key(16, "adapters are scaled by lora_alpha / lora_rank", "[1, inf)")
    lora_dropout: float = key(0.0, "dropout before the adapters, only in updates", "[0, 1)")
    lora_target_modules: tuple[str, ...] | None = key(
        None, "modules with adapters, by the end of their name; null: all projections"
    )
    lora_vision_tower: bool = key(False, "also add adapters to the vision tower")


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "adamw_8bit"] = key("adamw", "optimizer; adamw_8bit keeps its state in 8 bits")
    lr: float = key(1e-6, "peak learning rate", "[0, 1e6]")
    weight_decay: float = key(0.01, "decoupled weight decay", "[0, inf)")
    betas: tuple[float, float] = key((0.9, 0.95), "betas of Adam", "[0, 1)")
    warmup_steps: int = key(10, "optimizer steps of the warm-up", "[0, inf)")
    warmup_ratio: float | None = key(None, "warm-up as a fraction of all steps; overrides warmup_steps", "[0, 1]")
    lr_scheduler_type: Literal["constant_with_warmup", "cosine", "linear"] = key(
        "constant_with_warmup", "schedule after the warm-up"
    )
    min_lr_ratio: float = key(0.0, "final learning rate as a fraction of lr", "[0, 1]")


@dataclass(frozen=True)
class FsdpConfig:
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = key(
        "FULL_SHARD", "FSDP sharding strategy"
    )
    mixed_precision_dtype: Literal["bf16", "fp32"] = key("bf16", "dtype of forward and backward passes")
    param_dtype: Literal["fp32", "bf16"] = key("fp32", "dtype of the trained weights")
    param_rounding: Literal["none", "stochastic", "kahan"] = key(
        "none", "how bf16 weights take updates below their precision"
    )
    cpu_offload: bool = key(False, "weights, gradients, optimizer state in CPU memory, except for the current layer")


@dataclass(frozen=True)
class OffloadConfig:
    offload_params: bool = key(
        False, "weights in CPU memory while a critic, reward model or engine with its own copy works"
    )
    offload_optimizer: bool = key(False, "optimizer state in CPU memory except for its steps; the critic's too")


@dataclass(frozen=True)
class ActorConfig:
    model: ActorModelConfig = field(default_factory=ActorModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    global_batch_size: int = key(256, "prompts per optimizer step", "[1, inf)")
    micro_batch_size_per_device_for_update: int = key(2, "responses per pass with gradient", "[1, inf)")
    micro_batch_size_per_device_for_experience: int = key(8, "responses per pass without gradient", "[1, inf)")
    ppo_epochs: int = key(1, "epochs over the rollouts of a step", "[1, inf)")
    clip_ratio_low: float = key(0.2, "the ratio is clipped at 1 - this", "[0, 1]")
    clip_ratio_high: float = key(0.3, "the ratio is clipped at 1 + this", "[0, inf]")
    clip_ratio_dual: float | None = key(3.0, "for A < 0 the loss is capped at this * |A|; null: off", "(1, inf)")
    max_grad_norm: float = key(1.0, "maximum gradient norm", "(0, inf]")
    padding_free: bool = key(True, "pack sequences without padding (compiled, on a GPU)")
    dynamic_batching: bool = key(True, "limit micro-batches by tokens, not by responses")
    tokens_per_micro_batch: int | None = key(
        None, "tokens per micro-batch; null: largest group, on a GPU what fits", "[1, inf)"
    )
    share_prefix: bool = key(True, "compute a prompt once for all its responses")
    ulysses_size: int = run_key(1, "GPUs per sequence (sequence parallelism); divides the heads", "[1, inf)")
    use_torch_compile: bool = key(True, "compile hot functions (on a GPU); padding_free needs it")


@dataclass(frozen=True)
class CriticModelConfig:
    model_path: str | None = key(None, "hub id or directory of a model or reward model; null: the actor's")


@dataclass(frozen=True)
class CriticOptimConfig(OptimConfig):
    lr: float = key(1e-5, "peak learning rate", "[0, 1e6]")


@dataclass(frozen=True)
class CriticConfig:
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    cliprange_value: float = key(0.5, "clip range of value predictions around their old values", "(0, inf]")
    warmup_steps: int = key(0, "steps at the start that train only the critic", "[0, inf)")


@dataclass(frozen=True)
class RefConfig:
    offload_params: bool = key(False, "keep the reference weights in CPU memory between uses")
    sync_every: int | None = key(None, "steps between copies of the policy to the reference; null: never", "[1, inf)")


@dataclass(frozen=True)
class ValSamplingConfig:
    n: int = key(1, "responses per prompt in validation", "[1, inf)")
    temperature: float = key(0.0, "temperature in validation; 0: greedy", "[0, inf)")


@dataclass(frozen=True)
class RolloutConfig:
    name: str | Mapping[str, Any] = key(
        "auto", "engine that samples responses; auto: the local one", names=("auto", "local", "vllm")
    )
    mode: Literal["inprocess", "process", "server"] = key("inprocess", "where vLLM runs")
    address: str | None = key(None, "address of the vLLM server; of several ranks only the first speaks to it")
    engine_kwargs: Mapping[str, Any] = key({}, "additional arguments for vLLM")
    n: int | None = key(None, "responses per prompt; null: 8, or 1 for gae, remax, reinforce_plus_plus", "[1, inf)")
    temperature: float = key(1.0, "temperature of training rollouts and of all log-probs", "(0, inf)")
    top_p: float = key(1.0, "nucleus sampling: probability mass", "(0, 1]")
    top_k: int = key(-1, "most likely tokens to sample from; -1: all", "[-1, inf)")
    max_new_tokens: int | None = key(None, "maximum sampled tokens per response; null: max_response_length", "[1, inf)")
    seed: int = key(1, "seed for sampling tokens", "[0, inf)")
    noisy_half: bool = key(False, "NoisyRollout: sample half of each group on noised images")
    noise_level: int = key(500, "noise at the start of the run, as a step of a diffusion of 1000", "[0, 999]")
    noise_decay: Literal["sigmoid", "none"] = key("sigmoid", "how the noise decreases over the run")
    noise_decay_coef: float = key(30.0, "sigmoid: steepness over the whole run", "(0, inf)")
    noise_mid_step: int = key(40, "sigmoid: training step at which the level is half of noise_level", "[0, inf)")
    off_policy_steps: int = key(0, "1: sample one step ahead of training, corrected by tis_clip", "[0, 1]")
    n_gpus: int | None = key(None, "GPUs of dedicated engines, for hybrid_engine: false", "[1, inf)")
    gpu_memory_utilization: float = key(0.4, "fraction of GPU memory for vLLM", "(0, 1]")
    tensor_parallel_size: int = key(1, "GPUs per vLLM engine; divides n_gpus or all GPUs", "[1, inf)")
    enable_prefix_caching: bool = key(True, "responses share the KV cache of their prompt")
    environment: str | Mapping[str, str] | None = key(
        None, "class with tools, file.py:Class; or by the values of the column environment", path_kind="code"
    )
    max_turns: int = key(8, "messages of the environment in a response", "[1, 1000]")
    tool_timeout_s: float = key(30.0, "time limit of a tool call", "(0, inf)")
    tool_barrier: bool = key(False, "a turn waits for the tools of all responses: slower, but repeatable to the bit")
    environment_processes: int = key(4, "processes of environments; a group of responses shares one", "[1, 256]")
    val: ValSamplingConfig = field(default_factory=ValSamplingConfig)


@dataclass(frozen=True)
class RewardConfig:
    reward_type: Literal["function", "model"] = key("function", "reward functions only, or with a reward model")
    functions: tuple[str, ...] | None = key(
        None, "built-in names or file.py:name; null: reward_fn_path, else [accuracy, format]", path_kind="code"
    )
    weights: tuple[float, ...] | None = key(None, "one weight per reward function; null: all 1")
    early_weights: tuple[float, ...] | None = key(None, "reward weights at the start of the run")
    early_ratio: float | None = key(
        None, "fraction of the run with early_weights; null: warmup_ratio, else 0.1", "[0, 1]"
    )
    weight_schedule: tuple[tuple[float, tuple[float, ...]], ...] | None = key(
        None, "[[fraction of the run, weights from there on], ...]"
    )
    reward_fn_path: str | None = key(None, "file.py[:name] or package.module[:name]", path_kind="code")
    normalize: Literal["sum_then_normalize", "normalize_then_sum"] = key(
        "sum_then_normalize", "what is standardised within a group"
    )
    reward_fn_kwargs: Mapping[str, Any] = key({}, "keyword arguments for your reward functions")
    model_path: str | None = key(None, "hub id or directory of the reward model")
    num_cpus: int = key(4, "processes that run reward functions", "[1, inf)")
    timeout_s: float = key(30.0, "seconds a reward function may take", "(0, inf]")
    step_timeout_s: float = key(3600.0, "seconds for all responses of a step; the remaining ones fail", "(0, inf]")
    failure_reward: float = key(0.0, "reward of a response whose function fails")
    mdi_balance_ratio: float = key(2.0, "mdi: attention ratio at which the reward reaches -1", "(1, inf)")
    vgr_normalizer: Literal["iqr", "mad"] = key("iqr", "vgr: how values are scaled within a group")
    vgr_hard_negative_pool: Literal["correct", "group"] = key("correct", "vgr_hard_negative: responses to compare with")
    soft_punish_cache: int = key(50, "length: tokens before the limit where the penalty starts", "[0, inf)")


@dataclass(frozen=True)
class WorkerConfig:
    hybrid_engine: bool = key(True, "rollout and training share GPUs; false: worker.rollout.n_gpus separate ones")
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


@dataclass(frozen=True)
class Config:
    """The configuration of a run. `Config()` has all defaults; `load_config` reads YAML and overrides.

    >>> Config().worker.rollout.n, Config().rollouts_per_prompt
    (None, 8)
    """

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)

    # Values of keys whose `null` depends on other keys.

    @property
    def estimator_name(self) -> str:
        return spec_name(self.optimization.advantage_estimator) or ""

    @property
    def engine_name(self) -> str:
        return spec_name(self.worker.rollout.name) or ""

    @property
    def rollouts_per_prompt(self) -> int:
        if self.worker.rollout.n is not None:
            return self.worker.rollout.n
        return 1 if self.estimator_name in SINGLE_RESPONSE_ESTIMATORS else DEFAULT_GROUP_SIZE

    @property
    def max_new_tokens(self) -> int:
        limit = self.worker.rollout.max_new_tokens
        return self.dataset.max_response_length if limit is None else limit

    @property
    def reward_functions(self) -> tuple[str, ...]:
        """Names and paths of the reward functions; empty if only a reward model scores."""
        reward = self.worker.reward
        if reward.functions is not None:
            return reward.functions
        if reward.reward_type == "model":
            return ()
        return ("accuracy", "format") if reward.reward_fn_path is None else (reward.reward_fn_path,)

    @property
    def early_ratio(self) -> float:
        ratio, warmup = self.worker.reward.early_ratio, self.worker.actor.optim.warmup_ratio
        if ratio is not None:
            return ratio
        return 0.1 if warmup is None else warmup


class Leaf(NamedTuple):
    """Description of one key."""

    annotation: Any
    default: Any
    meaning: str
    within: str | None
    may_change: bool
    path_kind: PathKind | None
    names: tuple[str, ...]

    def validate(self, value: Any) -> Any:
        """The value as the tree stores it; raises `BadValue` if the key does not take it."""
        value = validate(value, self.annotation, self.within)
        check_names(value, self.names)
        return value


@cache
def known_leaves() -> Mapping[str, Leaf]:
    """Every leaf by its dotted key, in the order of the tree."""
    leaves: dict[str, Leaf] = {}

    def walk(node: Any, prefix: str) -> None:
        hints = get_type_hints(type(node))
        for item in fields(node):
            name, value = prefix + item.name, getattr(node, item.name)
            if is_dataclass(value):
                walk(value, name + ".")
            else:
                leaves[name] = Leaf(hints[item.name], value, **item.metadata)

    walk(Config(), "")
    return MappingProxyType(leaves)


@cache
def known_sections() -> frozenset[str]:
    """Every inner node by its dotted key: `worker`, `worker.actor`, ..."""
    parents = (name.split(".")[:depth] for name in known_leaves() for depth in range(1, name.count(".") + 1))
    return frozenset(".".join(parts) for parts in parents)
