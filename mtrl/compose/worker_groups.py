"""A run of several processes: the workers of each process, and the proxies through which the driver calls them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mtrl.compose import algorithm
from mtrl.compose.critic_worker import build_critic, critic_path, load_critic
from mtrl.compose.memory_limits import preflight_on_gpu
from mtrl.compose.policy import (
    base_dtype,
    build_actor,
    build_encoder,
    build_generator,
    build_own_engine,
    build_weights,
    load_options,
    load_policy,
    make_forward,
    model_path,
)
from mtrl.compose.reward_scorer import build_reward_model
from mtrl.config import Config, ConfigError
from mtrl.config.unsupported import uses_several_processes
from mtrl.data.hub import check_model_available
from mtrl.distributed.dedicated_engines import SENDER, DedicatedEngine, DedicatedGenerator, Receive, WeightSender
from mtrl.distributed.generator_proxy import (
    ENGINE,
    DistributedGenerator,
    EngineHandle,
    FirstRankGenerator,
    GatheringEngine,
)
from mtrl.distributed.learner_proxy import (
    DistributedLearner,
    DistributedReference,
    DistributedRewardModel,
    WorkerHandle,
)
from mtrl.distributed.remote_proxy import RemoteProxy
from mtrl.distributed.torchrun_group import SingleRankWorkerGroup, TorchrunWorkerGroup, join_ranks, serve
from mtrl.memory.pass_sizes import PassSizes
from mtrl.models.adapters import has_adapters, inject_adapters, quantize_base
from mtrl.models.backbone import Backbone, explain_no_sequence_parallel
from mtrl.models.checkpoint_files import base_path
from mtrl.models.families import TextEncoder, load_model_config
from mtrl.models.forward import Forward
from mtrl.models.load_model import DTYPES, empty_model, load_model
from mtrl.models.parallel.fsdp import Sharding, allocate, copy_model
from mtrl.models.parallel.ranks import Ranks
from mtrl.models.parallel.sequence import make_sp_group
from mtrl.models.quantized import share_four_bit
from mtrl.models.state_dicts import GatheredWeights
from mtrl.models.value_head import empty_value_model
from mtrl.protocols import Actor, Critic, Generator, Synced, WorkerGroup
from mtrl.rewards.scorer import ResponseScorer
from mtrl.rollout.decode.engine import make_fastest_generator
from mtrl.training.algorithm_spec import AlgorithmSpec
from mtrl.training.resume import check_undamaged
from mtrl.types import Needs, Weights
from mtrl.utils.machine import started_by_torchrun
from mtrl.workers.offload import StayingWeights
from mtrl.workers.reference import Reference, SyncedReference

LOGS, PASSES = "logs", "passes.json"  # in the run directory
ACTOR, CRITIC, REFERENCE, REWARD, PREFLIGHT = "actor", "critic", "reference", "reward", "preflight"  # roles
NO_NEEDS = Needs()


def world_size(config: Config) -> int:
    return config.training.nnodes * config.training.n_gpus_per_node


@dataclass(frozen=True)
class WorkerPlan:
    """Which workers a rank holds, from the configuration and the data."""

    config: Config
    steps: int
    has_reference: bool
    syncs_reference: bool
    has_critic: bool
    needs: Needs = NO_NEEDS
    run_dir: Path | None = None

    @classmethod
    def make(cls, config: Config, steps: int, rules: AlgorithmSpec, run_dir: Path) -> WorkerPlan:
        has_reference, syncs_reference = rules.reads_reference, bool(rules.sync_ref_every)
        has_critic = "values" in rules.needs
        return cls(config, steps, has_reference, syncs_reference, has_critic, rules.needs, run_dir.absolute())


# ----------------------------------------------------------------------------------------------------- on every rank
def build_roles(plan: WorkerPlan, ranks: Ranks) -> dict[str, Any]:
    """The workers of one rank by role. All ranks build theirs at once: models are sharded as they are loaded."""
    config, settings = plan.config, plan.config.worker.actor.fsdp
    sp_group = make_sp_group(config.worker.actor.ulysses_size)
    cuda = torch.cuda.is_available()
    sharding = Sharding(
        ranks,
        torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        strategy=settings.sharding_strategy,
        per_node=config.training.n_gpus_per_node,
        compute_dtype=DTYPES[settings.mixed_precision_dtype],
        cpu_offload=settings.cpu_offload,
    )
    encoder = build_encoder(config)
    check_undamaged(Path(model_path(config)))
    model = sharding.load_sharded(make_empty_policy(config), partial(load_policy, config, device="cpu"))
    policy = make_forward(config, encoder, model, replace(ranks, sp_group=sp_group))
    reference = shard_reference(config, policy, sharding) if plan.has_reference else None
    weights = build_weights(config, policy)
    actor = build_actor(config, policy, encoder, plan.steps, reference, weights)
    roles: dict[str, Any] = {ACTOR: WorkerHandle(actor, returns_signals=sp_group.is_first)}
    if config.worker.hybrid_engine:
        roles[ENGINE] = build_rank_engine(config, policy, encoder, actor.publish, weights)
    else:
        roles[SENDER] = WeightSender(actor.publish, DTYPES[settings.mixed_precision_dtype])
    learners = [actor.learner]
    value_forward: Forward | None = None
    if plan.has_critic:
        empty = empty_value_model(critic_path(config), **empty_model_options(config))
        values = sharding.load_sharded(empty, partial(load_critic, config, device="cpu"))
        critic = build_critic(config, policy, encoder, plan.steps, values, weights)
        roles[CRITIC] = WorkerHandle(critic, returns_signals=sp_group.is_first)
        learners.append(critic.learner)
        value_forward = critic.forward
    pass_sizes = None if plan.run_dir is None else PassSizes(plan.run_dir / PASSES)
    if pass_sizes is not None:
        for learner in learners:
            pass_sizes.apply(learner)
    generator = roles[ENGINE].generator if ENGINE in roles else None
    run: Any = partial(preflight_on_gpu, config, policy, generator, plan.needs)
    run = partial(run, learners=learners, critic=value_forward, pass_sizes=pass_sizes, weights=weights)
    roles[PREFLIGHT] = SimpleNamespace(run=run)  # makes the largest possible passes, on all ranks together
    if config.worker.reward.reward_type == "model":
        roles[REWARD] = build_reward_model(config, sharding)
        roles[REWARD].policy_weights = weights
    if plan.syncs_reference and reference is not None:
        roles[REFERENCE] = WorkerHandle(SyncedReference(reference, policy))
    return roles


def build_rank_engine(
    config: Config, policy: Forward, encoder: TextEncoder, publish: Callable[[], Weights], weights: StayingWeights
) -> EngineHandle:
    """A rank's own engine, or its part in the only one: a vLLM server."""
    build = partial(build_generator, config, encoder=encoder, gets_weights=True)
    make_copy = partial(make_engine_forward, config, policy)
    filled, copy = None, None  # models that `load` fills; `copy`: for an engine that does not fill its own
    if ":" in config.engine_name:
        generator, copy = build_own_engine(config, encoder, make_copy)
        filled = copy
    elif config.engine_name != "vllm":
        forward = make_copy()
        generator, filled = build(forward), forward.backbone
    elif config.worker.rollout.mode == "server":
        client = policy.backbone.ranks.rank0_only(lambda: build(policy))
        generator = GatheringEngine() if client is None else client
    else:
        generator = build(policy)
    if filled is not None and has_adapters(filled.model):
        publish = partial(publish_unmerged, publish, policy.backbone.model)
    if config.worker.rollout.mode != "server":  # whose GPUs are its own
        generator.before_wake = weights.offload
    engine = EngineHandle(generator, publish, copy)
    engine.wake()
    engine.load()
    engine.sleep()
    return engine


def publish_unmerged(publish: Callable[[], Weights], model: Any) -> Weights:
    """The weights of a sharded model with adapters, for an engine that has the same."""
    return replace(publish(), tensors=GatheredWeights(model.state_dict()))


def build_dedicated_engine(plan: WorkerPlan, receive: Receive) -> dict[str, Any]:
    """The role of a process that holds only an engine, or a tensor-parallel part of one. It starts with the weights at
    the model's path; `receive` waits for newer ones."""
    config, dtype = plan.config, plan.config.worker.actor.fsdp.mixed_precision_dtype
    encoder, path = build_encoder(config), base_path(model_path(config))
    check_model_available(path)
    check_undamaged(Path(path))
    if config.engine_name == "vllm":
        from mtrl.compose.vllm_engine import build_vllm_engine  # it need not be installed

        names = make_empty_policy(config, dtype, adapters=False).state_dict().keys()
        on_gpu, among_ranks = torch.cuda.is_available(), dist.is_initialized()  # the tensor-parallel group, if any
        engine = build_vllm_engine(config, path, encoder, names, DTYPES[dtype], on_gpu, among_ranks)
        return {ENGINE: DedicatedEngine(engine, receive)}

    def load_forward() -> Forward:
        model = load_model(path, **load_options(config) | {"dtype": dtype})
        model.requires_grad_(False)
        return Forward(Backbone(model, DTYPES[dtype]), encoder, config.worker.rollout.temperature)

    if ":" in config.engine_name:
        own, copy = build_own_engine(config, encoder, load_forward)
        return {ENGINE: DedicatedEngine(own, receive, copy)}
    return {ENGINE: DedicatedEngine(make_fastest_generator(load_forward().backbone, encoder), receive)}


def make_empty_policy(config: Config, dtype: str | None = None, adapters: bool = True) -> Any:
    """The model of a run on the meta device; engines hold it without `adapters`."""
    path, settings = model_path(config), algorithm.make_adapter_settings(config) if adapters else None
    check_model_available(base_path(path))
    model = empty_model(path, **empty_model_options(config) | {"dtype": dtype or base_dtype(config)})
    if settings is not None:
        if config.worker.actor.model.peft_type == "qlora":
            quantize_base(model, torch.device("meta"))
        inject_adapters(model, settings, empty=True)
    return model


def empty_model_options(config: Config) -> dict[str, Any]:
    return {name: value for name, value in load_options(config).items() if name != "device"}


def shard_reference(config: Config, policy: Forward, sharding: Sharding) -> Reference:
    """The policy as it is now: the base under its adapters, or a copy that is sharded like the policy."""
    model = policy.backbone.model
    if has_adapters(model):
        return Reference.under_adapters(policy)
    copy = make_empty_policy(config)
    replace(sharding, cpu_offload=sharding.cpu_offload or config.worker.ref.offload_params).shard(copy)
    copy_model(copy, model)
    return Reference.from_model(copy, policy)


def make_engine_forward(config: Config, policy: Forward) -> Forward:
    """An unsharded model for an engine, in the dtype that it computes in. Its weights come by `load`, its buffers are
    copied here. Above a 4-bit base it has adapters as the policy, and that base: ranks hold it whole."""
    dtype, backbone = config.worker.actor.fsdp.mixed_precision_dtype, policy.backbone
    quantized = config.worker.actor.model.peft_type == "qlora"
    model = make_empty_policy(config, dtype, adapters=quantized)
    share_four_bit(model, backbone.model)
    allocate(model, backbone.device, {})
    buffers = dict(backbone.model.named_buffers())
    for name, buffer in model.named_buffers():
        if buffer is not buffers[name]:
            buffer.copy_(buffers[name])
    model.requires_grad_(False)
    return Forward(Backbone(model, DTYPES[dtype]), policy.encoder, policy.temperature)


# ------------------------------------------------------------------------------------------------------- in the driver
@dataclass
class RunWorkers:
    """The workers of a run as the loop sees them: in this process, or on ranks."""

    actor: Actor
    critic: Critic | None
    reference: Synced | None
    generator: Generator
    reward_model: ResponseScorer | None = None  # on ranks; otherwise the scorer has its own
    preflight: Callable[[bool], dict[str, float]] = lambda resumed: {}  # runs the largest possible passes; its seconds
    close: Callable[[], None] = lambda: None


def open_workers(plan: WorkerPlan) -> RunWorkers:
    """Starts the ranks by Ray, or joins those that torchrun has started; a single rank is this process."""
    actor, reward_type = plan.config.worker.actor, plan.config.worker.reward.reward_type
    check_sequence_parallel(plan)
    group = open_worker_group(plan)
    make_learner = partial(DistributedLearner, group, share_prefix=actor.share_prefix, sp_size=actor.ulysses_size)
    return RunWorkers(
        make_learner(role=ACTOR),
        make_learner(role=CRITIC) if plan.has_critic else None,
        DistributedReference(group, REFERENCE) if plan.syncs_reference and plan.has_reference else None,
        make_generator(plan, group),
        DistributedRewardModel(group, REWARD) if reward_type == "model" else None,
        preflight=lambda resumed: RemoteProxy(group, PREFLIGHT).call_all("run", resumed)[0],
        close=group.close,
    )


def make_generator(plan: WorkerPlan, worker_group: Any) -> Generator:
    """The colocated engines of the ranks, a server to which the first rank speaks, or the dedicated engines of Ray's
    group with the weights of the ranks."""
    rollout, tp_size = plan.config.worker.rollout, plan.config.worker.rollout.tensor_parallel_size
    if rollout.mode == "server":
        return FirstRankGenerator(worker_group)
    if plan.config.worker.hybrid_engine:
        return DistributedGenerator(worker_group, tp_size)
    generator = DedicatedGenerator(worker_group.engines, tp_size)
    try:
        generator.load(Weights(0, {}))
    except BaseException:
        worker_group.close()
        raise
    return generator


def check_sequence_parallel(plan: WorkerPlan) -> None:
    """Checks before any process is started that sequence parallelism is exact for the models, and that heads divide."""
    config, sp_size = plan.config, plan.config.worker.actor.ulysses_size
    for path in {model_path(config), critic_path(config)} if plan.has_critic else {model_path(config)}:
        model = load_model_config(base_path(path), config.worker.actor.model.trust_remote_code)
        if sp_size > 1 and (why := explain_no_sequence_parallel(model, sp_size)):
            raise ConfigError(
                [f"worker.actor.ulysses_size: {sp_size} ranks cannot split the sequences of {path}: {why}"]
            )


def open_worker_group(plan: WorkerPlan) -> WorkerGroup:
    if started_by_torchrun() or dist.is_initialized():
        ranks = join_ranks()
        ranks.broadcast_object(plan)
        return TorchrunWorkerGroup(ranks, build_roles(plan, ranks))
    if not uses_several_processes(plan.config):
        return SingleRankWorkerGroup(partial(build_roles, plan))
    from mtrl.distributed.ray_group import EnginePlacement, RayWorkerGroup  # it need not be installed

    assert plan.run_dir is not None
    training, rollout = plan.config.training, plan.config.worker.rollout
    build_engine = partial(build_dedicated_engine, plan)
    return RayWorkerGroup(
        world_size(plan.config),
        training.n_gpus_per_node,
        partial(build_roles, plan),
        plan.run_dir / LOGS,
        training.heartbeat_s,
        EnginePlacement(rollout.n_gpus or 0, rollout.tensor_parallel_size, build_engine),
    )


def is_follower() -> bool:
    """Whether torchrun started this process to serve the first one."""
    return started_by_torchrun() and os.environ.get("RANK", "0") != "0"


def serve_first_rank() -> None:
    """Holds the workers of one rank until the first one ends the run."""
    ranks = join_ranks()
    plan: WorkerPlan = ranks.broadcast_object(None)  # type: ignore[assignment]
    serve(ranks, build_roles(plan, ranks))


def check_world_size(config: Config) -> None:
    """Checks that torchrun has started as many processes as the configuration says."""
    if started_by_torchrun() and (started := int(os.environ["WORLD_SIZE"])) != world_size(config):
        raise ConfigError(
            [
                f"training.n_gpus_per_node: the configuration is for {world_size(config)} processes, but torchrun has "
                f"started {started}; set training.nnodes times training.n_gpus_per_node to that number"
            ]
        )
