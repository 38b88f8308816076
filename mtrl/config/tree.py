"""The configuration tree: every key, its type, default, allowed values and meaning, in one place.

The classes only hold values. `load.py` fills them from YAML and overrides, `values.py` checks one value against the
annotation and the range written here, `checks.py` knows which values cannot stand together. Nothing is derived into a
field: what follows from a `null` is a property, so that what the YAML says is what is kept and printed.

Ranges are intervals in the usual notation: `[0, 1)` contains 0 and not 1; `(0, inf]` allows `.inf`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_type_hints

from mtrl.config.paths import Kind

GROUP_ESTIMATORS = ("grpo", "rloo")  # they compare the responses of one prompt
DEFAULT_GROUP_SIZE = 8

Logger = Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


def key(
    default: Any, meaning: str, within: str | None = None, *, may_change: bool = False, names: Kind | None = None
) -> Any:
    """A leaf of the tree. `within` is the interval of a number, or of each number of a list. A key that `may_change`
    leaves the numbers of a step as they are, so that a run may be resumed with another value of it. One that `names`
    files finds them beside the YAML that sets it (places.py)."""
    metadata = {"meaning": meaning, "within": within, "may_change": may_change, "names": names}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


RENAMED_KEYS = {  # names of 0.1.0, still read
    "worker.rollout.lag": "worker.rollout.off_policy_steps",
    "worker.ref.refresh_every": "worker.ref.sync_every",
}


@dataclass(frozen=True)
class DatasetConfig:
    train_files: str = key(
        "", "file, directory, hub id[@split], or several with commas; empty: the embedded task", names="data"
    )
    val_files: str = key("", "data of validation, written the same way", names="data")
    prompt_key: str = key("prompt", "column of the question: text or a chat")
    answer_key: str = key("answer", "column of the ground truth; may be missing")
    image_key: str = key("images", "column of an image or a list of them")
    video_key: str = key("videos", "column of a video or a list of them")
    options_key: str = key("options", "column of the choices of a multiple-choice row")
    image_dir: str | None = key(None, "base of relative media paths", names="folder")
    video_fps: float = key(2.0, "frames taken from a second of video", "(0, inf)")
    video_max_frames: int = key(64, "frames taken from a video at most, however long it is", "[1, inf)")
    video_max_pixels: int | None = key(None, "larger frames are reduced to this; null: 768 tokens", "[1, inf)")
    min_pixels: int = key(262144, "smaller images are enlarged to this many pixels", "[1, inf)")
    max_pixels: int = key(4194304, "larger images are reduced to this many pixels", "[1, inf)")
    max_image_side: int | None = key(None, "longest side of an image, in pixels", "[1, inf)")
    big_images: Literal["resize", "filter"] = key("resize", "what happens to images over max_image_side")
    max_prompt_length: int = key(2048, "tokens of a prompt; expanded media tokens count", "[1, inf)")
    max_response_length: int = key(512, "tokens of a response", "[1, inf)")
    rollout_batch_size: int = key(256, "prompts per step", "[1, inf)")
    val_batch_size: int = key(64, "prompts per batch of validation", "[1, inf)")
    shuffle: bool = key(True, "a new order of the prompts in each epoch")
    seed: int = key(42, "seed of the order of the prompts and of the perturbations", "[0, inf)")
    filter_overlong_prompts: bool = key(True, "drop prompts over max_prompt_length")
    on_bad_row: Literal["scan", "error", "skip"] = key(
        "scan", "a bad row; scan: an error at the start, skipped later", may_change=True
    )
    check_images: Literal["sample", "full"] = key(
        "sample", "images decoded whole at the start: some, or all of them", may_change=True
    )
    dataloader_num_workers: int | None = key(
        None, "processes that decode media ahead; null: up to 8, where they pay", "[0, inf)", may_change=True
    )
    on_missing: Literal["error", "warn"] = key("error", "images that no key reads, no answers for a reward")
    format_prompt: str | None = key(None, "Jinja file that wraps each question", names="template")
    system_prompt: str | None = key(None, "text of the system message")
    allow_special_tokens: bool = key(False, "special tokens that a row spells out are tokens, not text")
    override_chat_template: str | None = key(None, "chat template in place of the model's own")


@dataclass(frozen=True)
class TrainingConfig:
    total_epochs: int = key(10, "passes over the training data", "[1, inf)", may_change=True)
    max_steps: int | None = key(None, "stop after this many steps", "[1, inf)", may_change=True)
    project_name: str = key("mtrl", "folder and logger project of the run", may_change=True)
    experiment_name: str = key("run", "folder and logger name of the run", may_change=True)
    output_dir: str = key("outputs", "runs live in <output_dir>/<project_name>/<experiment_name>", may_change=True)
    logger: tuple[Logger, ...] = key(("console",), "loggers beside metrics.jsonl", may_change=True)
    nnodes: int = key(1, "machines of the run", "[1, inf)", may_change=True)
    n_gpus_per_node: int = key(1, "training processes on each machine, one a GPU", "[1, inf)", may_change=True)
    max_restarts: int = key(
        3, "times that a run goes on from its last checkpoint after it lost a process", "[0, inf)", may_change=True
    )
    heartbeat_s: float = key(
        60.0, "seconds without an answer after which a process is lost", "[1, inf)", may_change=True
    )
    save_freq: int = key(500, "steps between checkpoints; -1: only at the end", "[-1, inf)", may_change=True)
    save_limit: int = key(3, "newest checkpoints kept, besides the best; -1: all", "[-1, inf)", may_change=True)
    best_metric: str | None = key(
        "val/reward_score", "validation metric that best_model is the highest of; null: none", may_change=True
    )
    val_freq: int = key(100, "steps between validations; -1: only at the end", "[-1, inf)", may_change=True)
    val_before_train: bool = key(True, "validate before the first step", may_change=True)
    val_only: bool = key(False, "validate and stop", may_change=True)
    val_generations_to_log: int = key(4, "validation responses shown and written out", "[0, inf)", may_change=True)
    find_last_checkpoint: bool = key(True, "go on from the run's own newest checkpoint", may_change=True)
    fresh: bool = key(False, "never resume; refuse an existing run directory", may_change=True)
    load_checkpoint_path: str | None = key(
        None, "step directory, run directory or best_model to start from", may_change=True
    )
    realtime_rollout_logging: bool = key(
        True, "write the rollouts of every step; false: of validated steps alone", may_change=True
    )
    record_rollouts_per_step: int = key(
        64, "responses of a step recorded token by token for mtrl view; -1: all, 0: none", "[-1, inf)", may_change=True
    )
    record_attention_maps: bool = key(
        False, "record where on the image each of their tokens looks; one more pass over them", may_change=True
    )
    record_limit_gib: float = key(1.0, "size of that record; the oldest steps give way", "(0, inf)", may_change=True)
    rollout_log_path: str | None = key(None, "another place for the rollout Markdown", may_change=True)
    attention_diag_log_path: str | None = key(None, "another place for the attention Markdown", may_change=True)
    log_preview_chars: int = key(2000, "longest text in a preview; 0: no previews", "[0, inf)", may_change=True)
    colorize_output: bool = key(True, "colours on a terminal", may_change=True)


@dataclass(frozen=True)
class OptimizationConfig:
    gamma: float = key(1.0, "discount of later rewards", "[0, 1]")
    lam: float = key(0.95, "lambda of GAE", "[0, 1]")
    advantage_estimator: Literal["gae", "grpo", "rloo", "remax", "reinforce_plus_plus"] = key(
        "grpo", "how rewards become advantages"
    )
    scale_rewards: Literal["group", "batch", "none"] = key("group", "the standard deviation grpo divides by")
    disable_divergence: bool = key(False, "no reference model, no divergence")
    use_divergence_loss: bool = key(False, "divergence as a loss term, not in the reward")
    divergence_penalty: Literal["kl", "abs", "mse", "low_var_kl", "full"] = key("kl", "estimator of the divergence")
    divergence_coef: float = key(0.01, "weight of the divergence", "[0, inf)")
    divergence_type: Literal["fixed", "adaptive"] = key("fixed", "whether the weight follows the target")
    divergence_target: float = key(6.0, "adaptive: wanted KL of a response", "(0, inf)")
    divergence_horizon: float = key(10000.0, "adaptive: responses over which the weight moves", "(0, inf)")
    online_filtering: bool = key(False, "replace groups that teach nothing by fresh prompts")
    filter_by: Literal["mean", "spread"] = key("mean", "keep groups by their mean, or any whose rewards differ")
    filter_key: str = key("overall", "the reward part online filtering looks at; overall: the total")
    filter_low: float = key(0.01, "mean: groups whose mean is not above this are replaced", "[-inf, inf)")
    filter_high: float = key(0.99, "mean: groups whose mean is not below this are replaced", "(-inf, inf]")
    max_refills: int = key(4, "rounds of fresh prompts in one step", "[0, inf)")
    on_short_batch: Literal["continue", "stop"] = key(
        "continue", "prompts missing then: train on the others, or end the run", may_change=True
    )
    policy_loss: Literal["ppo", "gspo", "cispo", "sapo"] = key("ppo", "the policy-gradient term")
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = key("dapo", "how token losses become one number")
    importance_sampling_level: Literal["token", "sequence"] = key("token", "ratio of a token or of a response")
    cispo_clip_high: float = key(5.0, "cispo: largest ratio, absolute", "(0, inf]")
    tau_positive: float = key(1.0, "sapo: temperature for A > 0", "(0, inf)")
    tau_negative: float = key(1.05, "sapo: temperature for A < 0", "(0, inf)")
    tis_clip: float | None = key(2.0, "cap of the correction for the sampler's distribution; null: none", "(0, inf]")
    tis_level: Literal["token", "sequence"] = key("token", "that correction for a token or a response")
    mask_truncated_responses: bool = key(False, "responses cut at the limit give no policy gradient")
    loss_token_denominator: Literal["all", "selected"] = key("all", "tokens the loss is divided by")
    enable_entropy_filtering: bool = key(False, "policy gradient only where the model was uncertain")
    top_p_entropy_tokens: float = key(0.2, "share of a response's tokens kept by entropy", "(0, 1]")
    enable_perception_filtering: bool = key(False, "policy gradient only where the image mattered")
    top_p_perception_tokens: float = key(0.2, "share of a response's tokens kept by visual dependency", "(0, 1]")
    perception_estimator: Literal["low_var_kl", "full_kl"] = key("low_var_kl", "measure of visual dependency")
    perturbation: str = key("random_patch_blackening", "registered image perturbation")
    patch_size: int | Literal["auto"] = key(14, "side of a patch in pixels; auto: the model's own", "[1, inf)")
    black_prob: float = key(0.5, "random_patch_blackening: chance of a patch to turn black", "[0, 1]")
    noise_std: float = key(189.0, "gaussian_noise: standard deviation, on the scale of 0 to 255", "[0, inf)")
    blur_radius: float = key(6.0, "gaussian_blur: radius in pixels", "[0, inf)")
    enable_trajectory_reweighting: bool = key(False, "scale advantages by a response's visual dependency")
    trajectory_scaling_min: float = key(0.8, "smallest scale of an advantage", "[0, 1]")
    trajectory_scaling_max: float | None = key(2.0, "largest scale of an advantage; null: no cap", "(0, inf)")
    use_entropy_penalty: bool = key(False, "loss term that lowers entropy")
    entropy_penalty_coef: float = key(0.06, "weight of the entropy penalty", "[0, inf)")
    compute_attention_metrics: bool | Literal["auto"] = key(
        "auto", "measure attention; auto: if needed, else every 10th step"
    )
    attention_last_k_layers: int | None = key(None, "layers of the segment `all`; null: every one", "[1, inf)")
    enable_token_weights: bool = key(False, "weigh tokens by where their attention went")
    token_weight_target: Literal["advantage", "mask"] = key("advantage", "what the weights multiply")
    token_weight_clip: tuple[float, float] = key((0.2, 3.0), "smallest and largest weight", "[0, inf]")
    token_weight_smooth_sigma: float = key(0.0, "width of the smoothing, in tokens; 0: none", "[0, inf)")
    token_weight_last_k_layers: int | None = key(None, "layers used; null: segment `all`", "[1, inf)")
    token_weight_top_ratio: float | None = key(None, "share of tokens that keep their weight; null: all", "(0, 1]")
    replay_buffer_size: int = key(0, "groups kept for replay; 0: off", "[0, inf)")
    replay_var_epsilon: float = key(1e-6, "reward standard deviation a group needs to be kept", "[0, inf)")
    filter_min_reward: float = key(0.0, "mean reward a group needs to be kept", "[-inf, inf)")
    credit: tuple[str | Mapping[str, Any], ...] = key(
        (), "further credit rules: name, file.py:name, or {name: .., arguments}", names="code"
    )


@dataclass(frozen=True)
class ActorModelConfig:
    model_path: str | None = key(None, "hub id or directory; null: the embedded model; scenes: the other one")
    tokenizer_path: str | None = key(None, "hub id or directory of the tokenizer; null: model_path")
    trust_remote_code: bool = key(False, "run Python that comes with the model")
    enable_gradient_checkpointing: bool | Literal["mlp", "attention"] = key(
        True, "what is computed again on the way back"
    )
    freeze_vision_tower: bool = key(False, "train the language model only")
    attn_implementation: str = key("auto", "attention of transformers: sdpa, flash_attention_2, ...")
    peft_type: Literal["lora", "qlora"] | None = key(None, "train adapters; qlora: base of 4 bits; null: all")
    lora_rank: int = key(8, "rank of the adapters", "[1, inf)")
    lora_alpha: int = key(16, "scale of the adapters is alpha / rank", "[1, inf)")
    lora_dropout: float = key(0.0, "dropout before the adapters, in updates", "[0, 1)")
    lora_target_modules: tuple[str, ...] | None = key(
        None, "ends of the names of modules that get adapters; null: every projection"
    )
    lora_vision_tower: bool = key(False, "adapters in the vision tower too")


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "adamw_8bit"] = key("adamw", "optimizer; adamw_8bit: state in bytes")
    lr: float = key(1e-6, "peak learning rate", "[0, 1e6]")
    weight_decay: float = key(0.01, "decoupled weight decay", "[0, inf)")
    betas: tuple[float, float] = key((0.9, 0.95), "betas of Adam", "[0, 1)")
    warmup_steps: int = key(10, "steps to the peak", "[0, inf)")
    warmup_ratio: float | None = key(None, "share of all steps; beats warmup_steps when set", "[0, 1]")
    lr_scheduler_type: Literal["constant_with_warmup", "cosine", "linear"] = key(
        "constant_with_warmup", "what follows the warm-up"
    )
    min_lr_ratio: float = key(0.0, "lowest rate, as a share of lr", "[0, 1]")


@dataclass(frozen=True)
class FsdpConfig:
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = key(
        "FULL_SHARD", "what is split over the GPUs"
    )
    mixed_precision_dtype: Literal["bf16", "fp32"] = key("bf16", "dtype of the computation")
    param_dtype: Literal["fp32", "bf16"] = key("fp32", "dtype of the weights that learn")
    param_rounding: Literal["none", "stochastic", "kahan"] = key(
        "none", "how bf16 weights take updates too small for them"
    )
    cpu_offload: bool = key(False, "weights that are split over GPUs in main memory, but for the layer at work")


@dataclass(frozen=True)
class OffloadConfig:
    offload_params: bool = key(False, "weights in main memory while vLLM, which has its own, samples")
    offload_optimizer: bool = key(False, "optimizer state in main memory, the critic's too; it comes for its steps")


@dataclass(frozen=True)
class ActorConfig:
    model: ActorModelConfig = field(default_factory=ActorModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    global_batch_size: int = key(256, "prompts per optimizer step", "[1, inf)")
    micro_batch_size_per_device_for_update: int = key(2, "responses per pass with gradient", "[1, inf)")
    micro_batch_size_per_device_for_experience: int = key(8, "responses per pass without gradient", "[1, inf)")
    ppo_epochs: int = key(1, "passes over the rollouts of a step", "[1, inf)")
    clip_ratio_low: float = key(0.2, "the ratio is clipped at 1 - this", "[0, 1]")
    clip_ratio_high: float = key(0.3, "the ratio is clipped at 1 + this", "[0, inf]")
    clip_ratio_dual: float | None = key(3.0, "for A < 0 the loss is capped at this * |A|; null: off", "(1, inf)")
    max_grad_norm: float = key(1.0, "gradients are scaled down to this norm", "(0, inf]")
    padding_free: bool = key(True, "pack rows without padding (on a GPU, by a compiled kernel)")
    dynamic_batching: bool = key(True, "token budget instead of a row count")
    tokens_per_micro_batch: int | None = key(
        None, "the token budget; null: the largest group, on a GPU what fits", "[1, inf)"
    )
    share_prefix: bool = key(True, "one prompt, its group of responses, one pass")
    ulysses_size: int = key(1, "GPUs that share each sequence; it must divide the heads", "[1, inf)", may_change=True)
    use_torch_compile: bool = key(True, "compile the hot functions (on a GPU); without it rows are padded")


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
    cliprange_value: float = key(0.5, "values that have moved this far in a step learn no further", "(0, inf]")
    warmup_steps: int = key(0, "critic-only steps at the start", "[0, inf)")


@dataclass(frozen=True)
class RefConfig:
    offload_params: bool = key(False, "reference weights in main memory between uses")
    sync_every: int | None = key(
        None, "steps after which the policy becomes the reference again; null: never", "[1, inf)"
    )


@dataclass(frozen=True)
class ValSamplingConfig:
    n: int = key(1, "responses per prompt at validation", "[1, inf)")
    temperature: float = key(0.0, "temperature at validation; 0: greedy", "[0, inf)")


@dataclass(frozen=True)
class RolloutConfig:
    name: Literal["auto", "local", "vllm"] = key("auto", "engine that samples the responses")
    mode: Literal["inprocess", "process", "server"] = key("inprocess", "where vLLM runs")
    address: str | None = key(None, "address of the vLLM server")
    engine_kwargs: Mapping[str, Any] = key({}, "handed to the engine as they are")
    n: int | None = key(None, "responses per prompt; null: 8 for grpo and rloo, else 1", "[1, inf)")
    temperature: float = key(1.0, "temperature of training rollouts, and of every log-prob", "(0, inf)")
    top_p: float = key(1.0, "probability mass sampled from", "(0, 1]")
    top_k: int = key(-1, "tokens sampled from; -1: all", "[-1, inf)")
    max_new_tokens: int | None = key(
        None, "tokens sampled for a response; null: dataset.max_response_length", "[1, inf)"
    )
    seed: int = key(1, "seed of the sampled tokens", "[0, inf)")
    off_policy_steps: int = key(
        0, "1: responses are sampled one step before they are learnt from, and corrected for it", "[0, 1]"
    )
    n_gpus: int | None = key(
        None, "GPUs for engines alone, which each hold the model, with worker.hybrid_engine: false", "[1, inf)"
    )
    gpu_memory_utilization: float = key(0.4, "share of GPU memory for vLLM", "(0, 1]")
    tensor_parallel_size: int = key(1, "GPUs of one vLLM engine; it divides those of the run, or n_gpus", "[1, inf)")
    enable_prefix_caching: bool = key(True, "responses of a prompt share its cache")
    val: ValSamplingConfig = field(default_factory=ValSamplingConfig)


@dataclass(frozen=True)
class RewardConfig:
    reward_type: Literal["function", "model"] = key("function", "functions or a reward model")
    functions: tuple[str, ...] | None = key(
        None, "built-ins and file.py:name; null: reward_fn_path alone, else [accuracy, format]", names="code"
    )
    weights: tuple[float, ...] | None = key(None, "one for each function; null: all 1")
    early_weights: tuple[float, ...] | None = key(None, "weights at the start of the run")
    early_ratio: float | None = key(
        None, "share of the run early_weights hold for; null: warmup_ratio, else 0.1", "[0, 1]"
    )
    weight_schedule: tuple[tuple[float, tuple[float, ...]], ...] | None = key(
        None, "[[share of the run, weights from there on], ...]"
    )
    reward_fn_path: str | None = key(None, "file.py[:name] or package.module[:name]", names="code")
    normalize: Literal["sum_then_normalize", "normalize_then_sum"] = key(
        "sum_then_normalize", "what is standardised within a group"
    )
    reward_fn_kwargs: Mapping[str, Any] = key({}, "handed to the user's function")
    model_path: str | None = key(None, "reward model: hub id or directory")
    num_cpus: int = key(4, "processes that run reward functions", "[1, inf)")
    timeout_s: float = key(30.0, "seconds a reward function may take", "(0, inf]")
    step_timeout_s: float = key(
        3600.0, "seconds it may take for all responses of a step; the rest of them fail", "(0, inf]"
    )
    failure_reward: float = key(0.0, "reward where a function fails")
    mdi_balance_ratio: float = key(2.0, "mdi: ratio at which the balance is lost", "(1, inf)")
    vgr_normalizer: Literal["iqr", "mad"] = key("iqr", "vgr: how a group is compared")
    vgr_hard_negative_pool: Literal["correct", "group"] = key("correct", "vgr_hard_negative: whom it compares")
    soft_punish_cache: int = key(50, "length: tokens before the limit where the penalty starts", "[0, inf)")


@dataclass(frozen=True)
class WorkerConfig:
    hybrid_engine: bool = key(True, "rollout and training share the devices; false: worker.rollout.n_gpus more")
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


@dataclass(frozen=True)
class Config:
    """A whole run. `Config()` is all defaults; `load_config` is the way from YAML and overrides.

    >>> Config().worker.rollout.n, Config().rollouts_per_prompt
    (None, 8)
    """

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)

    # What the `null` of a key stands for, where it depends on other keys.

    @property
    def rollouts_per_prompt(self) -> int:
        if self.worker.rollout.n is not None:
            return self.worker.rollout.n
        return DEFAULT_GROUP_SIZE if self.optimization.advantage_estimator in GROUP_ESTIMATORS else 1

    @property
    def max_new_tokens(self) -> int:
        limit = self.worker.rollout.max_new_tokens
        return self.dataset.max_response_length if limit is None else limit

    @property
    def reward_functions(self) -> tuple[str, ...]:
        """Names and paths of the functions that score; empty where a reward model alone does."""
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
    """What the tree says about one key."""

    annotation: Any
    default: Any
    meaning: str
    within: str | None
    may_change: bool
    names: Kind | None


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
