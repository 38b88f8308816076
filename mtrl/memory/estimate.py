"""How much device memory a run takes at most: what is certain by formula, the rest from passes.

Weights, gradients, optimizer state, keys and values are counted. What passes hold beyond them is measured on a model of
the same width that has no numbers (`models/fake_model.py`), with 2 and with 4 layers, at the limits of the
configuration; it grows by the same amount with each layer, so that the real depth follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mtrl.memory.decode_footprint import decodes_by_graphs, graphs_parts, graphs_pass, plain_parts, plain_pass
from mtrl.memory.preflight import ADAM_STATES, Limits, MemoryPreflight, half_pass
from mtrl.memory.shard_sizes import Split, whole_gradients, whole_in_a_pass
from mtrl.models.activation_checkpointing import Recomputed
from mtrl.models.adapters import AdapterSettings, layer_projections
from mtrl.models.fake_model import FakeBackbone, FakeModel
from mtrl.models.forward import Forward
from mtrl.models.load_model import DTYPES
from mtrl.models.model_size import ModelSize, critic_tensors, model_size
from mtrl.models.quantized import BYTES
from mtrl.utils.live_tensors import LiveTensors
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import PIECE

MIB = 2**20
WORKSPACES = 3 * 32 * MIB  # of cuBLAS on Hopper, less on others
WHOLE = 12  # layers, of both stacks: fewer are measured as they are
PHASES = ("sample", "probe", "update")
MOMENTS = {"see": "images seen", "read": "tokens read", "score": "tokens scored", "end": "end of backward"}

REFERENCE, OPTIMIZER = "weights of the reference", ("optimizer state", "optimizer state of the critic")
OF_A_PIECE = "optimizer state, a piece at a time"

Parts = dict[str, int]
Moments = dict[str, dict[str, int]]  # bytes by phase and moment


@dataclass(frozen=True)
class Plan:
    """What of a configuration decides about memory."""

    limits: Limits
    weights: str = "fp32"  # what they are kept in, and what products are taken in
    compute: str = "fp32"
    reference: bool = False
    train_vision: bool = True
    adapters: AdapterSettings | None = None  # these alone learn; other weights are kept as products are taken
    four_bit: bool = False  # projections of the layers under the adapters
    checkpointing: Recomputed = False
    attention: str = "sdpa"
    on_gpu: bool = False
    packed: bool = False  # all in one sequence, who sees whom told by blocks; else by a matrix for each sequence
    compiled: bool = False  # MLPs, which then keep no narrow copies of their weights
    graphs: bool = False  # generation by graphs, where the model's layers are known; else by the plain engine
    reward_model_parameters: int = 0
    critic: Any = None  # the settings of the critic's model, where there is one
    states: int = ADAM_STATES  # numbers that the optimizer keeps of each weight that learns
    eight_bit: bool = False  # a byte for each of them; else they are as wide as the weights
    offload_optimizer: bool = False  # in main memory but for the updates
    offload_reference: bool = False  # in main memory but where it is read
    reference_in_update: bool = False
    trust_remote_code: bool = False
    split: Split | None = None  # over ranks, of which this is one

    @property
    def base(self) -> str:
        """What weights that do not learn are kept in."""
        return self.weights if self.adapters is None else self.compute

    @property
    def passed(self) -> str:
        """What weights are in a pass: those that are split are gathered as products are taken."""
        return self.base if self.split is None else self.compute

    @property
    def weight_bytes(self) -> int:
        return DTYPES[self.weights].itemsize

    @property
    def state_bytes(self) -> int:
        """Of a number of the optimizer's state, without what it shares with others of its block."""
        return 1 if self.eight_bit else self.weight_bytes

    @property
    def base_bytes(self) -> int:
        return DTYPES[self.base].itemsize

    @property
    def compute_bytes(self) -> int:
        return DTYPES[self.compute].itemsize


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by what they are for: held all the time, and on top of it by each phase, of which one runs at a time."""

    parameters: int
    held: Parts
    phases: dict[str, Parts]
    way: str  # how activations were found
    critic_parameters: int = 0
    piece: int = 0  # bytes of the optimizer's state that are on the device at once where it lies in main memory

    @property
    def held_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def peak_bytes(self) -> int:
        return self.held_bytes + sum(self.phases[self.fullest].values())

    @property
    def fullest(self) -> str:
        """The phase."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))


def estimate(config: Any, plan: Plan, wanted: Collection[str] = PHASES) -> MemoryEstimate:
    """`config` is the model's own; phases that are not wanted are left out."""
    fake = fake_model(config, plan)
    size = model_size(fake.model)
    critic = ((), ()) if plan.critic is None else critic_tensors(fake_critic(plan).model)
    moments, way = measure(fake, plan, wanted)
    gradients = {"gradients": held_by(shares(size.learning, plan), plan)}
    passes = {phase: list(map(memory_parts, found.items())) for phase, found in moments.items()}
    # The first pass of an update makes the gradients, which are all there at its end; the second finds them.
    at_end = [memory_parts(("end", moments["first"]["end"]))] if "first" in moments else []
    with_gradients = [gradients | parts for parts in [*at_end, *passes.get("second", [])]]
    if plan.critic is not None:  # it learns before the actor does, in such passes that score no vocabulary
        unscored = [memory_parts(each) for each in moments.get("second", {}).items() if each[0] != "score"]
        theirs = {"gradients of the critic": held_by(shares(critic[1], plan), plan)}
        with_gradients += [theirs | parts for parts in unscored]
    phases = {
        "sample": while_sampling(fake, plan, passes.get("sample", [])),
        "probe": passes.get("probe", []),
        "update": [*passes.get("first", []), *with_gradients],
    }
    packed = [each.weight.numel() for each in layer_projections(fake.model)] if plan.four_bit else []
    always, away = apart(held(size, plan, *critic, packed=packed), plan)
    gathered = while_whole(fake, plan)
    piece = plan.states * max(PIECE, plan.weight_bytes * max((0, *shares((*size.learning, *critic[1]), plan))))
    told = {
        phase: _some(fullest(*phases[phase]) | gathered.get(phase, {})) | needed_in(phase, away, plan, piece)
        for phase in wanted
    }
    return MemoryEstimate(size.parameters, always, told, way, sum(critic[0]), piece)


def sized(config: Any, plan: Plan, found: MemoryEstimate, room: int) -> tuple[Plan, MemoryEstimate]:
    """The plan, and what was found of it, in passes so small that they fit into the room, as a run cuts them before its
    first step. What does not fit whatever its passes stays as it is."""
    given, first, encoder = plan, found, fake_model(config, plan).encoder
    while found.held_bytes < room < found.peak_bytes:
        tokens = half_pass(plan.limits, encoder, found.fullest)
        if tokens is None:
            return given, first
        plan = replace(plan, limits=plan.limits.within(tokens))
        again = estimate(config, plan, ["probe", "update"])
        found = replace(found, phases=found.phases | again.phases)
    return plan, found


def fake_model(config: Any, plan: Plan) -> FakeModel:
    return FakeModel(
        config,
        dtype=DTYPES[plan.passed],
        attention="eager" if plan.attention == "eager" else "sdpa",  # other kernels keep what sdpa keeps
        checkpointing=plan.checkpointing,
        train_vision=plan.train_vision,
        compiled=plan.compiled,
        padded=plan.on_gpu and plan.compute_bytes == 2,  # as Backbone does it
        trust_remote_code=plan.trust_remote_code,
        adapters=plan.adapters,
    )


def fake_critic(plan: Plan) -> FakeModel:
    """All of its weights learn, whatever the actor's do."""
    return fake_model(plan.critic, replace(plan, adapters=None))


# ---------------------------------------------------------------------------------------------------------- by formula
def held(
    size: ModelSize,
    plan: Plan,
    critic: Iterable[int] = (),
    critic_learning: Iterable[int] = (),
    packed: Sequence[int] = (),
) -> Parts:
    """`critic`: numbers in each weight of a critic, and of those that learn; `packed`: in each weight of 4 bits."""
    own = partial(shares, plan=plan)
    learning, frozen = held_by(own(size.learning), plan), held_by(own(size.frozen), plan, plan.base_bytes)
    weights = learning + frozen - round(sum(packed) * (plan.base_bytes - BYTES))
    engine = size.tensors if plan.split is not None and plan.split.own_engine else ()
    return _some(
        {
            "weights": weights,
            "weights of the engine": held_by(engine, plan, plan.compute_bytes),
            "a weight made of its 4 bits": max(packed, default=0) * plan.compute_bytes,
            REFERENCE: weights if plan.reference else 0,
            "weights of the reward model": sum(own([plan.reward_model_parameters])) * plan.compute_bytes,
            "weights of the critic": held_by(own(critic), plan),
            OPTIMIZER[0]: plan.states * held_by(own(size.learning), plan, plan.state_bytes),
            OPTIMIZER[1]: plan.states * held_by(own(critic_learning), plan, plan.state_bytes),
            "workspaces of cuBLAS": WORKSPACES if plan.on_gpu else 0,
        }
    )


def shares(tensors: Iterable[int], plan: Plan) -> Iterable[int]:
    """What this device has of them."""
    return tensors if plan.split is None else plan.split.share(tensors)


def while_whole(fake: FakeModel, plan: Plan) -> dict[str, Parts]:
    """What the phases of a rank gather of weights that are split: the policy's, or as much of a reference or critic."""
    if plan.split is None:
        return {}
    weights = {"weights gathered": whole_in_a_pass(fake.model, plan.split, plan.compute_bytes)}
    gradients = {"gradients not yet summed": whole_gradients(fake.model, plan.compute_bytes)}
    return {"probe": weights, "update": weights | gradients}


def apart(held: Parts, plan: Plan) -> tuple[Parts, Parts]:
    """What is on the device all the time, and what lies in main memory between its uses."""
    away = {name: size for name, size in held.items() if _offloaded(name, plan)}
    return {name: size for name, size in held.items() if name not in away}, away


def _offloaded(name: str, plan: Plan) -> bool:
    return plan.offload_optimizer if name in OPTIMIZER else plan.offload_reference and name == REFERENCE


def needed_in(phase: str, away: Parts, plan: Plan, piece: int) -> Parts:
    """What a phase brings back of all that lies in main memory. Of the optimizer's state it is a piece at a time, of
    one learner after the other, when activations are gone: counted with them, it is more than there ever is."""
    reads = {"probe": REFERENCE, "update": REFERENCE if plan.reference_in_update else None}
    here = {name: size for name, size in away.items() if name == reads.get(phase)}
    states = [min(piece, size) for name, size in away.items() if name in OPTIMIZER]
    return here | ({OF_A_PIECE: max(states)} if states and phase == "update" else {})


def held_by(tensors: Iterable[int], plan: Plan, width: int | None = None) -> int:
    """Bytes of tensors of so many numbers, as wide as what learns unless told. torch's allocator gives large ones on a
    GPU whole blocks of 2 MiB, and leaves the rest of the last one unused where it is no more than 1 MiB."""
    total = 0
    for numbers in tensors:
        size = numbers * (width or plan.weight_bytes)
        rest = -size % (2 * MIB) if plan.on_gpu and size >= 10 * MIB else 0
        total += size + (rest if rest <= MIB else 0)
    return total


def while_sampling(fake: FakeModel, plan: Plan, passes: Sequence[Parts]) -> list[Parts]:
    """The plain engine holds keys and values when what the prompts took is gone; that of graphs has its buffers from
    the beginning."""
    compute, batch = DTYPES[plan.compute], plan.limits.batch
    if not by_graphs(fake, plan):
        return [*passes, plain_parts(fake.model, compute, batch)]
    parts = graphs_parts(fake.model, compute, batch, plan.on_gpu)
    return [parts | each for each in passes]


def by_graphs(fake: FakeModel, plan: Plan) -> bool:
    return plan.graphs and not plan.four_bit and decodes_by_graphs(fake.model)


def _some(parts: Parts) -> Parts:
    return {name: size for name, size in parts.items() if size}


def fullest(*moments: Parts) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


def memory_parts(moment: tuple[str, int]) -> Parts:
    return {f"activations, {MOMENTS[moment[0]]}": moment[1]}


# ------------------------------------------------------------------------------------------------------------ by passes
def measure(fake: FakeModel, plan: Plan, wanted: Collection[str] = PHASES) -> tuple[Moments, str]:
    """Bytes of each phase and moment at the model's own depth, and how they were found.

    What a moment holds is linear in the layers of the language model and in those of the vision tower; what a phase
    holds is not, since the fullest moment of few layers may be another than that of many.
    """
    depth = fake.depth
    if sum(depth) <= WHOLE:
        return measure_at(fake, plan, wanted, depth), f"measured on fake tensors, with all {sum(depth)} layers"
    low = tuple(min(fake.few, layers) for layers in depth)
    base = measure_at(fake, plan, wanted, low)
    found = {phase: dict(moments) for phase, moments in base.items()}
    for which, (layers, few) in enumerate(zip(depth, low, strict=True)):
        if step := min(2, layers - few):
            more = measure_at(fake, plan, wanted, tuple(n + step * (i == which) for i, n in enumerate(low)))
            for phase, moment in ((p, m) for p in base for m in base[p]):
                slope = (more[phase][moment] - base[phase][moment]) / step
                found[phase][moment] += round(slope * (layers - few))
    fake.cut(*depth)
    extrapolated = f"extrapolated to {depth[0]}" + (f" and {depth[1]} of the vision tower" if depth[1] else "")
    return found, f"measured on fake tensors with {fake.few} and {fake.few + 2} layers, {extrapolated}"


def measure_at(fake: FakeModel, plan: Plan, wanted: Collection[str], depth: tuple[int, ...]) -> Moments:
    fake.cut(*depth)
    live = LiveTensors(fake=True)
    backbone = FakeBackbone(fake, DTYPES[plan.compute], live)
    forward = Forward(backbone, fake.encoder, share_prefix=plan.limits.update.share_prefix, packed=plan.packed)
    rehearsal = MemoryPreflight(forward, fake.encoder, plan.limits)
    found: Moments = {}

    def count(phase: str, work: Callable[[], object]) -> None:
        fake.model.train(phase in ("first", "second"))
        live.peaks.clear()
        live.begin("see")
        with live:
            work()
        found[phase] = dict(live.peaks)

    if "sample" in wanted:
        prompts, sampling = rehearsal.prompts, plan.limits.batch.sampling
        reading = graphs_pass if by_graphs(fake, plan) else partial(plain_pass, sampling=sampling)
        count("sample", partial(reading, backbone, fake.encoder, prompts))
    if "probe" in wanted:
        count("probe", rehearsal.probe)
    passes = rehearsal.updates() if "update" in wanted else []
    for phase, part in zip(("first", "second"), passes, strict=False):
        if phase == "second" and len(part) == len(passes[0]):
            found["second"] = found["first"]
        else:
            fake.fill_gradients()
            count(phase, partial(rehearsal.learn, part))
    return found


# -------------------------------------------------------------------------------------------------- what would help
def changes(plan: Plan) -> dict[str, Plan]:
    """What takes less memory, by the key that says so. Weights in bf16 do, but hardly learn at the usual rates."""
    limits, sampling = plan.limits, plan.limits.sampling
    longest = limits.prompt_tokens + sampling.max_new_tokens
    group = limits.prompt_tokens + sampling.n * sampling.max_new_tokens
    half_pass = max(longest, (limits.update.tokens or max(limits.update.at_least, group)) // 2)
    halved = MicroBatching(half_pass, share_prefix=limits.update.share_prefix)
    fewer, ranks = max(1, limits.prompts // 4), 1 if plan.split is None else plan.split.ranks
    per_update = math.gcd(fewer, limits.prompts_per_update)  # a step is cut into whole optimizer steps

    def within(**changed: Any) -> Plan:
        return replace(plan, limits=replace(limits, **changed))

    ways = {
        "optimization.disable_divergence=true": replace(plan, reference=False),
        "optimization.advantage_estimator=reinforce_plus_plus": replace(plan, critic=None),
        "worker.actor.offload.offload_optimizer=true": replace(plan, offload_optimizer=plan.on_gpu),
        "worker.ref.offload_params=true": replace(plan, offload_reference=plan.on_gpu and plan.reference),
        "worker.actor.fsdp.cpu_offload=true": to_main_memory(plan),
        "worker.actor.model.freeze_vision_tower=true": plan if plan.adapters else replace(plan, train_vision=False),
        "worker.actor.model.enable_gradient_checkpointing=true": replace(plan, checkpointing=True),
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
    return {way: changed for way, changed in ways.items() if changed != plan}


def to_main_memory(plan: Plan) -> Plan:
    """Weights that are split can lie there, with all that belongs to them; on a CPU they do."""
    if plan.split is None or not plan.on_gpu:
        return plan
    return replace(plan, split=replace(plan.split, in_main_memory=True), offload_optimizer=False)


def smaller(config: Any, plan: Plan, found: MemoryEstimate) -> list[tuple[str, int]]:
    """Changes that lower the peak by a fiftieth or more, the most helpful first, with the peak that they leave."""
    peaks = {way: peak_after(config, plan, changed, found) for way, changed in changes(plan).items()}
    worth = [(way, peak) for way, peak in peaks.items() if peak < 0.98 * found.peak_bytes]
    return sorted(worth, key=lambda way: way[1])


def peak_after(config: Any, plan: Plan, changed: Plan, found: MemoryEstimate) -> int:
    """Of a smaller plan. A phase is estimated anew only while it may be the fullest: none grows."""
    if replace(changed, reference=plan.reference) == plan and REFERENCE in found.held:
        return found.peak_bytes - found.held[REFERENCE]
    offload: Any = {"offload_optimizer": plan.offload_optimizer, "offload_reference": plan.offload_reference}
    if replace(changed, **offload) == plan:
        always, away = apart(found.held, changed)
        then = {phase: parts | needed_in(phase, away, changed, found.piece) for phase, parts in found.phases.items()}
        return replace(found, held=always, phases=then).peak_bytes
    phases, known = dict(found.phases), dict[str, MemoryEstimate]()
    while (top := max(phases, key=lambda phase: sum(phases[phase].values()))) not in known:
        known[top] = estimate(config, changed, [top])
        phases[top] = known[top].phases[top]
    return known[top].peak_bytes
