"""A run of several processes: what each of them holds, and how whoever drives them reaches them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mtrl.compose import algorithm
from mtrl.compose.critic_worker import build_critic, critic_path, load_critic
from mtrl.compose.hub import seek_model
from mtrl.compose.memory_limits import KeptPasses, preflight_on_gpu
from mtrl.compose.policy import (
    base_dtype,
    build_actor,
    build_encoder,
    build_generator,
    load_options,
    load_policy,
    make_forward,
    model_path,
)
from mtrl.compose.reward_scorer import build_reward_model
from mtrl.config import Config, ConfigError
from mtrl.distributed.dedicated_engines import SENDER, DedicatedEngine, DedicatedGenerator, Sent, WeightSender
from mtrl.distributed.generator_proxy import PART as ENGINE
from mtrl.distributed.generator_proxy import DistributedGenerator, EngineHandle
from mtrl.distributed.learner_proxy import (
    DistributedLearner,
    DistributedReference,
    DistributedRewardModel,
    WorkerHandle,
    on_all,
)
from mtrl.distributed.torchrun_group import TorchrunWorkerGroup, join_ranks, serve
from mtrl.models.adapters import base_path, has_adapters, inject
from mtrl.models.backbone import Backbone, unshareable
from mtrl.models.families import TextEncoder, load_model_config
from mtrl.models.forward import Forward
from mtrl.models.load_model import DTYPES, empty_model, load_model
from mtrl.models.parallel.fsdp import Sharding, make_room, own_part, parameters_and_buffers
from mtrl.models.parallel.ranks import Ranks
from mtrl.models.parallel.sequence import share_sequences
from mtrl.models.value_head import empty_value_model
from mtrl.protocols import Actor, Critic, Generator, Synced, WorkerGroup
from mtrl.rewards.scorer import ResponseScorer
from mtrl.rollout.decode.engine import fastest_generator
from mtrl.training.algorithm_spec import AlgorithmSpec
from mtrl.training.resume import check_undamaged
from mtrl.types import Needs, Weights
from mtrl.utils.machine import started_by_torchrun
from mtrl.workers.learner import Learner
from mtrl.workers.reference import Reference, SyncedReference

LOGS, PASSES = "logs", "passes.json"  # of the ranks, in the run's directory

NOTHING = Needs()


def world_size(config: Config) -> int:
    return config.training.nnodes * config.training.n_gpus_per_node


@dataclass(frozen=True)
class WorkerPlan:
    """What a rank has to hold: all that follows from the configuration and from the data together."""

    config: Config
    steps: int
    reference: bool
    refreshed: bool
    critic: bool
    needs: Needs = NOTHING
    directory: Path | None = None  # of the run

    @classmethod
    def of(cls, config: Config, steps: int, rules: AlgorithmSpec, directory: Path) -> WorkerPlan:
        reference, refreshed = rules.reads_reference, bool(rules.sync_ref_every)
        return cls(config, steps, reference, refreshed, "values" in rules.needs, rules.needs, directory.absolute())


# ----------------------------------------------------------------------------------------------------- on every rank
def build_parts(plan: WorkerPlan, ranks: Ranks) -> dict[str, Any]:
    """The workers of one rank by their names. All ranks build them at once: models are split as they are loaded."""
    config, settings = plan.config, plan.config.worker.actor.fsdp
    sharers = share_sequences(config.worker.actor.ulysses_size)
    ranks = replace(ranks, counts=sharers.first)
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
    model = sharding.spread(empty_policy(config), partial(load_policy, config, device="cpu"))
    policy = make_forward(config, encoder, model, ranks, sharers)
    reference = split_reference(config, policy, sharding) if plan.reference else None
    actor = build_actor(config, policy, encoder, plan.steps, reference)
    parts: dict[str, Any] = {"actor": WorkerHandle(actor, counts=ranks.counts)}
    if config.worker.hybrid_engine:
        parts[ENGINE] = rank_engine(config, policy, encoder, actor.publish)
    else:
        parts[SENDER] = WeightSender(actor.publish, DTYPES[settings.mixed_precision_dtype])
    learners = [actor.learner]
    value_forward: Forward | None = None
    if plan.critic:
        empty = empty_value_model(critic_path(config), **without_device(load_options(config)))
        values = sharding.spread(empty, partial(load_critic, config, device="cpu"))
        critic = build_critic(config, policy, encoder, plan.steps, values)
        parts["critic"] = WorkerHandle(critic, counts=ranks.counts)
        learners.append(critic.learner)
        value_forward = critic.forward
    kept = None if plan.directory is None else KeptPasses(plan.directory / PASSES)
    if kept is not None:
        for learner in learners:
            kept.settle(learner)
    sampler = parts[ENGINE].generator if ENGINE in parts else None
    parts["rehearsal"] = RankPreflight(plan, policy, sampler, learners, value_forward, kept)
    if config.worker.reward.reward_type == "model":
        parts["reward"] = build_reward_model(config, sharding)
    if plan.refreshed and reference is not None:
        parts["reference"] = WorkerHandle(SyncedReference(reference, policy))
    return parts


@dataclass(frozen=True)
class RankPreflight:
    """The passes at the limits, as all ranks make them together before the first step."""

    plan: WorkerPlan
    policy: Forward
    engine: Generator | None  # none where ranks do not sample
    learners: Sequence[Learner]
    critic: Forward | None
    kept: KeptPasses | None

    def run(self, resumed: bool) -> None:
        config, needs = self.plan.config, self.plan.needs
        preflight_on_gpu(config, self.policy, self.engine, needs, resumed, self.learners, self.critic, self.kept)


def rank_engine(config: Config, policy: Forward, encoder: TextEncoder, publish: Callable[[], Weights]) -> EngineHandle:
    samples_by = policy if config.worker.rollout.name == "vllm" else engine_forward(config, policy)
    engine = EngineHandle(build_generator(config, samples_by, encoder, learns=True), publish)
    engine.wake()
    engine.load()
    engine.sleep()
    return engine


def build_apart(plan: WorkerPlan, next_one: Callable[[], Sent]) -> dict[str, Any]:
    """An engine, or a part of one, alone in its process, with the model's weights as they are given; `next_one` brings
    others."""
    config, dtype = plan.config, plan.config.worker.actor.fsdp.mixed_precision_dtype
    encoder, path = build_encoder(config), base_path(model_path(config))
    seek_model(path)
    check_undamaged(Path(path))
    if config.worker.rollout.name == "vllm":
        from mtrl.compose.vllm_engine import vllm_engine  # it need not be installed

        names = empty_policy(config, dtype, adapters=False).state_dict().keys()
        on_gpu, ranked = torch.cuda.is_available(), dist.is_initialized()  # with those that hold the other parts
        engine = vllm_engine(config, path, encoder, names, DTYPES[dtype], on_gpu, ranked)
        return {ENGINE: DedicatedEngine(engine, next_one)}
    model = load_model(path, **load_options(config) | {"dtype": dtype})
    model.requires_grad_(False)
    return {ENGINE: DedicatedEngine(fastest_generator(Backbone(model, DTYPES[dtype]), encoder), next_one)}


def empty_policy(config: Config, dtype: str | None = None, adapters: bool = True) -> Any:
    """The model of a run without its numbers; without `adapters` as an engine holds it."""
    path, settings = model_path(config), algorithm.adapter_settings(config) if adapters else None
    seek_model(base_path(path))
    options = without_device(load_options(config)) | {"dtype": dtype or base_dtype(config)}
    model = empty_model(path, **options)
    if settings is not None:
        inject(model, settings, empty=True)
    return model


def without_device(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "device"}


def split_reference(config: Config, policy: Forward, sharding: Sharding) -> Reference:
    """The policy as it is now: what is under its adapters, or a copy that is split as the policy is, part by part."""
    own = policy.backbone.model
    if has_adapters(own):
        return Reference.under_adapters(policy)
    model = empty_policy(config)
    replace(sharding, cpu_offload=sharding.cpu_offload or config.worker.ref.offload_params).split(model)
    copy_parts(model, own)
    return Reference.of(model, policy)


def engine_forward(config: Config, policy: Forward) -> Forward:
    """A whole model for an engine, in the dtype that it computes in. It gets its weights by `load`; buffers are not
    among them."""
    dtype, own = config.worker.actor.fsdp.mixed_precision_dtype, policy.backbone
    model = empty_policy(config, dtype, adapters=False)
    make_room(model, own.device, {})
    theirs = dict(own.model.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(theirs[name])
    model.requires_grad_(False)
    return forward_with(policy, Backbone(model, DTYPES[dtype]))


def forward_with(policy: Forward, backbone: Backbone) -> Forward:
    return Forward(backbone, policy.encoder, policy.temperature)


@torch.no_grad()
def copy_parts(target: Any, source: Any) -> None:
    """Between models that are split alike."""
    theirs = parameters_and_buffers(source)
    for name, tensor in parameters_and_buffers(target).items():
        own_part(tensor).copy_(own_part(theirs[name]))


# ------------------------------------------------------------------------------------------------- whoever drives them
@dataclass
class RunWorkers:
    """All that computes, as the loop sees it: in this process, or on ranks."""

    actor: Actor
    critic: Critic | None
    reference: Synced | None
    generator: Generator
    reward_model: ResponseScorer | None = None  # of ranks
    preflight: Callable[[bool], object] = lambda resumed: None  # runs the passes at the limits
    close: Callable[[], None] = lambda: None


def open_ranks(plan: WorkerPlan, directory: Path) -> RunWorkers:
    """Starts the ranks by Ray, or joins those that torchrun has started; `directory` is the run's."""
    share, sharers = plan.config.worker.actor.share_prefix, plan.config.worker.actor.ulysses_size
    check_shareable(plan)
    worker_group = open_crew(plan, directory)
    return RunWorkers(
        DistributedLearner(worker_group, "actor", share, sharers),
        DistributedLearner(worker_group, "critic", share, sharers) if plan.critic else None,
        DistributedReference(worker_group) if plan.refreshed and plan.reference else None,
        make_generator(plan, worker_group),
        DistributedRewardModel(worker_group) if plan.config.worker.reward.reward_type == "model" else None,
        preflight=lambda resumed: on_all(worker_group, "rehearsal", "run", resumed),
        close=worker_group.close,
    )


def make_generator(plan: WorkerPlan, worker_group: Any) -> Generator:
    """The engines of the ranks, or those of a crew of Ray that has some apart, with the weights of the ranks."""
    sharers = plan.config.worker.rollout.tensor_parallel_size
    if plan.config.worker.hybrid_engine:
        return DistributedGenerator(worker_group, sharers)
    generator = DedicatedGenerator(worker_group.engines, sharers)
    try:
        generator.load(Weights(0, {}))
    except BaseException:
        worker_group.close()
        raise
    return generator


def check_shareable(plan: WorkerPlan) -> None:
    """Before any process is started: what ranks share must be known to be exact, and heads must divide."""
    config, size = plan.config, plan.config.worker.actor.ulysses_size
    for path in {model_path(config), critic_path(config)} if plan.critic else {model_path(config)}:
        model = load_model_config(base_path(path), config.worker.actor.model.trust_remote_code)
        if size > 1 and (why := unshareable(model, size)):
            raise ConfigError([f"worker.actor.ulysses_size: {size} ranks cannot share the sequences of {path}: {why}"])


def open_crew(plan: WorkerPlan, directory: Path) -> WorkerGroup:
    if started_by_torchrun() or dist.is_initialized():
        ranks = join_ranks()
        ranks.broadcast_object(plan)
        return TorchrunWorkerGroup(ranks, build_parts(plan, ranks))
    from mtrl.distributed.ray_group import EnginePlacement, RayWorkerGroup  # it need not be installed

    training = plan.config.training
    build, logs = partial(build_parts, plan), directory.absolute() / LOGS
    rollout, size = plan.config.worker.rollout, world_size(plan.config)
    engines = EnginePlacement(rollout.n_gpus or 0, rollout.tensor_parallel_size, partial(build_apart, plan))
    return RayWorkerGroup(size, training.n_gpus_per_node, build, logs, training.heartbeat_s, engines)


def follows() -> bool:
    """Whether this process was started to do what another one says."""
    return started_by_torchrun() and os.environ.get("RANK", "0") != "0"


def follow() -> None:
    """Holds the workers of one rank until the first one has no more to do."""
    ranks = join_ranks()
    plan: WorkerPlan = ranks.broadcast_object(None)  # type: ignore[assignment]
    serve(ranks, build_parts(plan, ranks))


def check_world_size(config: Config) -> None:
    """The processes of torchrun must be those of the configuration."""
    if started_by_torchrun() and (started := int(os.environ["WORLD_SIZE"])) != world_size(config):
        raise ConfigError(
            [
                f"training.n_gpus_per_node: the configuration is for {world_size(config)} processes and torchrun has "
                f"started {started}; training.nnodes times training.n_gpus_per_node must be as many"
            ]
        )
