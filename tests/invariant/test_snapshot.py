"""Snapshots of the actor: plain transformers computes the same log-probs, and a restored actor continues bitwise."""

import pytest
import torch
from helpers import same
from tiny_models import (
    TINY_FAMILIES,
    checkpoint,
    fresh_backbone,
    get_encoder,
    plain_logp,
    plain_model_at,
    prompts_for,
    random_rollouts,
)

from mtrl.algorithms.losses import Loss, loss_weights
from mtrl.checkpoint.folder_store import FolderStore
from mtrl.checkpoint.learner_snapshot import OPTIMIZER_STATE
from mtrl.models.families import encoder_files, load_encoder
from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.models.views import ImageViews
from mtrl.types import Needs, TrainBatch
from mtrl.workers.actor import LocalActor
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching

GROUP, LENGTHS = [0, 0, 1, 3], [6, 2, 4, 5]


def make_actor(family):
    """An actor whose next update depends on learning rate, optimizer state and step numbers."""
    return LocalActor(
        Forward(fresh_backbone(family), get_encoder(family)),
        OptimizerSettings(lr=1e-3, warmup_steps=2, total_steps=6, lr_scheduler_type="cosine"),
        views=ImageViews(Perturbation(seed=3)),
        update_batching=MicroBatching(rows=4),
        probe_batching=MicroBatching(rows=4),
        encoder_files=encoder_files(get_encoder(family), checkpoint(family)),
    )


def batch(actor, family, seed):
    rollouts = random_rollouts(prompts_for(family), GROUP, LENGTHS, seed)
    mask = rollouts.mask
    advantage = torch.randn(len(GROUP), 1, generator=torch.Generator().manual_seed(seed)).expand(mask.shape)
    old = actor.probe(rollouts, Needs("old_logprobs"), 0).old_logprobs
    weights = loss_weights(mask.float(), mask, "dapo", 16)
    return TrainBatch(rollouts, old, advantage.where(mask, 0.0), torch.ones(mask.shape), weights)


def learn(actor, family, seed):
    return actor.update([batch(actor, family, seed)], Loss())


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_restored_actor_continues_bitwise(family, tmp_path):
    actor = make_actor(family)
    learn(actor, family, 1)
    learn(actor, family, 2)
    rollouts = random_rollouts(prompts_for(family), GROUP, LENGTHS, 9)
    logp = actor.probe(rollouts, Needs("old_logprobs"), 0).old_logprobs
    copy = actor.snapshot().detached()
    expected = learn(actor, family, 3)  # the copy does not change
    copy.write(tmp_path)

    plain = plain_logp(family, rollouts, model=plain_model_at(tmp_path, family)).detach()
    torch.testing.assert_close(plain, logp, rtol=0, atol=1e-5)
    assert not torch.allclose(plain, actor.probe(rollouts, Needs("old_logprobs"), 0).old_logprobs, atol=1e-3), (
        "not the later weights"
    )
    assert load_encoder(tmp_path).fingerprint() == get_encoder(family).fingerprint()

    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"], "servers read them all"

    restored = make_actor(family)
    restored.restore(tmp_path)
    assert (restored.learner.version, restored.learner.optimizer_step) == (2, 2)
    assert learn(restored, family, 3) == expected
    for mine, theirs in zip(restored.model.parameters(), actor.model.parameters(), strict=True):
        same(mine, theirs)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_published_weights_equal_saved_ones(family, tmp_path):
    actor = make_actor(family)
    learn(actor, family, 1)
    published = actor.publish().tensors
    actor.snapshot().write(tmp_path)
    saved = plain_model_at(tmp_path, family).state_dict()
    assert published.keys() == saved.keys()
    for name, tensor in published.items():
        same(tensor, saved[name])


def test_the_size_is_known_before_anything_is_written(tmp_path):
    actor = make_actor("qwen2_5_vl")
    learn(actor, "qwen2_5_vl", 1)
    snapshot = actor.snapshot()
    snapshot.write(tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 0.9 * written < snapshot.nbytes < 1.1 * written


def test_a_live_snapshot_follows_the_weights(tmp_path):
    actor = make_actor("qwen2_5_vl")
    live, copy = actor.snapshot(), actor.snapshot().detached()
    learn(actor, "qwen2_5_vl", 1)
    name, weight = next(iter(actor.model.state_dict().items()))
    same(live.weights[name], weight)
    assert not torch.equal(copy.weights[name], weight)


def test_a_checkpoint_of_another_model_is_an_error(tmp_path):
    make_actor("qwen3_vl").snapshot().write(tmp_path)
    with pytest.raises(ValueError, match="another model"):
        make_actor("qwen2_5_vl").restore(tmp_path)


def test_optimizer_state_of_other_parameters_is_an_error(tmp_path):
    actor = make_actor("qwen2_5_vl")
    learn(actor, "qwen2_5_vl", 1)
    actor.snapshot().write(tmp_path)
    actor.learner.names.pop(next(iter(actor.learner.names)))
    with pytest.raises(ValueError, match=OPTIMIZER_STATE):
        actor.restore(tmp_path)


def test_two_learners_share_a_checkpoint(tmp_path):
    """The second learner has its own folder: each resumes from its own, and the top folder is still a plain model."""
    learners = {"actor": make_actor("qwen2_5_vl"), "critic": make_actor("qwen3_vl")}
    for seed, (actor, family) in enumerate(zip(learners.values(), ("qwen2_5_vl", "qwen3_vl"), strict=True)):
        learn(actor, family, seed)
    store = FolderStore(tmp_path)
    store.save(1, {name: actor.snapshot() for name, actor in learners.items()}, {"step": 1})
    store.close()
    restored = {"actor": make_actor("qwen2_5_vl"), "critic": make_actor("qwen3_vl")}
    store.restore(tmp_path / "step_1", restored)
    for name, actor in learners.items():
        for mine, theirs in zip(restored[name].model.parameters(), actor.model.parameters(), strict=True):
            same(mine, theirs)
        assert restored[name].learner.optimizer_step == 1
    assert plain_model_at(tmp_path / "step_1", "qwen2_5_vl").config.model_type == "qwen2_5_vl"
