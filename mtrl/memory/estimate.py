"""Estimate the peak device memory of a run, by formula and by passes of a fake model.

Weights, gradients, optimizer state, keys and values are counted. Activations are measured at the limits of the
configuration on a model of the same width without numbers (`memory/fake_model.py`), with 2 and with 4 layers; they grow
by the same amount with each layer, so the real depth is extrapolated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from mtrl.memory.decode_footprint import (
    Parts,
    count_graph_engine,
    explain_plain_engine,
    run_graph_prefill,
    run_plain_prefill,
)
from mtrl.memory.fake_model import FakeBackbone, FakeModel
from mtrl.memory.live_tensors import LiveTensors
from mtrl.memory.plan import Plan, list_savings
from mtrl.memory.preflight import MemoryPreflight, half_pass_tokens
from mtrl.memory.shard_sizes import gathered_gradients, gathered_weights
from mtrl.models.adapters import layer_projections
from mtrl.models.forward import Forward
from mtrl.models.load_model import DTYPES
from mtrl.models.model_size import ModelSize, critic_tensors, model_size
from mtrl.models.quantized import BYTES
from mtrl.rollout.local import peak_decode_bytes
from mtrl.workers.offload import PIECE

MIB = 2**20
WORKSPACES = 3 * 32 * MIB  # cuBLAS on Hopper, less on others
MEASURED_LAYERS = 12  # language model and vision tower: up to so many are measured without extrapolation
PHASES = ("sample", "probe", "update")
MOMENTS = {"vision": "vision tower", "text": "language model", "score": "log-probs", "end": "end of backward"}

WEIGHTS, REFERENCE, OPTIMIZER = (
    "weights",
    "weights of the reference",
    ("optimizer state", "optimizer state of the critic"),
)
OPTIMIZER_PIECE = "optimizer state, a piece at a time"
VLLM = "vLLM: weights, keys and values"

Moments = dict[str, dict[str, int]]  # bytes by phase and moment


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose: held all the time, and in addition by each phase. One phase runs at a time."""

    parameters: int
    held: Parts
    phases: dict[str, Parts]
    method: str  # how activations were measured
    in_cpu_memory: Parts = field(default_factory=dict)  # of each device's process, while the device has it not
    critic_parameters: int = 0
    piece: int = 0  # bytes of an offloaded optimizer state that are on the device at once
    no_graphs: str | None = None  # why a GPU samples without CUDA graphs; None if it does with them, and elsewhere

    @property
    def held_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def peak_bytes(self) -> int:
        return self.held_bytes + sum(self.phases[self.fullest].values())

    @property
    def fullest(self) -> str:
        """The phase that takes most memory."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))


def estimate(config: Any, plan: Plan, wanted: Collection[str] = PHASES) -> MemoryEstimate:
    """Estimate the memory of a run. `config` is the model's; phases that are not `wanted` are skipped."""
    fake = FakeModel(config, plan)
    size = model_size(fake.model)
    four_bit = [each.weight for each in layer_projections(fake.model)] if plan.four_bit else []
    packed = [weight.numel() for weight in four_bit]
    critic: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    if plan.critic is not None:  # all its weights learn, also next to an actor with adapters
        critic = critic_tensors(FakeModel(plan.critic, replace(plan, adapters=None)).model)
    always, offloaded = split_offloaded(count_held(size, plan, *critic, packed=packed), plan)
    weights = {name: nbytes for name, nbytes in offloaded.items() if name == WEIGHTS}
    moments, method = measure(fake, plan, wanted)
    gradients = {"gradients": count_bytes(local_sizes(size.learning, plan), plan)}
    passes = {phase: list(map(activation_part, peaks.items())) for phase, peaks in moments.items()}
    # The first pass of an update creates the gradients, which exist at its end; the second pass starts with them.
    at_end = [activation_part(("end", moments["first"]["end"]))] if "first" in moments else []
    with_gradients = [gradients | parts for parts in [*at_end, *passes.get("second", [])]]
    of_critic = []
    if plan.critic is not None:  # it learns before the actor, in the same passes without the vocabulary
        unscored = [activation_part(each) for each in moments.get("second", {}).items() if each[0] != "score"]
        critic_gradients = {"gradients of the critic": count_bytes(local_sizes(critic[1], plan), plan)}
        of_critic = [critic_gradients | parts for parts in unscored]
    if plan.vllm is not None:
        sampling = [{VLLM: plan.vllm.nbytes}]
    else:  # vLLM's copy, which is not known, is no larger than the weights
        own_engine = plan.split is not None and plan.split.own_engine
        engine = add_engine(fake, plan, passes.get("sample", []))
        sampling = [({} if own_engine else weights) | parts for parts in engine]
    candidates = {
        "sample": sampling,
        "probe": [weights | parts for parts in passes.get("probe", [])],
        "update": [*(weights | parts for parts in [*passes.get("first", []), *with_gradients]), *of_critic],
    }
    gathered = count_gathered(fake, plan, four_bit)
    piece = plan.states * max(PIECE, plan.weight_bytes * max((0, *local_sizes((*size.learning, *critic[1]), plan))))
    phases = {}
    for phase in wanted:
        fullest = max(candidates[phase], key=lambda parts: sum(parts.values()))
        phases[phase] = _nonzero(fullest | gathered.get(phase, {})) | onloaded_in(phase, offloaded, plan, piece)
    no_graphs = explain_no_graphs(fake, plan) if plan.vllm is None else None
    in_cpu_memory = offloaded | count_streamed(size, plan, *critic, packed=packed) | count_asleep(size, plan)
    return MemoryEstimate(size.parameters, always, phases, method, in_cpu_memory, sum(critic[0]), piece, no_graphs)


def shrink_to_fit(config: Any, plan: Plan, estimated: MemoryEstimate, available: int) -> tuple[Plan, MemoryEstimate]:
    """Halve the passes of a plan until they fit into the available bytes, as a run does before its first step. Returns
    the plan and its estimate unchanged if no pass size fits."""
    given, first, encoder = plan, estimated, FakeModel(config, plan).encoder
    while estimated.held_bytes < available < estimated.peak_bytes:
        tokens = half_pass_tokens(plan.limits, encoder, estimated.fullest)
        if tokens is None:
            return given, first
        plan = replace(plan, limits=plan.limits.within(tokens))
        again = estimate(config, plan, ["probe", "update"])
        estimated = replace(estimated, phases=estimated.phases | again.phases)
    return plan, estimated


# ---------------------------------------------------------------------------------------------------------- by formula
def count_held(
    size: ModelSize,
    plan: Plan,
    critic: Iterable[int] = (),
    critic_learning: Iterable[int] = (),
    packed: Sequence[int] = (),
) -> Parts:
    """Bytes held all the time. `critic`: the size of each weight of a critic, and of its trainable ones; `packed`: of
    each 4-bit weight, which the engine of a rank shares with the policy."""
    local = partial(local_sizes, plan=plan)
    plain = list((Counter(size.frozen) - Counter(packed)).elements())  # 4-bit weights are not sharded, nor offloaded
    four_bit = count_bytes(packed, plan, plan.frozen_bytes) - round(sum(packed) * (plan.frozen_bytes - BYTES))
    learning = count_bytes(local(size.learning), plan)
    weights = learning + count_bytes(local(plain), plan, plan.frozen_bytes) + four_bit
    engine = 0
    if plan.split is not None and plan.split.own_engine:
        adapters = count_bytes(size.learning, plan)
        merged = count_bytes(size.tensors, plan, plan.compute_bytes)
        engine = adapters + count_bytes(plain, plan, plan.compute_bytes) if packed else merged
    return _nonzero(
        {
            WEIGHTS: weights,
            "weights of the engine": engine,
            "one dequantized weight": max(packed, default=0) * plan.compute_bytes,
            REFERENCE: weights if plan.reference else 0,
            "weights of the reward model": sum(local([plan.reward_model_parameters])) * plan.compute_bytes,
            "weights of the critic": count_bytes(local(critic), plan),
            OPTIMIZER[0]: plan.states * count_bytes(local(size.learning), plan, plan.state_bytes),
            OPTIMIZER[1]: plan.states * count_bytes(local(critic_learning), plan, plan.state_bytes),
            "workspaces of cuBLAS": WORKSPACES if plan.on_gpu else 0,
        }
    )


def count_streamed(
    size: ModelSize, plan: Plan, critic: Iterable[int], critic_learning: Iterable[int], packed: Sequence[int]
) -> Parts:
    """Bytes that are in CPU memory all the time, by `cpu_offload`: what the device would hold, and gradients."""
    if plan.split is None or not plan.split.cpu_offload:
        return {}
    held = replace(plan, split=replace(plan.split, cpu_offload=False))
    whole, rest = (count_held(size, each, critic, critic_learning, packed) for each in (held, plan))
    gradients = count_bytes(local_sizes([*size.learning, *critic_learning], held), held)
    return _nonzero({name: nbytes - rest.get(name, 0) for name, nbytes in whole.items()} | {"gradients": gradients})


def count_asleep(size: ModelSize, plan: Plan) -> Parts:
    if plan.vllm is None:
        return {}
    return {"weights of vLLM, asleep": sum(size.tensors) * plan.compute_bytes // plan.vllm.tp_size}


def local_sizes(tensors: Iterable[int], plan: Plan) -> Iterable[int]:
    """The part of each tensor that this device holds."""
    return tensors if plan.split is None else plan.split.local_sizes(tensors)


def count_gathered(fake: FakeModel, plan: Plan, whole: Collection[Tensor] = ()) -> dict[str, Parts]:
    """Bytes that a rank gathers in each phase: of the policy, but for weights that it has `whole`, or as much of a
    reference or critic."""
    if plan.split is None:
        return {}
    weights = {"weights gathered": gathered_weights(fake.model, plan.split, plan.compute_bytes, whole)}
    gradients = {"gradients not yet summed": gathered_gradients(fake.model, plan.compute_bytes)}
    return {"probe": weights, "update": weights | gradients}


def split_offloaded(held: Parts, plan: Plan) -> tuple[Parts, Parts]:
    """Separate what is always on the device from what is offloaded to CPU memory between its uses."""
    names = {*(OPTIMIZER if plan.offload_optimizer else ()), *([REFERENCE] if plan.offload_reference else ())}
    names |= {WEIGHTS} if plan.offload_weights and not plan.four_bit else set()  # packed ones stay
    offloaded = {name: size for name, size in held.items() if name in names}
    return {name: size for name, size in held.items() if name not in names}, offloaded


def onloaded_in(phase: str, offloaded: Parts, plan: Plan, piece: int) -> Parts:
    """What a phase copies back from CPU memory, except the weights: not all of its moments need them. The optimizer's
    state comes one piece at a time, learner after learner, when activations are gone: counting it with them is an upper
    bound."""
    reads = {"probe": REFERENCE, "update": REFERENCE if plan.reference_in_update else None}
    here = {name: size for name, size in offloaded.items() if name == reads.get(phase)}
    states = [min(piece, size) for name, size in offloaded.items() if name in OPTIMIZER]
    return here | ({OPTIMIZER_PIECE: max(states)} if states and phase == "update" else {})


def count_bytes(tensors: Iterable[int], plan: Plan, width: int | None = None) -> int:
    """Bytes of tensors of so many numbers, by default as wide as trainable weights. On a GPU, torch's allocator gives
    large ones whole blocks of 2 MiB, and leaves the rest of the last block unused if it is at most 1 MiB."""
    total = 0
    for numbers in tensors:
        size = numbers * (width or plan.weight_bytes)
        rest = -size % (2 * MIB) if plan.on_gpu and size >= 10 * MIB else 0
        total += size + (rest if rest <= MIB else 0)
    return total


def add_engine(fake: FakeModel, plan: Plan, passes: Sequence[Parts]) -> list[Parts]:
    """The moments of sampling. The plain engine holds keys and values when the activations of prefill are gone; the
    graph engine has its buffers from the beginning."""
    compute, batch = DTYPES[plan.compute], plan.limits.batch
    if not uses_graphs(fake, plan):
        size = model_size(fake.model)
        last_token = peak_decode_bytes(size, fake.model.dtype, compute, batch.slots, batch.tokens, batch.sampling.cut)
        return [*passes, last_token]
    parts = count_graph_engine(fake.model, compute, batch, plan.on_gpu)
    return [parts | each for each in passes]


def uses_graphs(fake: FakeModel, plan: Plan) -> bool:
    return plan.graphs and explain_no_graphs(fake, plan) is None


def explain_no_graphs(fake: FakeModel, plan: Plan) -> str | None:
    """Why a GPU samples with the plain engine, if the run has no other."""
    if not plan.graphs:
        return None
    return "projections of 4 bits" if plan.four_bit else explain_plain_engine(fake.model)


def _nonzero(parts: Parts) -> Parts:
    return {name: size for name, size in parts.items() if size}


def activation_part(moment: tuple[str, int]) -> Parts:
    return {f"activations, {MOMENTS[moment[0]]}": moment[1]}


# ------------------------------------------------------------------------------------------------------------ by passes
def measure(fake: FakeModel, plan: Plan, wanted: Collection[str] = PHASES) -> tuple[Moments, str]:
    """Bytes of each phase and moment at the model's own depth, and the method.

    The peak of a moment is linear in the layers of the language model and of the vision tower. The peak of a phase is
    not, since another moment may be the fullest with more layers.
    """
    depth = fake.depth
    if sum(depth) <= MEASURED_LAYERS:
        return measure_at(fake, plan, wanted, depth), f"measured on fake tensors, with all {sum(depth)} layers"
    low = tuple(min(fake.fewest_layers, layers) for layers in depth)
    base = measure_at(fake, plan, wanted, low)
    peaks = {phase: dict(moments) for phase, moments in base.items()}
    for stack, (layers, few) in enumerate(zip(depth, low, strict=True)):
        if step := min(max(2, fake.layer_period), layers - few):
            more = measure_at(fake, plan, wanted, tuple(n + step * (i == stack) for i, n in enumerate(low)))
            for phase, moment in ((p, m) for p in base for m in base[p]):
                slope = (more[phase][moment] - base[phase][moment]) / step
                peaks[phase][moment] += round(slope * (layers - few))
    fake.cut(*depth)
    few = fake.fewest_layers
    extrapolated = f"extrapolated to {depth[0]}" + (f" and {depth[1]} of the vision tower" if depth[1] else "")
    more_layers = few + max(2, fake.layer_period)
    return peaks, f"measured on fake tensors with {few} and {more_layers} layers, {extrapolated}"


def measure_at(fake: FakeModel, plan: Plan, wanted: Collection[str], depth: tuple[int, ...]) -> Moments:
    fake.cut(*depth)
    live = LiveTensors(fake=True)
    backbone = FakeBackbone(fake, DTYPES[plan.compute], live)
    forward = Forward(backbone, fake.encoder, share_prefix=plan.limits.update.share_prefix, packed=plan.packed)
    passes = MemoryPreflight(forward, fake.encoder, plan.limits)
    peaks: Moments = {}

    def count(phase: str, run: Callable[[], object]) -> None:
        fake.model.train(phase in ("first", "second"))
        live.peaks.clear()
        live.begin("vision")
        with live:
            run()
        peaks[phase] = dict(live.peaks)

    if "sample" in wanted:
        sampling = plan.limits.batch.sampling
        prefill = run_graph_prefill if uses_graphs(fake, plan) else partial(run_plain_prefill, sampling=sampling)
        count("sample", partial(prefill, backbone, fake.encoder, passes.prompts))
    if "probe" in wanted:
        count("probe", passes.probe)
    updates = passes.passes() if "update" in wanted else []
    for phase, (rollouts, following) in zip(("first", "second"), updates, strict=False):
        if phase == "second" and len(rollouts) == len(updates[0][0]):
            peaks["second"] = peaks["first"]
        else:
            fake.fill_gradients()
            count(phase, partial(passes.learn, rollouts, following))
    return peaks


# ------------------------------------------------------------------------------------------------------------- savings
def find_savings(config: Any, plan: Plan, estimated: MemoryEstimate) -> list[tuple[str, int]]:
    """Settings that lower the peak by 2% or more, most helpful first, each with the resulting peak."""
    peaks = {name: estimate_peak(config, plan, changed, estimated) for name, changed in list_savings(plan).items()}
    worth = [(name, peak) for name, peak in peaks.items() if peak < 0.98 * estimated.peak_bytes]
    return sorted(worth, key=lambda saving: saving[1])


def estimate_peak(config: Any, plan: Plan, changed: Plan, estimated: MemoryEstimate) -> int:
    """The peak of a smaller plan. Only phases that may be the fullest are estimated again: none grows."""
    if replace(changed, reference=plan.reference) == plan and REFERENCE in estimated.held:
        return estimated.peak_bytes - estimated.held[REFERENCE]
    if changed.offload_weights != plan.offload_weights:  # they move from what is held to phases, which grow
        return estimate(config, changed).peak_bytes
    offload: Any = {"offload_optimizer": plan.offload_optimizer, "offload_reference": plan.offload_reference}
    if replace(changed, **offload) == plan:
        held, offloaded = split_offloaded(estimated.held, changed)
        then = {
            phase: parts | onloaded_in(phase, offloaded, changed, estimated.piece)
            for phase, parts in estimated.phases.items()
        }
        return replace(estimated, held=held, phases=then).peak_bytes
    phases, known = dict(estimated.phases), dict[str, MemoryEstimate]()
    while (fullest := max(phases, key=lambda phase: sum(phases[phase].values()))) not in known:
        known[fullest] = estimate(config, changed, [fullest])
        phases[fullest] = known[fullest].phases[fullest]
    return known[fullest].peak_bytes
