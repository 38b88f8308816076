"""From the configuration to the values that the loop, the actor and the scorer work with. Nothing is built here."""

from __future__ import annotations

from mtrl.algorithms.credit import CreditRule, Scaling, TokenWeighting
from mtrl.algorithms.losses import Loss, PolicyLoss
from mtrl.config import Config
from mtrl.config.checks import ATTENTION_REWARDS
from mtrl.models.perturb import Perturbation
from mtrl.training.loop import Divergence, Recipe
from mtrl.types import Needs, Sampling
from mtrl.workers.actor import Optimization
from mtrl.workers.micro_batches import MicroBatching

GPU_TOKENS_PER_MICRO_BATCH = 16384
ATTENTION_NOW_AND_THEN = 10  # steps
GPU_TOKENS_PER_PROBE = 65536  # without gradients a pass keeps nothing


def total_steps(config: Config, rows: int) -> int:
    """`max_steps`, or the epochs' worth; at least one."""
    by_epochs = max(1, config.training.total_epochs * rows // config.dataset.rollout_batch_size)
    return by_epochs if config.training.max_steps is None else config.training.max_steps


def recipe_of(
    config: Config, steps: int, *, first: bool = True, rewards_read_signals: bool = False, sees_attention: bool = True
) -> Recipe:
    """`first`: the run has no step behind it."""
    algorithm, actor = config.optimization, config.worker.actor
    return Recipe(
        total_steps=steps,
        prompts_per_step=config.dataset.rollout_batch_size,
        prompts_per_update=actor.global_batch_size,
        passes=actor.ppo_epochs,
        sampling=training_sampling(config),
        needs=needs_of(config, rewards_read_signals),
        attention_every=attention_every(config, rewards_read_signals) if sees_attention else 0,
        estimator=algorithm.advantage_estimator,  # type: ignore[arg-type]  # gae and remax are refused before
        scale_rewards=algorithm.scale_rewards,
        gamma=algorithm.gamma,
        credit=credit_rule(config),
        divergence=divergence_of(config),
        loss=Loss(
            policy=policy_loss(config),
            entropy_penalty_coef=algorithm.entropy_penalty_coef if algorithm.use_entropy_penalty else 0.0,
            tis_clip=algorithm.tis_clip,
            tis_level=algorithm.tis_level,
        ),
        loss_type=algorithm.loss_type,
        loss_token_denominator=algorithm.loss_token_denominator,
        max_response_length=config.dataset.max_response_length,
        mask_truncated=algorithm.mask_truncated_responses,
        validate_every=config.training.val_freq,
        validate_first=config.training.val_before_train and first,
        save_every=config.training.save_freq,
    )


def training_sampling(config: Config) -> Sampling:
    rollout = config.worker.rollout
    return Sampling(
        n=config.rollouts_per_prompt,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=config.max_new_tokens,
        seed=rollout.seed,
    )


def validation_sampling(config: Config) -> Sampling:
    rollout = config.worker.rollout
    return Sampling(
        n=rollout.val.n,
        temperature=rollout.val.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=rollout.seed,
    )


def needs_of(config: Config, rewards_read_signals: bool = False) -> Needs:
    """What the probes must say. Where nobody asks and each batch is learnt from once, not even the old log-probs: they
    are those of the update's own pass."""
    algorithm, actor = config.optimization, config.worker.actor
    looks = algorithm.enable_perception_filtering or algorithm.enable_trajectory_reweighting
    reference = divergence_of(config) is not None
    once = actor.ppo_epochs == 1 and actor.global_batch_size == config.dataset.rollout_batch_size
    old = looks or reference or rewards_read_signals or algorithm.enable_entropy_filtering or not once
    return Needs(
        old=old,
        entropy=old,
        dependency=algorithm.perception_estimator if looks else None,
        reference=reference,
    )


def attention_every(config: Config, rewards_read_signals: bool = False) -> int:
    """Every how many steps attention is read: at each where a reward or weight needs it (of a function that reads
    signals nobody knows which), else now and then."""
    asked = config.optimization.compute_attention_metrics
    if asked == "auto" and not (needs_attention(config) or rewards_read_signals):
        return ATTENTION_NOW_AND_THEN
    return int(asked is not False)


def needs_attention(config: Config) -> bool:
    return config.optimization.enable_token_weights or bool(set(ATTENTION_REWARDS) & set(config.reward_functions))


def credit_rule(config: Config) -> CreditRule:
    algorithm = config.optimization
    scaling = Scaling(algorithm.trajectory_scaling_min, algorithm.trajectory_scaling_max)
    weighting = TokenWeighting(
        target=algorithm.token_weight_target,
        clip=algorithm.token_weight_clip,
        smooth_sigma=algorithm.token_weight_smooth_sigma,
        top_ratio=algorithm.token_weight_top_ratio,
    )
    return CreditRule(
        perception_top_p=algorithm.top_p_perception_tokens if algorithm.enable_perception_filtering else None,
        entropy_top_p=algorithm.top_p_entropy_tokens if algorithm.enable_entropy_filtering else None,
        scaling=scaling if algorithm.enable_trajectory_reweighting else None,
        weighting=weighting if algorithm.enable_token_weights else None,
    )


def divergence_of(config: Config) -> Divergence | None:
    algorithm = config.optimization
    if algorithm.disable_divergence or algorithm.divergence_coef == 0:
        return None
    return Divergence(
        penalty=algorithm.divergence_penalty,
        coef=algorithm.divergence_coef,
        in_loss=algorithm.use_divergence_loss,
        adaptive=algorithm.divergence_type == "adaptive",
        target=algorithm.divergence_target,
        horizon=algorithm.divergence_horizon,
    )


def policy_loss(config: Config) -> PolicyLoss:
    algorithm, actor = config.optimization, config.worker.actor
    gspo = algorithm.policy_loss == "gspo"
    return PolicyLoss(
        kind="ppo" if algorithm.policy_loss == "gspo" else algorithm.policy_loss,
        level="sequence" if gspo else algorithm.importance_sampling_level,
        clip_low=actor.clip_ratio_low,
        clip_high=actor.clip_ratio_high,
        clip_dual=actor.clip_ratio_dual,
        cispo_clip_high=algorithm.cispo_clip_high,
        tau_positive=algorithm.tau_positive,
        tau_negative=algorithm.tau_negative,
    )


def optimization_of(config: Config, steps: int) -> Optimization:
    actor, optim = config.worker.actor, config.worker.actor.optim
    updates = steps * actor.ppo_epochs * (config.dataset.rollout_batch_size // actor.global_batch_size)
    warmup = optim.warmup_steps if optim.warmup_ratio is None else round(optim.warmup_ratio * updates)
    return Optimization(
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        warmup_steps=warmup,
        total_steps=updates,
        schedule=optim.lr_scheduler_type,
        min_lr_ratio=optim.min_lr_ratio,
        max_grad_norm=actor.max_grad_norm,
    )


def update_batching(config: Config, on_gpu: bool, share_prefix: bool) -> MicroBatching:
    """Passes of an update; rows hold where `dynamic_batching` is off."""
    rows = config.worker.actor.micro_batch_size_per_device_for_update
    return micro_batching(config, rows, GPU_TOKENS_PER_MICRO_BATCH if on_gpu else 0, share_prefix)


def probe_batching(config: Config, on_gpu: bool, share_prefix: bool) -> MicroBatching:
    rows = config.worker.actor.micro_batch_size_per_device_for_experience
    return micro_batching(config, rows, GPU_TOKENS_PER_PROBE if on_gpu else 0, share_prefix)


def micro_batching(config: Config, rows: int, at_least: int, share_prefix: bool) -> MicroBatching:
    actor = config.worker.actor
    if not actor.dynamic_batching:
        return MicroBatching(rows=rows, share_prefix=share_prefix)
    return MicroBatching(actor.tokens_per_micro_batch, at_least=at_least, share_prefix=share_prefix)


def perturbation_of(config: Config, patch_size: int) -> Perturbation:
    """`patch_size` is the model's own, for `auto`."""
    algorithm = config.optimization
    return Perturbation(
        kind=algorithm.perturbation,
        patch_size=patch_size if algorithm.patch_size == "auto" else algorithm.patch_size,
        black_prob=algorithm.black_prob,
        noise_std=algorithm.noise_std,
        blur_radius=algorithm.blur_radius,
        seed=config.dataset.seed,
    )


def reward_schedule(config: Config, functions: int) -> list[tuple[float, tuple[float, ...]]]:
    """[(from which share of the run, weights)], for so many functions."""
    reward = config.worker.reward
    if reward.weight_schedule is not None:
        return [(start, weights) for start, weights in reward.weight_schedule]
    weights = reward.weights or (1.0,) * functions
    if reward.early_weights is None or config.early_ratio == 0:
        return [(0.0, weights)]
    return [(0.0, reward.early_weights), (config.early_ratio, weights)]
