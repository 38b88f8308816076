"""Translates the configuration into the values that the loop, the actor and the scorer use: no models, no files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import reduce
from typing import Any, TypeVar

from mtrl.algorithms.advantages import ESTIMATORS, Estimator
from mtrl.algorithms.batches import BatchPlan
from mtrl.algorithms.credit import Rule
from mtrl.algorithms.credit.registry import REGISTRY, make_rule
from mtrl.algorithms.credit.rule import DecodeTokens, RunFacts
from mtrl.algorithms.divergence import Divergence
from mtrl.algorithms.filtering import GroupFilter
from mtrl.algorithms.loss_terms import LOSS_TERMS
from mtrl.algorithms.losses import POLICY_LOSSES, Loss, LossTerm, PolicyLoss
from mtrl.algorithms.replay import ReplayRule
from mtrl.algorithms.signals import ATTENTION
from mtrl.algorithms.value_loss import ValueLoss
from mtrl.config import Config, ConfigError
from mtrl.config.tree import OptimConfig
from mtrl.models.adapters import AdapterSettings
from mtrl.models.load_model import DTYPES
from mtrl.models.perturb import Perturbation
from mtrl.training.algorithm_spec import NOTHING, AlgorithmSpec
from mtrl.training.dynamic_sampling import Filtering
from mtrl.training.noisy_rollout import NoisyRollout
from mtrl.types import VIEWS, Needs, Sampling, Signal
from mtrl.utils.plugin_registry import Registry, Spec
from mtrl.utils.plugins import PluginError
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching

T = TypeVar("T")
SWITCHES = {  # credit rules by the keys that switch them on, in their order
    "enable_perception_filtering": "perception_filter",
    "enable_entropy_filtering": "entropy_filter",
    "enable_trajectory_reweighting": "trajectory_scaling",
    "enable_token_weights": "attention_weights",
}
OWN_SIGNALS = Registry[Signal]("signal", (Signal,), {})
GPU_TOKENS_PER_MICRO_BATCH = 32768  # if they fit; few large passes keep a GPU busy
GPU_TOKENS_PER_PROBE = 65536  # more than in an update: passes without gradient keep no activations
ATTENTION_METRICS_INTERVAL = 10  # steps between measurements of attention that serve only metrics


def count_steps(config: Config, rows: int) -> int:
    """`max_steps`, or the steps of all epochs; at least one."""
    by_epochs = max(1, config.training.total_epochs * rows // config.dataset.rollout_batch_size)
    return by_epochs if config.training.max_steps is None else config.training.max_steps


def make_algorithm(
    config: Config,
    steps: int,
    *,
    is_new_run: bool = True,
    rewards: Iterable[Needs] = (),
    trackers: Needs = NOTHING,
    can_read_attention: bool = True,
    decode: DecodeTokens | None = None,
) -> AlgorithmSpec:
    """`rewards` and `trackers` are the signals that they read; `decode` binds credit rules to the tokenizer."""
    optimization = config.optimization
    credit, divergence, estimator = make_credit_rules(config), make_divergence(config), make_estimator(config)
    rewards, signals = tuple(rewards), Needs(custom=make_signals(config))
    terms = make_loss_terms(config)
    readers = [*(rule.needs for rule in credit), *(term.needs for term in terms), *rewards, trackers]
    readers += [estimator.needs, signals]
    if divergence is not None:
        readers.append(divergence.needs)
    if (replay := make_replay_rule(config)) is not None:
        readers.append(Needs("old_logprobs"))  # a replayed group needs the log-probs of its own step
    needs = reduce(Needs.__or__, readers)
    return AlgorithmSpec(
        total_steps=steps,
        prompts_per_step=config.dataset.rollout_batch_size,
        sampling=make_training_sampling(config),
        needs=add_logprob_needs(needs, config),
        attention_every=(
            attention_interval(config, "attention_mass" in needs or any(rewards)) if can_read_attention else 0
        ),
        estimator=estimator,
        divergence=divergence,
        credit=tuple(rule.bind(RunFacts(steps, decode)) for rule in credit),
        loss=Loss(
            policy=make_policy_loss(config),
            entropy_penalty_coef=optimization.entropy_penalty_coef if optimization.use_entropy_penalty else 0.0,
            tis_clip=optimization.tis_clip,
            tis_level=optimization.tis_level,
            terms=terms,
        ),
        batches=make_batch_plan(config),
        val_freq=config.training.val_freq,
        validate_first=config.training.val_before_train and is_new_run,
        save_freq=config.training.save_freq,
        save_minutes=config.training.save_minutes,
        seed=config.dataset.seed,
        sync_ref_every=config.worker.ref.sync_every or 0,
        reward_needs=reduce(Needs.__or__, rewards, NOTHING),
        filtering=make_filtering(config),
        greedy_baseline=estimator.needs_baseline,
        noise=make_noisy_rollout(config, steps),
        replay=replay,
        value_loss=ValueLoss(config.worker.critic.cliprange_value),
        critic_warmup=critic_warmup_steps(config),
        off_policy_steps=config.worker.rollout.off_policy_steps,
        maps_per_step=config.training.record_rollouts_per_step if config.training.record_attention_maps else 0,
    )


def make_loss_terms(config: Config) -> tuple[LossTerm, ...]:
    terms = config.optimization.loss_terms
    return tuple(make_named(LOSS_TERMS, "optimization.loss_terms", each) for each in terms)


def make_live_needs(config: Config) -> Needs:
    """What the loss terms have computed in each pass of an update."""
    return Loss(terms=make_loss_terms(config)).live_needs


def critic_warmup_steps(config: Config) -> int:
    """Steps that train only the critic; 0 without a critic."""
    return config.worker.critic.warmup_steps if "values" in make_estimator(config).needs else 0


def make_filtering(config: Config) -> Filtering | None:
    optimization = config.optimization
    if not optimization.online_filtering:
        return None
    return from_keys(Filtering, optimization, rule=from_keys(GroupFilter, optimization))


def make_noisy_rollout(config: Config, steps: int) -> NoisyRollout | None:
    rollout = config.worker.rollout
    if not rollout.noisy_half:
        return None
    return from_keys(NoisyRollout, rollout, total_steps=steps, seed=config.dataset.seed)


def make_replay_rule(config: Config) -> ReplayRule | None:
    return from_keys(ReplayRule, config.optimization) if config.optimization.replay_buffer_size else None


def add_logprob_needs(needs: Needs, config: Config) -> Needs:
    """Every probe pass over the vocabulary returns old log-probs and entropies. Updates after the first need the old
    log-probs, as do off-policy responses. If nobody needs a signal and each on-policy batch is used once, no such pass
    is made: the update computes them itself."""
    actor = config.worker.actor
    once = actor.ppo_epochs == 1 and actor.global_batch_size == config.dataset.rollout_batch_size
    fresh = config.worker.rollout.off_policy_steps == 0
    if once and fresh and not needs.without(*ATTENTION, "values"):
        return needs
    support = Needs("support") if make_training_sampling(config).cut else NOTHING
    return needs | Needs("old_logprobs", "entropy") | support


def make_batch_plan(config: Config) -> BatchPlan:
    return from_keys(BatchPlan, config.optimization, config.worker.actor, config.dataset)


def make_estimator(config: Config) -> Estimator:
    optimization = config.optimization
    return make_named(ESTIMATORS, "optimization.advantage_estimator", optimization.advantage_estimator, optimization)


def make_named(registry: Registry[T], key: str, spec: Spec, *sections: Any) -> T:
    """The object that a key names; the keys of these sections, or of mappings, are offered as its arguments."""
    try:
        return registry.make(spec, read_keys(*sections))
    except PluginError as error:
        raise ConfigError([f"{key}: {error}"]) from error


def from_keys(kind: type[T], *sections: Any, **derived: Any) -> T:
    """The component whose fields are keys of these sections with the same names; `derived` are its other fields."""
    values = read_keys(*sections, derived)
    return kind(**{f.name: values[f.name] for f in fields(kind) if f.init})  # type: ignore[arg-type]


def read_keys(*sections: Any, only: Sequence[str] | None = None) -> dict[str, Any]:
    """The values of all sections or mappings by their last name; later ones win. `only`: keys of these names."""
    values: dict[str, Any] = {}
    for section in sections:
        values |= section if isinstance(section, dict) else {f.name: getattr(section, f.name) for f in fields(section)}
    return values if only is None else {name: values[name] for name in only}


def make_training_sampling(config: Config) -> Sampling:
    return Sampling(
        **read_keys(config.worker.rollout, only=("temperature", "top_p", "top_k", "seed")),
        n=config.rollouts_per_prompt,
        max_new_tokens=config.max_new_tokens,
    )


def make_validation_sampling(config: Config) -> Sampling:
    rollout = config.worker.rollout
    return Sampling(**read_keys(rollout.val), max_new_tokens=config.max_new_tokens, seed=rollout.seed)


def attention_interval(config: Config, needed: bool = False) -> int:
    """Steps between measurements of attention for metrics: every step if it is `needed` anyway; 0: never."""
    setting = config.optimization.compute_attention_metrics
    if setting == "auto":
        return 1 if needed else ATTENTION_METRICS_INTERVAL
    return int(setting)


def make_credit_rules(config: Config) -> tuple[Rule, ...]:
    """The rules of the `enable_` keys in the order of SPEC 2.2, then those of `optimization.credit`, whose arguments
    are in their entries alone."""
    keys = read_keys(config.optimization)
    switched = [REGISTRY.make(rule, keys) for key, rule in SWITCHES.items() if keys[key]]
    try:
        return (*switched, *map(make_rule, config.optimization.credit))
    except PluginError as error:
        raise ConfigError([f"optimization.credit: {error}"]) from error


def make_signals(config: Config) -> list[Signal]:
    """The signals of users' classes."""
    signals = [make_named(OWN_SIGNALS, "optimization.signals", spec) for spec in config.optimization.signals]
    for number, signal in enumerate(signals):
        if fault := find_signal_fault(signal, [each.name for each in signals[:number]]):
            raise ConfigError([f"optimization.signals: {type(signal).__name__}: {fault}"])
    return signals


def find_signal_fault(signal: Signal, earlier: Sequence[str]) -> str | None:
    """What is wrong with the declaration of a signal; None if nothing is."""
    name = getattr(signal, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        return "its class needs a name, such as name = 'margin': letters, digits and _"
    if name in VIEWS or name in earlier:
        return f"there is a signal {name} already; give it another name"
    if signal.views not in (1, 2) or signal.model not in ("policy", "reference"):
        return "views is 1 or 2, and model is policy or reference"
    if signal.model == "reference" and signal.views == 2:
        return "the reference sees the original image alone; set views to 1, or model to policy"
    return None


def make_divergence(config: Config) -> Divergence | None:
    optimization = config.optimization
    if optimization.disable_divergence or optimization.divergence_coef == 0:
        return None
    return from_keys(Divergence, optimization)


def make_policy_loss(config: Config) -> PolicyLoss:
    optimization, actor = config.optimization, config.worker.actor
    return make_named(POLICY_LOSSES, "optimization.policy_loss", optimization.policy_loss, optimization, actor)


def make_adapter_settings(config: Config) -> AdapterSettings | None:
    """None if all weights are trained."""
    model, dtype = config.worker.actor.model, DTYPES[config.worker.actor.fsdp.param_dtype]
    return None if model.peft_type is None else from_keys(AdapterSettings, model, dtype=dtype, seed=config.dataset.seed)


def dropout_seed(config: Config) -> int | None:
    adapters = make_adapter_settings(config)
    return adapters.seed if adapters is not None and adapters.lora_dropout > 0 else None


def make_optimizer_settings(config: Config, steps: int) -> OptimizerSettings:
    """The settings of the actor, which is not trained while the critic warms up."""
    return make_schedule(config, config.worker.actor.optim, max(0, steps - critic_warmup_steps(config)))


def make_schedule(config: Config, optim: OptimConfig, steps: int) -> OptimizerSettings:
    actor = config.worker.actor  # the critic is trained on the same batches
    updates = steps * actor.ppo_epochs * (config.dataset.rollout_batch_size // actor.global_batch_size)
    warmup = optim.warmup_steps if optim.warmup_ratio is None else round(optim.warmup_ratio * updates)
    return from_keys(OptimizerSettings, actor, actor.fsdp, optim, warmup_steps=warmup, total_steps=updates)


def offloads_optimizer(config: Config) -> bool:
    """Whether optimizer state is moved from CPU memory for optimizer steps. With offloaded weights it stays there, and
    the steps run on the CPU."""
    return config.worker.actor.offload.offload_optimizer and not config.worker.actor.fsdp.cpu_offload


def offloads_params(config: Config) -> bool:
    """Whether the actor's weights are moved to make room. With `cpu_offload` they are in CPU memory all the time."""
    return config.worker.actor.offload.offload_params and not config.worker.actor.fsdp.cpu_offload


def make_update_batching(config: Config, on_gpu: bool, share_prefix: bool, live: Needs = NOTHING) -> MicroBatching:
    """How an update that computes these needs is split into micro-batches: by tokens, or by rows without
    `dynamic_batching`."""
    rows = config.worker.actor.micro_batch_size_per_device_for_update
    batching = make_micro_batching(config, rows, GPU_TOKENS_PER_MICRO_BATCH if on_gpu else 0, share_prefix)
    return batching.reading(live)


def make_probe_batching(config: Config, on_gpu: bool, share_prefix: bool) -> MicroBatching:
    rows = config.worker.actor.micro_batch_size_per_device_for_experience
    return make_micro_batching(config, rows, GPU_TOKENS_PER_PROBE if on_gpu else 0, share_prefix)


def make_micro_batching(config: Config, rows: int, at_least: int, share_prefix: bool) -> MicroBatching:
    actor = config.worker.actor
    if not actor.dynamic_batching:
        return MicroBatching(rows=rows, share_prefix=share_prefix)
    return MicroBatching(actor.tokens_per_micro_batch, at_least=at_least, share_prefix=share_prefix)


def make_perturbation(config: Config, patch_size: int) -> Perturbation:
    """The image perturbation. `patch_size` is that of the model, which replaces `auto`."""
    optimization = config.optimization
    size = patch_size if optimization.patch_size == "auto" else optimization.patch_size
    return from_keys(Perturbation, optimization, patch_size=size, seed=config.dataset.seed)


def make_reward_schedule(config: Config, functions: int) -> list[tuple[float, tuple[float, ...]]]:
    """[(fraction of the run, weights from there on)] for the number of `functions`."""
    reward = config.worker.reward
    if reward.weight_schedule is not None:
        return [(start, weights) for start, weights in reward.weight_schedule]
    weights = reward.weights or (1.0,) * functions
    if reward.early_weights is None or config.early_ratio == 0:
        return [(0.0, weights)]
    return [(0.0, reward.early_weights), (config.early_ratio, weights)]
