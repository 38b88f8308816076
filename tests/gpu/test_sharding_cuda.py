"""One NCCL rank: a model sharded by FSDP2 learns the same as the plain one. Skipped without a GPU."""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tiny_models import checkpoint, get_encoder, prompts_for, random_rollouts

from mtrl.algorithms.losses import Loss, Ppo, loss_weights
from mtrl.distributed.torchrun_group import join_ranks
from mtrl.memory.preflight import Limits, preflight
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.load_model import empty_model, load_model
from mtrl.models.parallel.fsdp import Sharding, is_sharded, local_tensor, weight_memory
from mtrl.models.parallel.ranks import SINGLE_PROCESS
from mtrl.models.perturb import Perturbation
from mtrl.models.state_dicts import exported_weights
from mtrl.models.views import ImageViews
from mtrl.types import Needs, Sampling, TrainBatch
from mtrl.workers.actor import LocalActor
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import OffloadedWeights
from mtrl.workers.reference import Reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def ranks():
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29541",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    yield join_ranks()
    dist.destroy_process_group()


def make_actor(ranks, compute, cpu_offload=False, offload_optimizer=False, reference=False):
    device = torch.device("cuda", 0)
    if ranks.group is None:
        model = load_model(checkpoint(FAMILY), device=device)
    else:
        sharding = Sharding(ranks, device, compute_dtype=compute, cpu_offload=cpu_offload)
        model = sharding.load_sharded(empty_model(checkpoint(FAMILY)), lambda: load_model(checkpoint(FAMILY)))
        assert is_sharded(model)
    batching = MicroBatching(tokens=60, ranks=ranks)
    forward = Forward(Backbone(model, compute, ranks=ranks), get_encoder(FAMILY))
    frozen = None
    if reference:
        other = replace(sharding, cpu_offload=True)
        frozen = Reference.from_model(
            other.load_sharded(empty_model(checkpoint(FAMILY)), lambda: load_model(checkpoint(FAMILY))), forward
        )
    return LocalActor(
        forward,
        OptimizerSettings(lr=1e-4, warmup_steps=0, max_grad_norm=0.01),
        views=ImageViews(Perturbation(seed=3)),
        update_batching=batching,
        probe_batching=batching,
        encoder_files={},
        reference=frozen,
        offload_optimizer=offload_optimizer,
    )


def learn(actor):
    rollouts = random_rollouts(prompts_for(FAMILY), [0, 0, 1, 1, 2, 3], [6, 2, 4, 3, 8, 5])
    mask = rollouts.mask
    advantage = torch.randn(len(mask), 1, generator=torch.Generator().manual_seed(1)).expand(mask.shape)
    old = actor.probe(rollouts, Needs("old_logprobs"), 0).old_logprobs
    batch = TrainBatch(
        rollouts, old, advantage.where(mask, 0.0), torch.ones(mask.shape), loss_weights(mask.float(), mask, "dapo", 16)
    )
    return old, [actor.update([batch], Loss(Ppo())) for _ in range(3)]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_sharded_model_learns_like_the_plain_one(ranks, compute):
    plain, split = make_actor(SINGLE_PROCESS, compute), make_actor(ranks, compute)
    (old, metrics), (their_old, their_metrics) = learn(plain), learn(split)
    exact = compute == torch.float32
    torch.testing.assert_close(their_old, old, rtol=0, atol=1e-4 if exact else 0.2)
    for ours, theirs in zip(metrics, their_metrics, strict=True):
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3 if exact else 0.1)
    weights = exported_weights(plain.model)
    for name, weight in exported_weights(split.model).items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=2e-5 if exact else 1e-3)


@pytest.mark.parametrize("way", ["cpu_offload", "offload_optimizer"])
def test_offloaded_it_learns_the_same(ranks, way, tmp_path):
    """With `cpu_offload`, AdamW steps on the CPU, with other rounding; the run resumes from a checkpoint in between. A
    reference in CPU memory gives the policy's log-probs before the first update."""
    split, offloaded = make_actor(ranks, torch.float32), make_actor(ranks, torch.float32, **{way: True}, reference=True)
    (old, metrics), (their_old, their_metrics) = learn(split), learn(offloaded)
    torch.testing.assert_close(their_old, old, rtol=0, atol=1e-4)
    for ours, theirs in zip(metrics, their_metrics, strict=True):
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
    check_same(offloaded, split, atol=2e-5)
    check_places(offloaded, way)
    rollouts = random_rollouts(prompts_for(FAMILY), [0, 0, 1, 1, 2, 3], [6, 2, 4, 3, 8, 5])
    torch.testing.assert_close(
        offloaded.probe(rollouts, Needs("ref_logprobs"), 0).ref_logprobs, their_old, rtol=0, atol=1e-4
    )
    offloaded.snapshot().write(tmp_path)
    again = make_actor(ranks, torch.float32, **{way: True})
    again.restore(tmp_path)
    check_places(again, way)
    learn(again), learn(split)
    check_same(again, split, atol=1e-4)  # after six steps of about 1e-4


def test_shards_that_make_room_learn_the_same(ranks, tmp_path):
    split, moved = make_actor(ranks, torch.float32), make_actor(ranks, torch.float32)
    moved.weights = OffloadedWeights(moved.model)
    held = torch.cuda.memory_allocated()
    moved.weights.offload()
    assert all(shard.is_pinned() for shard in weight_memory(moved.model))
    assert held - torch.cuda.memory_allocated() > 0.9 * sum(shard.nbytes for shard in weight_memory(moved.model))
    assert {local_tensor(parameter).device.type for parameter in moved.model.parameters()} == {"cpu"}
    (old, _), (their_old, _) = learn(split), learn(moved)
    torch.testing.assert_close(their_old, old, rtol=0, atol=1e-4)
    moved.weights.offload()
    check_same(moved, split, atol=2e-5)
    moved.snapshot().write(tmp_path)
    again = make_actor(ranks, torch.float32)
    again.weights = OffloadedWeights(again.model)
    again.weights.offload()
    again.restore(tmp_path)
    learn(again), learn(split)
    check_same(again, split, atol=1e-4)


def test_a_preflight_changes_no_state(ranks):
    limits = Limits(
        prompts=2, prompts_per_update=2, sampling=Sampling(n=2, max_new_tokens=4), prompt_tokens=40, max_pixels=56**2,
        update=MicroBatching(60), probe=MicroBatching(60), needs=Needs("old_logprobs", "entropy", "dependency"),
    )  # fmt: skip
    plain, rehearsed = make_actor(ranks, torch.bfloat16), make_actor(ranks, torch.bfloat16)
    peaks = preflight(rehearsed.forward, get_encoder(FAMILY), limits, None, has_states=False)
    assert list(peaks) == ["optimizer", "probe", "update"] and min(peaks.values()) > 0
    learn(plain), learn(rehearsed)
    check_same(rehearsed, plain, atol=1e-3)


def check_same(found, expected, atol):
    weights = exported_weights(expected.model)
    for name, weight in exported_weights(found.model).items():
        assert weight.device.type == "cuda", "engines take them from there"
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=atol)


def check_places(actor, way):
    """Between steps; parts of weights and of the optimizer's state."""
    learner = actor.learner
    weights, states = map(local_tensor, learner.parameters), learner._large_states(learner.parameters)
    where = "cpu" if way == "cpu_offload" else "cuda"
    assert {weight.device.type for weight in weights} == {where}
    assert {state.device.type for state in states} == {"cpu"}
    if actor.reference is not None:
        assert {local_tensor(p).device.type for p in actor.reference.forward.backbone.model.parameters()} == {"cpu"}
