"""The settings of a configuration that decide about memory, and changes that would take less."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mtrl.memory.preflight import ADAM_STATES, Limits
from mtrl.memory.shard_sizes import Split
from mtrl.models.activation_checkpointing import Checkpointing
from mtrl.models.adapters import AdapterSettings
from mtrl.models.families import TextEncoder
from mtrl.models.load_model import DTYPES
from mtrl.workers.micro_batches import MicroBatching


@dataclass(frozen=True)
class VllmShare:
    """What a vLLM engine on the trainer's devices takes of each while it samples. Asleep, its weights are in CPU
    memory."""

    nbytes: int  # weights, activations, keys and values
    tp_size: int = 1  # devices that hold its weights together


@dataclass(frozen=True)
class Plan:
    """Settings of a configuration that decide about memory."""

    limits: Limits
    weights: str = "fp32"  # dtype that they are stored in
    compute: str = "fp32"  # dtype of products
    reference: bool = False
    train_vision: bool = True
    adapters: AdapterSettings | None = None  # only they learn; the other weights are stored in `compute`
    four_bit: bool = False  # projections of the layers under the adapters
    checkpointing: Checkpointing = False
    attention: str = "sdpa"
    on_gpu: bool = False
    packed: bool = False  # one sequence with a block mask; otherwise a mask matrix for each sequence
    compiled: bool = False  # MLPs, which then keep no narrow copies of their weights
    graphs: bool = False  # generation by CUDA graphs if the model's layers are known; otherwise by the plain engine
    vllm: VllmShare | None = None  # None: another engine, or the size of the device is not known
    reward_model_parameters: int = 0
    critic: Any = None  # config of the critic's model, if any
    states: int = ADAM_STATES  # numbers per trainable weight in the optimizer
    eight_bit: bool = False  # one byte for each of them; otherwise as wide as the weights
    offload_weights: bool = False  # in CPU memory while others compute: an engine with its own copy, a critic
    offload_optimizer: bool = False  # in CPU memory except for the updates
    offload_reference: bool = False  # in CPU memory except while it is read
    reference_in_update: bool = False
    trust_remote_code: bool = False
    make_encoder: Callable[[int], TextEncoder] | None = None  # the checkpoint's, from the limit of pixels
    split: Split | None = None  # over ranks; the estimate is for one of them
    offloaded_split: Split | None = None  # the same with `cpu_offload`

    @property
    def frozen_dtype(self) -> str:
        """Dtype that frozen weights are stored in."""
        return self.weights if self.adapters is None else self.compute

    @property
    def weight_bytes(self) -> int:
        return DTYPES[self.weights].itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of one number of the optimizer's state, without the scale that a block shares."""
        return 1 if self.eight_bit else self.weight_bytes

    @property
    def frozen_bytes(self) -> int:
        return DTYPES[self.frozen_dtype].itemsize

    @property
    def compute_bytes(self) -> int:
        return DTYPES[self.compute].itemsize


def list_savings(plan: Plan) -> dict[str, Plan]:
    """Settings that take less memory, and the plan with each. Weights in bf16 are left out: they hardly learn at the
    usual rates."""
    limits, sampling = plan.limits, plan.limits.sampling
    longest = limits.prompt_tokens + sampling.max_new_tokens
    group = limits.prompt_tokens + sampling.n * sampling.max_new_tokens
    half_pass = max(longest, (limits.update.tokens or max(limits.update.at_least, group)) // 2)
    halved = MicroBatching(half_pass, share_prefix=limits.update.share_prefix)
    fewer, ranks = max(1, limits.prompts // 4), 1 if plan.split is None else plan.split.ranks
    per_update = math.gcd(fewer, limits.prompts_per_update)  # a step is cut into whole optimizer steps

    is_offloaded = plan.split is not None and plan.split.cpu_offload
    all_layers = plan if plan.checkpointing == "auto" else replace(plan, checkpointing=True)  # auto does so anyway

    def within(**changed: Any) -> Plan:
        return replace(plan, limits=replace(limits, **changed))

    plans = {
        "optimization.disable_divergence=true": replace(plan, reference=False),
        "optimization.advantage_estimator=reinforce_plus_plus": replace(plan, critic=None),
        "worker.actor.offload.offload_params=true": replace(plan, offload_weights=plan.on_gpu and not is_offloaded),
        "worker.actor.offload.offload_optimizer=true": replace(plan, offload_optimizer=plan.on_gpu),
        "worker.ref.offload_params=true": replace(plan, offload_reference=plan.on_gpu and plan.reference),
        "worker.actor.fsdp.cpu_offload=true": offload_shards(plan),
        "worker.actor.model.freeze_vision_tower=true": plan if plan.adapters else replace(plan, train_vision=False),
        "worker.actor.model.enable_gradient_checkpointing=true": all_layers,
        f"worker.actor.tokens_per_micro_batch={half_pass}": within(update=halved, probe=halved),
        f"dataset.max_pixels={limits.max_pixels // 4}": within(max_pixels=limits.max_pixels // 4),
        f"dataset.max_prompt_length={limits.prompt_tokens // 2}": within(prompt_tokens=limits.prompt_tokens // 2),
        f"dataset.max_response_length={sampling.max_new_tokens // 2}": within(
            sampling=replace(sampling, max_new_tokens=sampling.max_new_tokens // 2)
        ),
        f"dataset.rollout_batch_size={ranks * fewer} worker.actor.global_batch_size={ranks * per_update}": within(
            prompts=fewer, prompts_per_update=per_update
        ),
    }
    return {setting: changed for setting, changed in plans.items() if changed != plan}


def offload_shards(plan: Plan) -> Plan:
    """The plan with sharded weights, gradients and optimizer state in CPU memory; on a CPU they are there anyway."""
    if plan.offloaded_split is None or not plan.on_gpu:
        return plan
    return replace(plan, split=plan.offloaded_split, offload_optimizer=False, offload_weights=False)
