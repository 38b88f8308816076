"""What of a configuration decides about memory, and the rehearsal of its passes before the first step."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from mtrl.compose import algorithm
from mtrl.compose.critic_worker import critic_path
from mtrl.config import Config
from mtrl.memory.estimate import Plan, changes
from mtrl.memory.preflight import ADAM_STATES, DOES_NOT_FIT, DoesNotFit, Limits, half_pass, preflight
from mtrl.memory.shard_sizes import Split
from mtrl.models.families import load_model_config
from mtrl.models.forward import Forward
from mtrl.models.model_size import reward_model_parameters
from mtrl.protocols import Generator
from mtrl.training.interrupt import say_at_once
from mtrl.types import Needs
from mtrl.utils.errors import PassesCut
from mtrl.workers.learner import Learner

GIB = 2**30


def make_limits(config: Config, needs: Needs, on_gpu: bool, share_prefix: bool) -> Limits:
    divergence = algorithm.make_divergence(config)
    return Limits(
        prompts=config.dataset.rollout_batch_size,
        prompts_per_update=config.worker.actor.global_batch_size,
        sampling=algorithm.training_sampling(config),
        prompt_tokens=config.dataset.max_prompt_length,
        max_pixels=config.dataset.max_pixels,
        update=algorithm.update_batching(config, on_gpu, share_prefix),
        probe=algorithm.probe_batching(config, on_gpu, share_prefix),
        needs=needs | read_off_attention(config),
        full_divergence=divergence is not None and divergence.in_loss and divergence.penalty == "full",
    )


def read_off_attention(config: Config) -> Needs:
    """What is read off the attention now and then."""
    mass = Needs("attention_mass") if config.optimization.compute_attention_metrics is not False else Needs()
    return mass | Needs("attention_maps") if config.training.record_attention_maps else mass


def make_plan(config: Config, on_gpu: bool) -> Plan:
    actor, reward, attention = config.worker.actor, config.worker.reward, config.worker.actor.model.attn_implementation
    trusted, own_attention = actor.model.trust_remote_code, attention in ("auto", "sdpa")
    compiled, rules = on_gpu and actor.use_torch_compile, algorithm.make_algorithm(config, 1)
    shared = actor.share_prefix and (own_attention or attention == "eager")
    learners = [actor.optim, config.worker.critic.optim] if "values" in rules.needs else [actor.optim]
    limits, split = make_limits(config, rules.needs, on_gpu, shared), shard_split(config)
    return Plan(
        limits=limits if split is None else limits.on_each(split.ranks, sharers=1),
        split=split,
        weights=actor.fsdp.param_dtype,
        compute=actor.fsdp.mixed_precision_dtype,
        reference=rules.reads_reference and actor.model.peft_type is None,
        adapters=algorithm.adapter_settings(config),
        four_bit=actor.model.peft_type == "qlora",
        train_vision=not actor.model.freeze_vision_tower,
        checkpointing=actor.model.enable_gradient_checkpointing,
        attention=attention,
        on_gpu=on_gpu,
        packed=compiled and actor.padding_free and own_attention,
        compiled=compiled,
        graphs=on_gpu and not triton_is_missing(),
        reward_model_parameters=reward_model_parameters(reward.model_path, trusted) if reward.model_path else 0,
        states=ADAM_STATES + (actor.fsdp.param_rounding == "kahan"),
        eight_bit=all(optim.name == "adamw_8bit" for optim in learners),
        offload_optimizer=on_gpu and algorithm.offloads_optimizer(config),
        offload_reference=on_gpu and config.worker.ref.offload_params and rules.reads_reference,
        reference_in_update=rules.loss.full_divergence,
        critic=load_model_config(critic_path(config), trusted) if "values" in rules.needs else None,
        trust_remote_code=trusted,
    )


def shard_split(config: Config) -> Split | None:
    """How ranks split the models of a run. Ranks that share sequences make a pass of as many times the tokens, of which
    each holds what one alone would hold of its own."""
    training, fsdp, rollout = config.training, config.worker.actor.fsdp, config.worker.rollout
    world = training.nnodes * training.n_gpus_per_node
    if world == 1:
        return None
    parts = {"HYBRID_SHARD": training.n_gpus_per_node, "NO_SHARD": 1}.get(fsdp.sharding_strategy, world)
    return Split(
        ranks=world // config.worker.actor.ulysses_size,
        parts=parts,
        stays_whole=fsdp.sharding_strategy == "SHARD_GRAD_OP",
        in_main_memory=fsdp.cpu_offload,
        own_engine=config.worker.hybrid_engine and rollout.name != "vllm",
    )


def triton_is_missing() -> bool:
    """Whether this machine has a GPU, and no kernels for it. Of another machine it is taken to be there."""
    return torch.cuda.is_available() and find_spec("triton") is None


def preflight_on_gpu(
    config: Config,
    policy: Forward,
    generator: Generator | None,
    needs: Needs,
    has_states: bool,
    learners: Sequence[Learner],
    critic: Forward | None = None,
    kept: KeptPasses | None = None,
) -> None:
    """The passes of a step at the limits of the configuration, once: what does not fit is told before the first step. A
    CPU is slow, and what does not fit there is swapped. Of several ranks each runs its part of them, all at once."""
    if policy.backbone.device.type != "cuda":
        return
    plan = make_plan(config, on_gpu=True)
    run_once = partial(
        preflight,
        policy,
        policy.encoder,
        generator=generator,
        has_states=has_states,
        ways=[*changes(plan)],
        critic=critic,
        states=plan.states,
        state_dtype=torch.uint8 if plan.eight_bit else None,
        offloaded=plan.offload_optimizer,
    )
    limits = make_limits(config, needs, on_gpu=True, share_prefix=policy.share_prefix)
    limits = limits.on_each(policy.backbone.ranks.size, policy.sharers.size)
    if learners[0].cut_to:  # the run goes on, with passes that were cut before
        limits = limits.within(learners[0].cut_to)
    peaks = fitted(run_once, limits, policy, learners if sized_by_memory(config) else [], kept)
    if not policy.backbone.ranks.is_first:
        return
    say_at_once(
        "rehearsed at the limits: " + ", ".join(f"{name} {peak / GIB:,.1f} GiB" for name, peak in peaks.items())
    )


@dataclass(frozen=True)
class KeptPasses:
    """How large a pass of each learner of ranks may be, in a file of the run: whichever rank finds its device full
    writes it before all of them end, and all read it when they begin again."""

    file: Path

    def keep(self, name: str, size: int) -> None:
        """No larger from here on; of several ranks that are full at once the last one to write is as good."""
        beside = self.file.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        beside.write_text(json.dumps(self._read() | {name: size}))
        beside.replace(self.file)

    def settle(self, learner: Learner) -> None:
        """The learner as earlier attempts have found that it fits; where it is full, it says so here."""
        learner.cut_to, learner.keep_cut = self._read().get(learner.name, 0), partial(self.keep, learner.name)

    def _read(self) -> dict[str, int]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}


def sized_by_memory(config: Config) -> bool:
    """Whether nobody has said how large a pass is."""
    actor = config.worker.actor
    return actor.dynamic_batching and actor.tokens_per_micro_batch is None


def fitted(
    run_once: Callable[[Limits], dict[str, int]],
    limits: Limits,
    policy: Forward,
    learners: Sequence[Learner],
    kept: KeptPasses | None = None,
) -> dict[str, int]:
    """What the passes held, once they are so small that they fit; those of the learners are cut likewise. A phase that
    fits in no passes is an error, as is any that does not where there is no learner to cut. Ranks cannot go on from the
    middle of a pass: what fits is `kept`, and they end."""
    while True:
        try:
            return run_once(limits)
        except DoesNotFit as error:
            tokens = half_pass(limits, policy.encoder, error.phase) if learners else None
            if tokens is None:
                raise
            phase = error.phase
        told = f"{DOES_NOT_FIT[phase]} in passes of this size: they are cut to {tokens:,} tokens"
        if kept is not None:
            for learner in learners:
                kept.keep(learner.name, tokens)
            raise PassesCut(f"memory: {told}; ")
        say_at_once(told)
        limits = limits.within(tokens)
        for learner in learners:
            learner.cut_to = tokens
