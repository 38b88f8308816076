"""From the configuration to the values that the loop, the actor and the scorer work with. Nothing is built here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import reduce
from typing import get_type_hints

from mtrl.algorithms.batches import BatchPlan
from mtrl.algorithms.credit import Rule
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.registry import make_rule
from mtrl.algorithms.credit.rule import DecodeTokens
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.divergence import Divergence
from mtrl.algorithms.estimators import ESTIMATORS, Estimator
from mtrl.algorithms.filtering import GroupFilter
from mtrl.algorithms.losses import Loss, PolicyLoss
from mtrl.algorithms.replay import ReplayRule
from mtrl.algorithms.value_loss import ValueLoss
from mtrl.config import Config, ConfigError
from mtrl.config.tree import OptimConfig
from mtrl.config.value_types import BadValue, typed
from mtrl.models.adapters import AdapterSettings
from mtrl.models.load_model import DTYPES
from mtrl.models.perturb import Perturbation
from mtrl.training.algorithm_spec import NOTHING, AlgorithmSpec
from mtrl.training.dynamic_sampling import Filtering
from mtrl.types import Needs, Sampling
from mtrl.utils.plugins import PluginError
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching

GPU_TOKENS_PER_MICRO_BATCH = 32768  # as long as they fit; few large passes leave a GPU no gaps
ATTENTION_NOW_AND_THEN = 10  # steps between two readings of attention that only its metrics ask for
GPU_TOKENS_PER_PROBE = 65536  # more than in an update: without gradients a pass keeps no activations


def total_steps(config: Config, rows: int) -> int:
    """`max_steps`, or the epochs' worth; at least one."""
    by_epochs = max(1, config.training.total_epochs * rows // config.dataset.rollout_batch_size)
    return by_epochs if config.training.max_steps is None else config.training.max_steps


def make_algorithm(
    config: Config,
    steps: int,
    *,
    first: bool = True,
    rewards: Iterable[Needs] = (),
    trackers: Needs = NOTHING,
    sees_attention: bool = True,
    pieces: DecodeTokens | None = None,
) -> AlgorithmSpec:
    """`first`: the run has no step behind it. `rewards` and `trackers` are the signals that they read; `pieces` tells
    rules what tokens say, where they are to be applied."""
    algorithm = config.optimization
    credit, divergence, estimator = credit_rules(config), make_divergence(config), make_estimator(config)
    rewards = tuple(rewards)
    readers = [*(rule.needs for rule in credit), *rewards, trackers, estimator.needs]
    if divergence is not None:
        readers.append(divergence.needs)
    if (replay := make_replay_rule(config)) is not None:
        readers.append(Needs("old_logprobs"))  # what a group is worth later is measured by the policy of now
    needs = reduce(Needs.__or__, readers)
    return AlgorithmSpec(
        total_steps=steps,
        prompts_per_step=config.dataset.rollout_batch_size,
        sampling=training_sampling(config),
        needs=with_scores(needs, config),
        attention_every=attention_every(config, "attention_mass" in needs or any(rewards)) if sees_attention else 0,
        estimator=estimator,
        divergence=divergence,
        credit=credit if pieces is None else tuple(rule.reading(pieces) for rule in credit),
        loss=Loss(
            policy=policy_loss(config),
            entropy_penalty_coef=algorithm.entropy_penalty_coef if algorithm.use_entropy_penalty else 0.0,
            tis_clip=algorithm.tis_clip,
            tis_level=algorithm.tis_level,
        ),
        batches=batch_plan(config),
        validate_every=config.training.val_freq,
        validate_first=config.training.val_before_train and first,
        save_every=config.training.save_freq,
        seed=config.dataset.seed,
        sync_ref_every=config.worker.ref.sync_every or 0,
        reward_needs=reduce(Needs.__or__, rewards, NOTHING),
        filtering=make_filtering(config),
        greedy_baseline=algorithm.advantage_estimator == "remax",
        replay=replay,
        value_loss=ValueLoss(config.worker.critic.cliprange_value),
        critic_warmup=critic_warmup(config),
        off_policy_steps=config.worker.rollout.off_policy_steps,
        maps_per_step=config.training.record_rollouts_per_step if config.training.record_attention_maps else 0,
    )


def critic_warmup(config: Config) -> int:
    """Steps in which the critic learns alone; without a critic there are none."""
    return config.worker.critic.warmup_steps if "values" in make_estimator(config).needs else 0


def make_filtering(config: Config) -> Filtering | None:
    algorithm = config.optimization
    if not algorithm.online_filtering:
        return None
    rule = GroupFilter(algorithm.filter_by, algorithm.filter_key, algorithm.filter_low, algorithm.filter_high)
    return Filtering(rule, algorithm.max_refills, algorithm.on_short_batch)


def make_replay_rule(config: Config) -> ReplayRule | None:
    algorithm = config.optimization
    if algorithm.replay_buffer_size == 0:
        return None
    return ReplayRule(algorithm.replay_buffer_size, algorithm.replay_var_epsilon, algorithm.filter_min_reward)


def with_scores(needs: Needs, config: Config) -> Needs:
    """Old log-probs and entropies come with every pass over the vocabulary, and updates after the first need the old
    ones, as do responses of older weights. Where nobody asks for anything and each batch of fresh responses is learnt
    from once, there is no such pass: the update's own says them."""
    actor = config.worker.actor
    once = actor.ppo_epochs == 1 and actor.global_batch_size == config.dataset.rollout_batch_size
    fresh = config.worker.rollout.off_policy_steps == 0
    if once and fresh and not needs.without("attention_mass", "prompt_attention_mass", "values"):
        return needs
    support = Needs("support") if training_sampling(config).cut else NOTHING
    return needs | Needs("old_logprobs", "entropy") | support


def batch_plan(config: Config) -> BatchPlan:
    algorithm, actor = config.optimization, config.worker.actor
    return BatchPlan(
        prompts_per_update=actor.global_batch_size,
        passes=actor.ppo_epochs,
        loss_type=algorithm.loss_type,
        loss_token_denominator=algorithm.loss_token_denominator,
        max_response_length=config.dataset.max_response_length,
        mask_truncated=algorithm.mask_truncated_responses,
    )


def make_estimator(config: Config) -> Estimator:
    """The advantage estimator by its name; its fields come from the keys of `optimization` of the same names."""
    kind = ESTIMATORS[config.optimization.advantage_estimator]
    return kind(**{f.name: getattr(config.optimization, f.name) for f in fields(kind)})


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


def attention_every(config: Config, needed: bool = False) -> int:
    """Every how many steps attention is read for its metrics: at each where somebody needs it anyway (which signals a
    user's function reads, nobody knows), else now and then."""
    asked = config.optimization.compute_attention_metrics
    if asked == "auto":
        return 1 if needed else ATTENTION_NOW_AND_THEN
    return int(asked)


def credit_rules(config: Config) -> tuple[Rule, ...]:
    """The rules that switches turn on, in the order of SPEC 2.2, then those that `optimization.credit` adds."""
    algorithm = config.optimization
    rules: list[Rule] = []
    if algorithm.enable_perception_filtering:
        rules.append(PerceptionFilter(algorithm.top_p_perception_tokens))
    if algorithm.enable_entropy_filtering:
        rules.append(EntropyFilter(algorithm.top_p_entropy_tokens))
    if algorithm.enable_trajectory_reweighting:
        rules.append(TrajectoryScaling(algorithm.trajectory_scaling_min, algorithm.trajectory_scaling_max))
    if algorithm.enable_token_weights:
        rules.append(attention_weights(config))
    try:
        further = [make_rule(spec) for spec in algorithm.credit]
        for rule in further:
            check_arguments(rule)
        return (*rules, *further)
    except PluginError as error:
        raise ConfigError([f"optimization.credit: {error}"]) from error


def check_arguments(rule: Rule) -> None:
    """The values of a rule's fields against their annotations, those that a configuration can hold."""
    hints = get_type_hints(type(rule))
    for argument in fields(rule):  # type: ignore[arg-type]
        value = getattr(rule, argument.name)
        if isinstance(value, Rule):  # one that this one wraps
            check_arguments(value)
        try:
            typed(value, hints[argument.name], None)
        except BadValue as error:
            raise PluginError(f"{type(rule).__name__}: {argument.name}: {error}") from error
        except TypeError:  # an annotation that no key of a configuration has
            continue


def attention_weights(config: Config) -> AttentionWeights:
    algorithm = config.optimization
    return AttentionWeights(
        target=algorithm.token_weight_target,
        clip=algorithm.token_weight_clip,
        smooth_sigma=algorithm.token_weight_smooth_sigma,
        top_ratio=algorithm.token_weight_top_ratio,
        attention=algorithm.compute_attention_metrics is not False,
    )


def make_divergence(config: Config) -> Divergence | None:
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


def adapter_settings(config: Config) -> AdapterSettings | None:
    """None where all weights learn."""
    model, actor = config.worker.actor.model, config.worker.actor
    if model.peft_type is None:
        return None
    return AdapterSettings(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        targets=model.lora_target_modules,
        vision_tower=model.lora_vision_tower,
        dropout=model.lora_dropout,
        dtype=DTYPES[actor.fsdp.param_dtype],
        seed=config.dataset.seed,
    )


def dropout_seed(config: Config) -> int | None:
    adapters = adapter_settings(config)
    return adapters.seed if adapters is not None and adapters.dropout > 0 else None


def optimizer_settings(config: Config, steps: int) -> OptimizerSettings:
    """The actor's. It takes no step while the critic warms up."""
    return make_schedule(config, config.worker.actor.optim, max(0, steps - critic_warmup(config)))


def critic_optimizer_settings(config: Config, steps: int) -> OptimizerSettings:
    return make_schedule(config, config.worker.critic.optim, steps)


def make_schedule(config: Config, optim: OptimConfig, steps: int) -> OptimizerSettings:
    """Actor and critic learn from the same batches."""
    actor = config.worker.actor
    updates = steps * actor.ppo_epochs * (config.dataset.rollout_batch_size // actor.global_batch_size)
    warmup = optim.warmup_steps if optim.warmup_ratio is None else round(optim.warmup_ratio * updates)
    return OptimizerSettings(
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        warmup_steps=warmup,
        total_steps=updates,
        schedule=optim.lr_scheduler_type,
        min_lr_ratio=optim.min_lr_ratio,
        max_grad_norm=actor.max_grad_norm,
        rounding=actor.fsdp.param_rounding,
        eight_bit=optim.name == "adamw_8bit",
    )


def offloads_optimizer(config: Config) -> bool:
    """Whether the state of the optimizers comes from main memory for their steps. With weights that lie there it stays
    there, and is worked on there."""
    return config.worker.actor.offload.offload_optimizer and not config.worker.actor.fsdp.cpu_offload


def update_batching(config: Config, on_gpu: bool, share_prefix: bool) -> MicroBatching:
    """How an update is cut into passes: by tokens, or by rows where `dynamic_batching` is off."""
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


def make_perturbation(config: Config, patch_size: int) -> Perturbation:
    """The perturbation of the configuration. `patch_size` is the model's own, which `auto` stands for."""
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
