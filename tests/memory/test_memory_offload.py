"""Offloaded tensors take no device memory in other phases: in the estimate, the advice and the preflight."""

from dataclasses import replace

import pytest
from offload_helpers import PoisonedWeights
from tiny_models import checkpoint, fresh_backbone, get_encoder

from mtrl.compose.memory_limits import make_plan
from mtrl.config import load_config
from mtrl.memory.estimate import (
    MemoryEstimate,
    count_held,
    estimate,
    estimate_peak,
    onloaded_in,
    split_offloaded,
)
from mtrl.memory.fake_model import FakeModel
from mtrl.memory.plan import Plan, list_savings
from mtrl.memory.preflight import Limits, preflight
from mtrl.memory.shard_sizes import Split
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_model_config
from mtrl.models.forward import Forward
from mtrl.models.load_model import DTYPES
from mtrl.models.model_size import ModelSize, model_size
from mtrl.models.value_head import load_value_model
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs, Sampling
from mtrl.workers import offload
from mtrl.workers.micro_batches import MicroBatching

LIMITS = Limits(
    prompts=2, prompts_per_update=2, sampling=Sampling(n=2, max_new_tokens=4), prompt_tokens=40, max_pixels=56**2,
    update=MicroBatching(), probe=MicroBatching(), needs=Needs("old_logprobs", "entropy"),
)  # fmt: skip
PLAN = Plan(LIMITS, reference=True, on_gpu=True)
# 40 are held and sampling is the fullest phase, at 70; then the update, then the probe.
FOUND = MemoryEstimate(
    1, {"weights": 10, "weights of the reference": 10, "optimizer state": 20},
    {"sample": {"keys": 30}, "probe": {"a": 5}, "update": {"b": 18}}, "by hand", piece=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "peak"),
    [
        ({"offload_optimizer": True}, 50),  # held 20; sampling 50, the update 20 + 3 + 18
        ({"offload_reference": True}, 60),  # held 30; sampling 60, the update 48, the probe 45
        ({"offload_optimizer": True, "offload_reference": True}, 40),  # held 10; sampling 40, the update 10 + 3 + 18
        ({"offload_optimizer": True, "offload_reference": True, "reference_in_update": True}, 41),
    ],
)
def test_peaks_by_hand(changed, peak):
    plan = replace(PLAN, reference_in_update=changed.get("reference_in_update", False))
    assert estimate_peak(None, plan, replace(plan, **changed), FOUND) == peak


def test_it_is_counted_in_the_phases_that_need_it():
    size = ModelSize(tensors=(700,), learning=(700,), vocabulary=10, output=80, layers=3, keys=4, read=600)
    plan = replace(PLAN, on_gpu=False, offload_optimizer=True, offload_reference=True)
    always, away = split_offloaded(count_held(size, plan), plan)
    assert always == {"weights": 2800}
    assert away == {"weights of the reference": 2800, "optimizer state": 2 * 2800}
    assert onloaded_in("sample", away, plan, 1000) == {}
    assert onloaded_in("probe", away, plan, 1000) == {"weights of the reference": 2800}
    assert onloaded_in("update", away, plan, 1000) == {"optimizer state, a piece at a time": 1000}
    assert onloaded_in("update", away, plan, 9000) == {"optimizer state, a piece at a time": 5600}, (
        "everything at the same time"
    )
    assert count_held(size, replace(plan, states=3))["optimizer state"] == 3 * 2800, "kahan has a third state"


def test_it_is_advised_where_it_would_help():
    ways = {"worker.actor.offload.offload_optimizer=true", "worker.ref.offload_params=true"}
    assert ways <= list_savings(PLAN).keys()
    assert ways.isdisjoint(list_savings(replace(PLAN, on_gpu=False)).keys()), "a CPU has no other memory"
    assert "worker.ref.offload_params=true" not in list_savings(replace(PLAN, reference=False))
    assert ways.isdisjoint(list_savings(replace(PLAN, offload_optimizer=True, offload_reference=True)).keys())


def test_the_keys_are_in_the_plan():
    keys = {"worker.actor.offload.offload_optimizer": True, "worker.ref.offload_params": True,
            "optimization.disable_divergence": False, "worker.actor.fsdp.param_dtype": "bf16",
            "worker.actor.fsdp.param_rounding": "kahan"}  # fmt: skip
    plan = make_plan(load_config(None, keys), on_gpu=True)
    assert (plan.offload_optimizer, plan.offload_reference, plan.states) == (True, True, 3)
    plan = make_plan(load_config(None, keys | {"optimization.disable_divergence": True}), on_gpu=True)
    assert not plan.offload_reference, "there is none"


def config_for(**overrides):
    keys = {
        "worker.actor.model.model_path": str(checkpoint("qwen2")), "worker.rollout.name": "local",
        "optimization.disable_divergence": False,
    }  # fmt: skip
    return load_config(None, keys | overrides)


def estimated(**overrides):
    config = config_for(**overrides)
    return estimate(load_model_config(str(checkpoint("qwen2"))), make_plan(config, on_gpu=True))


@pytest.fixture
def by_hand(monkeypatch):
    """Activations that need no passes: the update's are the largest, and the log-probs' are small."""
    moments = {"sample": {"text": 50}, "probe": {"text": 60}, "first": {"end": 10}, "second": {"text": 900, "score": 8}}
    monkeypatch.setattr("mtrl.memory.estimate.measure", lambda fake, plan, wanted: (moments, "by hand"))


PARAMS, CPU_OFFLOAD = {"worker.actor.offload.offload_params": True}, {"worker.actor.fsdp.cpu_offload": True}


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_count_in_the_phases_that_read_them(ranks):
    plain, moved = (estimated(**{"training.n_gpus_per_node": ranks, **keys}) for keys in ({}, PARAMS))
    weights = plain.held["weights"]
    assert moved.held == {name: size for name, size in plain.held.items() if name != "weights"}
    for phase, parts in plain.phases.items():
        reads = phase != "sample" or ranks == 1  # on ranks the engine has its own copy
        assert moved.phases[phase] == ({"weights": weights} if reads else {}) | parts
    assert moved.peak_bytes == plain.peak_bytes if ranks == 1 else moved.peak_bytes <= plain.peak_bytes


VLLM_SHARE = {
    "worker.rollout.name": "vllm", "worker.rollout.gpu_memory_utilization": 0.25,
    "worker.rollout.tensor_parallel_size": 2, "training.n_gpus_per_node": 2,
}  # fmt: skip


@pytest.mark.usefixtures("by_hand")
def test_vllm_takes_its_share_while_it_samples_and_its_weights_sleep_in_cpu_memory():
    config, model = config_for(**PARAMS, **VLLM_SHARE), load_model_config(str(checkpoint("qwen2")))
    found = estimate(model, make_plan(config, on_gpu=True, device_bytes=80 << 30))
    assert found.phases["sample"] == {"vLLM: weights, keys and values": 20 << 30}, "the actor's weights made room"
    width = DTYPES[config.worker.actor.fsdp.mixed_precision_dtype].itemsize
    assert found.in_cpu_memory["weights of vLLM, asleep"] == found.parameters * width // 2
    assert found.in_cpu_memory["weights"] == found.phases["probe"]["weights"]
    server = {"worker.rollout.mode": "server", "worker.rollout.address": "host:1", "worker.rollout.name": "vllm"}
    for keys, size in ((VLLM_SHARE, 0), (server, 80 << 30), ({}, 80 << 30)):
        assert make_plan(config_for(**keys), on_gpu=True, device_bytes=size).vllm is None


@pytest.mark.usefixtures("by_hand")
def test_what_is_streamed_is_in_cpu_memory():
    """Weights, gradients and optimizer state that the device of a rank would hold."""
    held, streamed = (estimated(**{"training.n_gpus_per_node": 2}, **keys) for keys in ({}, CPU_OFFLOAD))
    for name in ("weights", "weights of the reference", "optimizer state"):
        assert name not in streamed.held and streamed.in_cpu_memory[name] == held.held[name]
    assert streamed.in_cpu_memory["gradients"] == held.phases["update"]["gradients"] and not held.in_cpu_memory


@pytest.mark.usefixtures("by_hand")
def test_a_critic_learns_without_the_weights_of_the_actor():
    """Next to adapters its gradients are the largest part of an update."""
    adapters = {"worker.actor.model.peft_type": "lora", "optimization.advantage_estimator": "gae"}
    plain, moved = estimated(**adapters), estimated(**adapters, **PARAMS)
    assert "gradients of the critic" in plain.phases["update"] and moved.phases["update"] == plain.phases["update"]
    assert "weights" in plain.held and "weights" not in moved.held


@pytest.mark.usefixtures("by_hand")
def test_moving_weights_is_advised_where_the_engine_has_its_own():
    key = "worker.actor.offload.offload_params=true"
    model = load_model_config(str(checkpoint("qwen2")))
    for ranks in (1, 2):
        plan = make_plan(config_for(**{"training.n_gpus_per_node": ranks}), on_gpu=True)
        found = estimate(model, plan)
        peak = estimate_peak(model, plan, list_savings(plan)[key], found)
        assert peak == estimate(model, list_savings(plan)[key]).peak_bytes
        assert key not in list_savings(replace(plan, on_gpu=False))
    assert key not in list_savings(make_plan(config_for(**CPU_OFFLOAD), on_gpu=True))
    assert key not in list_savings(make_plan(config_for(**PARAMS), on_gpu=True))


def test_one_process_with_cpu_offload_is_one_rank():
    plan = make_plan(config_for(**CPU_OFFLOAD, **PARAMS), on_gpu=True)
    assert plan.split == Split(cpu_offload=True, own_engine=True) and not plan.offload_weights
    size = model_size(FakeModel(load_model_config(str(checkpoint("qwen2"))), plan).model)
    assert count_held(size, plan).keys() == {"weights of the engine", "workspaces of cuBLAS"}
    advised = list_savings(make_plan(config_for(**PARAMS), on_gpu=True))["worker.actor.fsdp.cpu_offload=true"]
    assert advised.split == plan.split and not advised.offload_weights


def test_the_preflight_has_the_weights_where_the_step_has_them():
    forward = Forward(fresh_backbone("qwen2"), get_encoder("qwen2"))
    weights, seen = PoisonedWeights(forward.backbone.model), []
    engine = LocalGenerator(fresh_backbone("qwen2"), forward.encoder)
    engine.before_wake = weights.offload
    engine.preflight = lambda *_: seen.append(weights.is_offloaded)
    critic = Forward(Backbone(load_value_model(checkpoint("qwen2"))), forward.encoder)
    critic.backbone.model.register_forward_pre_hook(lambda *_: seen.append(weights.is_offloaded))
    preflight(forward, forward.encoder, LIMITS, engine, has_states=True, critic=critic, weights=weights)
    assert seen[0] and all(seen) and weights.moves == ["off", "on", "off"]


@pytest.mark.parametrize(("offloaded", "has_states"), [(False, False), (False, True), (True, False), (True, True)])
def test_the_preflight_takes_their_room_when_they_will_be_there(offloaded, has_states, monkeypatch):
    forward = Forward(fresh_backbone("qwen2"), get_encoder("qwen2"))
    engine = LocalGenerator(forward.backbone, forward.encoder)
    monkeypatch.setattr(offload, "PIECE", 1)  # every weight is one
    peaks = preflight(forward, forward.encoder, LIMITS, engine, has_states=has_states, states=3, offloaded=offloaded)
    numbers = [parameter.numel() for parameter in forward.backbone.model.parameters()]
    room = max(numbers) if offloaded else 0 if has_states else sum(numbers)
    assert peaks["optimizer"] == 3 * 4 * room
    order = ["optimizer", "sample", "probe", "update"]
    assert list(peaks) == (["sample", "probe", "optimizer", "update"] if offloaded else order)
