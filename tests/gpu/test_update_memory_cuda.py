"""Updates on a GPU whose memory is capped: smaller passes, and the same gradients. Skipped without a GPU."""

import gc
import logging

import pytest
import torch
from helpers import fake_batch
from tiny_models import prompt, random_rollouts

from mtrl.algorithms.losses import Loss, Ppo
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.perturb import Perturbation
from mtrl.models.views import ImageViews
from mtrl.workers.actor import LocalActor
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GROUPS, EACH, LENGTH = 8, 16, 256
LOSS = Loss(Ppo())


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    torch.cuda.set_per_process_memory_fraction(1.0)


def actor_with(batching):
    encoder = load_encoder(MODEL_DIRECTORY)
    return LocalActor(
        Forward(Backbone(load_model(MODEL_DIRECTORY, device="cuda")), encoder, share_prefix=True),
        OptimizerSettings(lr=1e-4, warmup_steps=0, max_grad_norm=1e9),
        views=ImageViews(Perturbation(seed=3)),
        update_batching=batching,
        probe_batching=batching,
        encoder_files={},
    )


def batch_for(actor):
    prompts = [prompt(actor.forward.encoder, f"t:{i}", "which colour is it", [(4, 4)]) for i in range(GROUPS)]
    group = [g for g in range(GROUPS) for _ in range(EACH)]
    rollouts = random_rollouts(prompts, group, [LENGTH] * len(group))
    generator = torch.Generator().manual_seed(1)
    old = -5 + torch.randn(rollouts.mask.shape, generator=generator)
    return fake_batch(rollouts, old, torch.randn(len(group), 1, generator=generator).expand(rollouts.mask.shape))


def learn(actor, batch):
    gradients = []
    hook = actor.learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(p.grad.clone() for p in actor.learner.parameters)
    )
    torch.cuda.reset_peak_memory_stats()
    metrics = actor.update([batch], LOSS)
    hook.remove()
    return gradients, metrics, torch.cuda.max_memory_allocated()


def test_a_capped_allocator_changes_no_gradients(caplog):
    """The cap is between the memory of whole passes and that of half passes."""
    given = MicroBatching(10**6)
    whole = actor_with(given)
    batch = batch_for(whole)
    half = whole.learner.batching.first_half(batch.rollouts)
    expected, metrics, most = learn(whole, batch)
    del whole
    smaller = actor_with(given.within(half))
    _, _, less = learn(smaller, batch)
    del smaller
    gc.collect()
    torch.cuda.empty_cache()
    assert less < 0.8 * most
    capped = actor_with(given)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((0.4 * less + 0.6 * most) / total)
    with caplog.at_level(logging.WARNING):
        found, result, _ = learn(capped, batch)
    assert capped.learner.cut_to == half and "with half of it" in caplog.text
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()) + 1e-9)
    assert result["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
