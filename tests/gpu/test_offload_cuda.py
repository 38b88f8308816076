"""Optimizer state, reference and weights offloaded to CPU memory between their uses, on a GPU: bitwise the same
numbers, and the device memory is free in between. Skipped without a GPU."""

import gc

import pytest
import torch
from helpers import fake_batch
from run_helpers import read_metrics, tiny_settings
from tiny_models import prompt, random_rollouts

import mtrl
from mtrl.algorithms.losses import Loss, Ppo
from mtrl.config import read_overrides
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.perturb import Perturbation
from mtrl.models.views import ImageViews
from mtrl.types import Needs
from mtrl.workers.actor import LocalActor
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import STAYING, OffloadedWeights
from mtrl.workers.reference import Reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LOSS, NEEDS = Loss(Ppo()), Needs("old_logprobs", "ref_logprobs")


@pytest.fixture(autouse=True)
def same_kernels():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def actor_with(offload):
    forward = Forward(Backbone(load_model(MODEL_DIRECTORY, device="cuda")), load_encoder(MODEL_DIRECTORY))
    return LocalActor(
        forward,
        OptimizerSettings(lr=1e-4, warmup_steps=0),
        views=ImageViews(Perturbation(seed=3)),
        update_batching=MicroBatching(),
        probe_batching=MicroBatching(),
        encoder_files={},
        reference=Reference.frozen(forward),
        offload_optimizer=offload,
        offload_reference=offload,
    )


def learnt(offload, moves=False):
    """Signals, metrics and weights of three steps; and bytes on the device after them. With `moves` the weights make
    room before each step."""
    actor = actor_with(offload)
    actor.weights = OffloadedWeights(actor.model) if moves else STAYING
    prompts = [prompt(actor.forward.encoder, f"t:{i}", "which colour is it", [(2, 2)]) for i in range(3)]
    rollouts = random_rollouts(prompts, [0, 0, 1, 1, 2], [9, 5, 7, 7, 3])
    advantage = torch.randn(5, 1, generator=torch.Generator().manual_seed(1)).expand(rollouts.mask.shape)
    signals, metrics = [], []
    for step in range(3):
        actor.weights.offload()
        assert not moves or all(p.is_pinned() for p in actor.model.parameters())
        signals.append(actor.probe(rollouts, NEEDS, step))
        metrics.append(actor.update([fake_batch(rollouts, signals[-1].old_logprobs, advantage)], LOSS))
    actor.weights.offload()
    gc.collect()
    torch.cuda.empty_cache()
    weights = {name: weight.cpu() for name, weight in actor.model.state_dict().items()}
    return signals, metrics, weights, torch.cuda.memory_allocated()


def test_numbers_are_the_same_and_the_room_is_free():
    signals, metrics, weights, held = learnt(False)
    gc.collect()
    ours, result, found, less = learnt(True)
    assert result == metrics and all(torch.equal(found[name], weight) for name, weight in weights.items())
    for a, b in zip(ours, signals, strict=True):
        assert torch.equal(a.ref_logprobs, b.ref_logprobs) and torch.equal(a.old_logprobs, b.old_logprobs)
    parameters = sum(weight.nbytes for weight in weights.values())
    assert less < held - 2.5 * parameters, "three of five copies of the weights are offloaded"


def test_weights_make_room_between_steps():
    signals, metrics, weights, held = learnt(False)
    gc.collect()
    ours, result, found, less = learnt(False, moves=True)
    assert result == metrics and all(torch.equal(found[name], weight) for name, weight in weights.items())
    for a, b in zip(ours, signals, strict=True):
        assert torch.equal(a.ref_logprobs, b.ref_logprobs) and torch.equal(a.old_logprobs, b.old_logprobs)
    assert less < held - 0.5 * sum(weight.nbytes for weight in weights.values()), "one copy of the weights"


def test_a_single_process_with_cpu_offload_trains(tmp_path):
    """It is the only rank of an NCCL group, which ends with the run."""
    keys = read_overrides(tiny_settings()) | {"training.output_dir": str(tmp_path), "training.max_steps": 2}
    run = mtrl.Trainer(**keys, **{"worker.actor.fsdp.cpu_offload": True}).train()
    assert (1, False) in read_metrics(run) and not torch.distributed.is_initialized()


def test_states_are_pinned_and_return_to_the_same_memory():
    actor = actor_with(True)
    prompts = [prompt(actor.forward.encoder, "t:0", "how many")]
    rollouts = random_rollouts(prompts, [0, 0], [9, 5])
    batch = fake_batch(rollouts, torch.zeros(rollouts.mask.shape), torch.ones(rollouts.mask.shape))
    actor.update([batch], LOSS)
    states = actor.learner._large_states(actor.learner.parameters)
    places = [state.data_ptr() for state in states]
    assert all(state.device.type == "cpu" and state.is_pinned() for state in states)
    actor.update([batch], LOSS)
    assert [state.data_ptr() for state in states] == places
