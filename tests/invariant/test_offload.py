"""Optimizer state and reference offloaded to CPU memory between their uses: bitwise the same numbers. There is no
device here; the copies are made all the same. On a GPU: tests/gpu/test_offload_cuda.py."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from offload_helpers import PoisonedWeights
from tiny_models import checkpoint, fresh_backbone, get_encoder, prompts_for
from update_helpers import FULL_LOSS, copy_weights, full_batch, rollouts_for

from mtrl.algorithms.value_loss import ValueLoss
from mtrl.compose.algorithm import make_algorithm
from mtrl.compose.policy import (
    build_actor,
    build_encoder,
    build_generator,
    build_policy,
    build_reference,
    build_weights,
)
from mtrl.config import load_config
from mtrl.models.adapters import AdapterSettings, add_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.parallel.fsdp import COMPUTE_DEVICE
from mtrl.models.perturb import Perturbation
from mtrl.models.value_head import load_value_model
from mtrl.models.views import ImageViews
from mtrl.rollout.lifecycle import EngineLifecycle
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs, Sampling
from mtrl.workers import offload
from mtrl.workers.actor import LocalActor
from mtrl.workers.critic import LocalCritic
from mtrl.workers.learner import Learner, OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import STAYING, OffloadedTensors, OffloadedWeights
from mtrl.workers.reference import Reference
from mtrl.workers.reward_model_worker import RewardModelWorker

FAMILY = "qwen2_5_vl"
WHOLE_VOCABULARY = replace(FULL_LOSS, divergence="full")
NEEDS = Needs("old_logprobs", "ref_logprobs")


def make_actor(parks, adapters=False):
    """Under adapters the reference has no weights of its own that could be offloaded."""
    model = fresh_backbone(FAMILY).model
    if adapters:
        pytest.importorskip("peft")
        add_adapters(model, AdapterSettings(lora_rank=4))
    forward = Forward(Backbone(model), get_encoder(FAMILY), share_prefix=True)
    return LocalActor(
        forward,
        OptimizerSettings(lr=1e-3, warmup_steps=0, total_steps=10, max_grad_norm=math.inf),
        views=ImageViews(Perturbation(seed=3)),
        update_batching=MicroBatching(),
        probe_batching=MicroBatching(),
        encoder_files={},
        reference=Reference.under_adapters(forward) if adapters else Reference.frozen(forward),
        offload_optimizer=parks,
        offload_reference=parks and not adapters,
    )


def learn(actor, steps=1, loss=FULL_LOSS):
    return [actor.update([full_batch(FAMILY)], loss) for _ in range(steps)], copy_weights(actor)


def places(tensors):
    return [tensor.data_ptr() for tensor in tensors]


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("loss", [FULL_LOSS, WHOLE_VOCABULARY], ids=["low_var_kl", "full"])
def test_numbers_are_bitwise_the_same(loss, adapters, monkeypatch):
    monkeypatch.setattr(offload, "PIECE", 2**14)  # as large models have it: many pieces, and weights that are larger
    plain, offloaded = make_actor(False, adapters), make_actor(True, adapters)
    assert 1 < len(offloaded.learner.pieces) < len(offloaded.learner.parameters)
    for _ in range(2):
        (ours, weights), (theirs, expected) = learn(offloaded, 1, loss), learn(plain, 1, loss)
        assert ours == theirs and same(weights, expected)
        found, wanted = (each.probe(rollouts_for(FAMILY), NEEDS, 0) for each in (offloaded, plain))
        assert torch.equal(found.ref_logprobs, wanted.ref_logprobs) and torch.equal(
            found.old_logprobs, wanted.old_logprobs
        )
    states, others = (each.snapshot().optimizer_state for each in (offloaded, plain))
    assert same(states, others) and len(states) > (50 if adapters else 100)
    assert not adapters or all(".lora_" in name for name in states), "the base has no optimizer state"


def test_offloaded_tensors_are_on_the_device_only_during_use():
    actor, seen = make_actor(True), []
    reference = list(actor.reference.forward.backbone.model.parameters())
    kept = places(reference)
    signals = actor.reference.start_signals

    def look(*arguments):
        seen.append(places(reference))
        return signals(*arguments)

    object.__setattr__(actor.reference, "start_signals", look)
    actor.probe(rollouts_for(FAMILY), NEEDS, 0)
    assert places(reference) == kept and set(seen[0]).isdisjoint(kept), "it returns to the same memory"
    learn(actor)
    states = actor.learner._large_states(actor.learner.parameters)
    kept = places(states)
    actor.learner.optimizer.register_step_pre_hook(lambda *_: seen.append(places(states)))
    learn(actor)
    assert places(states) == kept and set(seen[-1]).isdisjoint(kept)


def test_a_checkpoint_is_written_and_read_while_all_is_parked(tmp_path):
    whole, half, other = make_actor(True), make_actor(True), make_actor(True)
    learn(half, 2)
    half.snapshot().write(tmp_path)
    other.restore(tmp_path)
    rows, weights = learn(other, 1)
    expected, wanted = learn(whole, 3)
    assert rows == expected[2:] and same(weights, wanted)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_rounded_weights_take_their_steps_in_pieces_too(rounding, monkeypatch):
    """The random numbers are keyed by the index of a parameter among all."""
    weights = [torch.randn(9, 5, generator=torch.Generator().manual_seed(place)).bfloat16() for place in range(4)]
    plain, offloaded = (make_learner(weights, rounding, parks) for parks in (False, True))
    monkeypatch.setattr(offload, "PIECE", 200)
    offloaded.pieces = [(piece, OffloadedTensors(partial(offloaded._large_states, piece), torch.device("cpu")))
                     for piece in offload.parameter_pieces(offloaded.parameters)]  # fmt: skip
    assert len(offloaded.pieces) == 2
    for step in range(3):
        for learner in (plain, offloaded):
            for place, parameter in enumerate(learner.parameters):
                draw = torch.Generator().manual_seed(100 * step + place)
                parameter.grad = torch.randn(9, 5, generator=draw).bfloat16()
            learner._step_optimizer()
    assert all(map(torch.equal, plain.parameters, offloaded.parameters))


def make_learner(weights, rounding, parks):
    model = torch.nn.Module()
    model.device = torch.device("cpu")
    for place, weight in enumerate(weights):
        model.register_parameter(str(place), torch.nn.Parameter(weight.clone()))
    settings = OptimizerSettings(lr=1e-2, param_rounding=rounding)
    return Learner(model, settings, MicroBatching(), name="", advice="", offload=parks)


class OwnEngine(LocalGenerator):
    """An engine with its own copy of the weights, as vLLM's; it records where the trainer's are."""

    def __init__(self, weights):
        super().__init__(fresh_backbone(FAMILY), get_encoder(FAMILY))
        self.before_wake, self.trainer, self.seen = weights.offload, weights, []

    def wake(self):
        self.seen.append(self.trainer.is_offloaded)


class Judge:
    """A reward model that scores nothing and records where the policy's weights are."""

    def __init__(self, weights):
        self.weights, self.seen = weights, []

    def encode(self, *_):
        self.seen.append(getattr(self.weights, "is_offloaded", None))
        raise ValueError("unreadable")

    def resize_images(self, media):
        return media


def make_workers(weights_of, own_engine):
    """Actor, critic, engine and reward model of a process, as build_local_workers arranges them."""
    actor = make_actor(False)
    weights = weights_of(actor.model)
    actor.weights = weights
    batching = {"update_batching": MicroBatching(), "probe_batching": MicroBatching()}
    values = Forward(Backbone(load_value_model(checkpoint(FAMILY))), get_encoder(FAMILY))
    critic = LocalCritic(values, OptimizerSettings(lr=1e-3), encoder_files={}, policy_weights=weights, **batching)
    engine = OwnEngine(weights) if own_engine else LocalGenerator(actor.forward.backbone, get_encoder(FAMILY))
    engine.before_wake = weights.offload if own_engine else weights.onload
    judge = RewardModelWorker(Judge(weights), MicroBatching())
    judge.policy_weights = weights
    return actor, critic, engine, judge, weights


def take_steps(workers, parts, steps=2):
    """The phases of the loop, in its order; `parts`: the models that compute in addition to the actor."""
    actor, critic, engine, judge, weights = workers
    found = []
    with engine.resident():
        engine.load(actor.publish())
    for step in range(steps):
        with engine.resident():
            rollouts = engine.generate(prompts_for(FAMILY), Sampling(n=2, max_new_tokens=6, step=step, version=step))
        if "reward model" in parts:
            judge.score(rollouts)
        signals = actor.probe(rollouts, NEEDS, step)
        found += [rollouts.tokens.tolist(), signals.old_logprobs.tolist(), signals.ref_logprobs.tolist()]
        batch = full_batch(FAMILY)
        if "critic" in parts:
            found.append(critic.probe(rollouts, Needs("values"), step).values.tolist())
            assert weights.is_offloaded == (weights is not STAYING), "from its probe on"
            values = replace(batch, values=batch.old_logprobs, returns=batch.advantage)
            found.append(critic.update([values], ValueLoss(0.5)))
        found.append(actor.update([batch], FULL_LOSS))
        with engine.resident():
            engine.load(actor.publish())
    return found, copy_weights(actor)


BOTH = ("critic", "reward model")
MOVES = [  # whether the engine has its own weights, the other models, and the moves before and in each step
    (False, ("critic",), [], ["off", "on"]),
    (False, BOTH, [], ["off", "on", "off", "on"]),  # the rewards are computed between generation and probe
    (True, (), ["off"], ["on", "off"]),
    (True, BOTH, ["off"], ["on", "off", "on", "off"]),  # the reward model finds the room that the engine had
]


@pytest.mark.parametrize(
    ("own_engine", "parts", "before", "in_step"),
    [pytest.param(*each, marks=() if i in (0, 3) else pytest.mark.slow) for i, each in enumerate(MOVES)],
)
def test_weights_make_room_with_few_moves(own_engine, parts, before, in_step):
    workers = make_workers(PoisonedWeights, own_engine)
    found, weights = take_steps(workers, parts)
    expected, wanted = take_steps(make_workers(lambda _: STAYING, own_engine), parts)
    assert found == expected and same(weights, wanted)
    *_, engine, judge, moved = workers
    assert moved.moves == before + in_step * 2
    assert not own_engine or all(engine.seen)
    assert all(judge.model.seen) and bool(judge.model.seen) == ("reward model" in parts)
    moved.close()
    assert not moved.is_offloaded and same(copy_weights(workers[0]), wanted)
    assert not hasattr(moved.model, COMPUTE_DEVICE)


def test_a_checkpoint_is_written_while_the_weights_are_offloaded(tmp_path):
    whole, half, other = make_actor(True), make_actor(True), make_actor(True)
    half.weights, other.weights = PoisonedWeights(half.model), PoisonedWeights(other.model)
    learn(half, 2)
    half.weights.offload()
    snapshot = half.snapshot()
    snapshot.write(tmp_path)
    other.weights.offload()
    other.restore(tmp_path)
    rows, weights = learn(other, 1)
    expected, wanted = learn(whole, 3)
    assert rows == expected[2:] and same(weights, wanted)


def test_the_device_of_a_model_is_that_of_its_passes_while_it_is_offloaded():
    """Batch sizes and the preflight go by it."""
    backbone = fresh_backbone(FAMILY)
    weights = OffloadedWeights(backbone.model)
    weights.offload()
    backbone.model.to("meta")
    assert backbone.device == torch.device("cpu")


def test_an_error_leaves_all_parked():
    tensor = torch.ones(3)
    offloaded = OffloadedTensors(lambda: [tensor], torch.device("cpu"))
    offloaded.offload()
    place = tensor.data_ptr()
    with pytest.raises(ValueError, match="in the middle"), offloaded.onloaded():
        tensor += 1
        assert tensor.data_ptr() != place
        raise ValueError("in the middle")
    assert tensor.data_ptr() == place and tensor.tolist() == [2, 2, 2]


def test_the_keys_take_effect_if_there_is_a_device(monkeypatch):
    """On a CPU nothing is offloaded: everything is in CPU memory."""
    keys = {"worker.actor.offload.offload_optimizer": True, "worker.ref.offload_params": True,
            "optimization.disable_divergence": False}  # fmt: skip
    config = load_config(None, keys)
    encoder, policy = build_policy(config, build_encoder(config))
    given = {}

    class Told:
        def __init__(self, *_, **options):
            given.update(options)

    monkeypatch.setattr("mtrl.compose.policy.LocalActor", Told)
    rules = make_algorithm(config, 1)
    build_actor(config, policy, encoder, 1, build_reference(policy, rules))
    assert (given["offload_optimizer"], given["offload_reference"]) == (False, False)
    monkeypatch.setattr(type(policy.backbone), "device", torch.device("cuda"))
    build_actor(config, policy, encoder, 1)
    assert (given["offload_optimizer"], given["offload_reference"]) == (True, True)


@pytest.mark.parametrize("engine", ["vllm", "local"])
def test_weights_make_room_on_a_gpu_alone(engine, monkeypatch):
    config = load_config(None, {"worker.actor.offload.offload_params": True, "worker.rollout.name": engine})
    encoder, policy = build_policy(config, build_encoder(config))
    monkeypatch.setattr("mtrl.compose.vllm_engine.build_vllm", lambda *_: EngineLifecycle())
    assert build_weights(config, policy) is STAYING, "on a CPU there is nothing to do"
    assert build_generator(config, policy, encoder).before_wake is EngineLifecycle.before_wake
    weights = OffloadedWeights(policy.backbone.model)
    before_wake = build_generator(config, policy, encoder, weights=weights).before_wake
    assert before_wake == (weights.offload if engine == "vllm" else weights.onload)
    monkeypatch.setattr(type(policy.backbone), "device", torch.device("cuda"))
    found = build_weights(config, policy)
    assert places(found.tensors.tensors()) == places(policy.backbone.model.parameters())
    fsdp = replace(config.worker.actor.fsdp, cpu_offload=True)
    always = replace(config, worker=replace(config.worker, actor=replace(config.worker.actor, fsdp=fsdp)))
    assert build_weights(always, policy) is STAYING
