"""Derives the memory estimate from the configuration, and runs the memory preflight before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec

import torch

from mtrl.compose import algorithm
from mtrl.compose.critic_worker import critic_path
from mtrl.compose.policy import model_path
from mtrl.config import Config
from mtrl.data.cache import DiskCache
from mtrl.memory.kept_layers import KeepableLayers, choose_kept_layers, full_speed_tokens
from mtrl.memory.pass_sizes import PassSizes, fit_passes
from mtrl.memory.plan import Plan, VllmShare, list_savings
from mtrl.memory.preflight import ADAM_STATES, Limits, add_seconds, preflight
from mtrl.memory.remembered_sizes import RememberedSizes, describe_start
from mtrl.memory.shard_sizes import Split
from mtrl.models.activation_checkpointing import keepable_layers, vision_layers
from mtrl.models.families import TextEncoder, load_encoder, load_model_config
from mtrl.models.forward import Forward
from mtrl.models.model_size import reward_model_parameters
from mtrl.protocols import Generator
from mtrl.types import Needs
from mtrl.utils.terminal import say_at_once
from mtrl.workers.learner import Learner
from mtrl.workers.offload import STAYING, StayingWeights

GIB = 2**30


def make_limits(config: Config, needs: Needs, on_gpu: bool, share_prefix: bool) -> Limits:
    divergence, live = algorithm.make_divergence(config), algorithm.make_live_needs(config)
    return Limits(
        prompts=config.dataset.rollout_batch_size,
        prompts_per_update=config.worker.actor.global_batch_size,
        sampling=algorithm.make_training_sampling(config),
        prompt_tokens=config.dataset.max_prompt_length,
        max_pixels=config.dataset.max_pixels,
        update=algorithm.make_update_batching(config, on_gpu, share_prefix, live),
        probe=algorithm.make_probe_batching(config, on_gpu, share_prefix).reading(needs),
        needs=needs | periodic_attention_needs(config),
        full_divergence=divergence is not None and divergence.in_update,
        live_needs=live,
        views_sampled=2 if config.worker.rollout.noisy_half else 1,
    )


def periodic_attention_needs(config: Config) -> Needs:
    """Signals from attention that are measured in some steps only."""
    mass = Needs("attention_mass") if config.optimization.compute_attention_metrics is not False else Needs()
    return mass | Needs("attention_maps") if config.training.record_attention_maps else mass


def make_plan(config: Config, on_gpu: bool, device_bytes: int = 0) -> Plan:
    """`device_bytes`: the size of a device, of which vLLM takes a share; 0: not known."""
    actor, reward, attention = config.worker.actor, config.worker.reward, config.worker.actor.model.attn_implementation
    trusted, own_attention = actor.model.trust_remote_code, attention in ("auto", "sdpa")
    compiled, spec = on_gpu and actor.use_torch_compile, algorithm.make_algorithm(config, 1)
    share_prefix = actor.share_prefix and (own_attention or attention == "eager")
    optimizers = [actor.optim, config.worker.critic.optim] if "values" in spec.needs else [actor.optim]
    limits, split = make_limits(config, spec.needs, on_gpu, share_prefix), make_split(config)
    limits = replace(limits, encodes_ahead=on_gpu and split is None)  # and without dropout
    return Plan(
        limits=limits if split is None else limits.on_each(split.ranks, sp_size=1),
        split=split,
        weights=actor.fsdp.param_dtype,
        compute=actor.fsdp.mixed_precision_dtype,
        reference=spec.reads_reference and actor.model.peft_type is None,
        adapters=algorithm.make_adapter_settings(config),
        four_bit=actor.model.peft_type == "qlora",
        train_vision=not actor.model.freeze_vision_tower,
        checkpointing=actor.model.enable_gradient_checkpointing,
        attention=attention,
        on_gpu=on_gpu,
        packed=compiled and actor.padding_free and own_attention,
        compiled=compiled,
        graphs=on_gpu and not (torch.cuda.is_available() and find_spec("triton") is None),  # other machines have it
        vllm=make_vllm_share(config, device_bytes) if on_gpu and device_bytes else None,
        reward_model_parameters=reward_model_parameters(reward.model_path, trusted) if reward.model_path else 0,
        states=ADAM_STATES + (actor.fsdp.param_rounding == "kahan"),
        eight_bit=all(optim.name == "adamw_8bit" for optim in optimizers),
        offloaded_split=make_split(with_cpu_offload(config)),
        offload_weights=on_gpu and algorithm.offloads_params(config),
        offload_optimizer=on_gpu and algorithm.offloads_optimizer(config),
        offload_reference=on_gpu and config.worker.ref.offload_params and spec.reads_reference,
        reference_in_update=spec.loss.full_divergence,
        critic=load_model_config(critic_path(config), trusted) if "values" in spec.needs else None,
        trust_remote_code=trusted,
        make_encoder=cache(partial(load_limited_encoder, config)),
    )


def load_limited_encoder(config: Config, max_pixels: int) -> TextEncoder:
    """The checkpoint's encoder with another limit of pixels. It makes no prompts of the run."""
    model, data = config.worker.actor.model, config.dataset
    return load_encoder(
        model_path(config),
        tokenizer_path=model.tokenizer_path,
        min_pixels=data.min_pixels,
        max_pixels=max_pixels,
        chat_template=data.override_chat_template,
        trust_remote_code=model.trust_remote_code,
    )


def make_split(config: Config) -> Split | None:
    """How the models are sharded over ranks, or over one. With sequence parallelism a pass has as many times the
    tokens, so that each rank holds as much as it would alone."""
    training, fsdp = config.training, config.worker.actor.fsdp
    world = training.nnodes * training.n_gpus_per_node
    if world == 1 and not fsdp.cpu_offload:
        return None
    return Split(
        ranks=world // config.worker.actor.ulysses_size,
        parts={"HYBRID_SHARD": training.n_gpus_per_node, "NO_SHARD": 1}.get(fsdp.sharding_strategy, world),
        stays_gathered=fsdp.sharding_strategy == "SHARD_GRAD_OP",
        cpu_offload=fsdp.cpu_offload,
        own_engine=config.worker.hybrid_engine and config.engine_name != "vllm",
    )


def make_vllm_share(config: Config, device_bytes: int) -> VllmShare | None:
    rollout = config.worker.rollout
    if config.engine_name != "vllm" or not config.worker.hybrid_engine or rollout.mode == "server":
        return None
    return VllmShare(int(rollout.gpu_memory_utilization * device_bytes), rollout.tensor_parallel_size)


def with_cpu_offload(config: Config) -> Config:
    actor = config.worker.actor
    offloaded = replace(actor, fsdp=replace(actor.fsdp, cpu_offload=True))
    return replace(config, worker=replace(config.worker, actor=offloaded))


def preflight_on_gpu(
    config: Config,
    policy: Forward,
    generator: Generator | None,
    needs: Needs,
    has_states: bool,
    learners: Sequence[Learner],
    critic: Forward | None = None,
    pass_sizes: PassSizes | None = None,
    weights: StayingWeights = STAYING,
) -> dict[str, float]:
    """Run each pass of a step once at the limits of the configuration, so that too large ones fail before the first
    step, and choose the layers that keep their activations. Not on a CPU, which is slow and can swap. Several ranks run
    their shares at the same time. Return the seconds of each phase and of the search for sizes.

    A single process that finds the sizes of an earlier start runs the update alone."""
    if policy.backbone.device.type != "cuda":
        return {}
    plan, seconds = make_plan(config, on_gpu=True), dict[str, float]()
    run_once = partial(
        preflight,
        policy,
        policy.encoder,
        generator=generator,
        has_states=has_states,
        savings=[*list_savings(plan)],
        critic=critic,
        states=plan.states,
        state_dtype=torch.uint8 if plan.eight_bit else None,
        offloaded=plan.offload_optimizer,
        weights=weights,
    )
    backbone, sized, actor = policy.backbone, is_sized_by_memory(config), learners[0]
    limits = limits_of_rank(config, needs, policy, actor)
    may_keep = plan.checkpointing == "auto" and (pass_sizes is None or pass_sizes.may_keep_layers)
    keepable = keepable_layers(backbone.model) if may_keep else []
    twice = vision_layers(backbone.model, keepable) if actor.encodes_ahead else []
    layers = KeepableLayers.on_gpu(keepable, backbone.device, backbone.ranks, twice)
    run_update = partial(run_once, only=("optimizer", "update"))

    def search() -> dict[str, int]:
        run_all = partial(run_once, watch_update=layers.measure, seconds=seconds)
        peaks = fit_passes(run_all, limits, policy, learners if sized else [], pass_sizes)
        if not keepable:
            return peaks
        enough = full_speed_tokens(sum(each.numel() for each in backbone.model.parameters()), len(keepable))
        with add_seconds(seconds, "search"):
            return peaks | choose_kept_layers(
                layers,
                run_update,
                limits.within(actor.cut_to) if actor.cut_to else limits,
                policy.encoder,
                actor,
                at_least=policy.sp_group.size * enough if sized else None,
                verify=pass_sizes is None,  # ranks cannot continue after a failed pass
            )

    if pass_sizes is not None:  # ranks cannot search after a failed pass
        peaks = search()
    else:
        models = [policy] if critic is None else [policy, critic]
        start = describe_start(plan, limits, models, resumed=has_states, rollout=config.worker.rollout)
        remembered = RememberedSizes(DiskCache().path("memory", start, "json"), backbone.device)
        run_alone = partial(run_update, seconds=seconds)
        peaks = remembered.reuse_or_search(search, run_alone, limits, layers, learners, generator, policy.encoder)
    if backbone.ranks.is_first:
        phases = ", ".join(f"{name} {peak / GIB:,.1f} GiB" for name, peak in peaks.items())
        say_at_once(f"memory at the limits: {phases}")
    return seconds


def limits_of_rank(config: Config, needs: Needs, policy: Forward, actor: Learner) -> Limits:
    """The limits of this process, alone or one of several ranks."""
    limits = make_limits(config, needs, on_gpu=True, share_prefix=policy.share_prefix)
    limits = limits.on_each(policy.backbone.ranks.size, policy.sp_group.size)
    limits = replace(limits, encodes_ahead=actor.encodes_ahead)
    return limits.within(actor.cut_to) if actor.cut_to else limits  # a resumed run has reduced its passes before


def is_sized_by_memory(config: Config) -> bool:
    """Whether the size of a pass follows from the memory of the device."""
    actor = config.worker.actor
    return actor.dynamic_batching and actor.tokens_per_micro_batch is None
