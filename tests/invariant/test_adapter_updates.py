"""An optimizer step on adapters depends on the batch, not on how it is split, packed or checkpointed; dropout depends
only on the seed, the step and the micro-batch."""

from functools import lru_cache

import pytest
import torch
from tiny_models import fresh_backbone, get_encoder
from update_helpers import ALL_AT_ONCE, FULL_LOSS, check_equal, copy_weights, full_batch, learn

from mtrl.models.adapters import AdapterSettings, adapter_parameters, add_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.models.views import ImageViews
from mtrl.workers.actor import LocalActor
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching

pytestmark = pytest.mark.pairwise("family", "layout")

pytest.importorskip("peft")

LAYOUTS = {
    "a row each": MicroBatching(rows=1),
    "small token budget": MicroBatching(tokens=40),
    "large token budget": MicroBatching(tokens=180),
    "three rows, prompts not shared": MicroBatching(rows=3, share_prefix=False),
}


def make_actor(family, batching=ALL_AT_ONCE, packed=False, checkpointing=False, seed=None, **settings):
    model = fresh_backbone(family).model
    add_adapters(model, AdapterSettings(lora_rank=4, lora_alpha=8, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():  # with B at zero A would have no gradient
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    forward = Forward(Backbone(model), get_encoder(family), share_prefix=batching.share_prefix, packed=packed)
    return LocalActor(
        forward,
        OptimizerSettings(lr=1e-4, warmup_steps=0, total_steps=10, max_grad_norm=0.01),
        views=ImageViews(Perturbation(seed=3)),
        update_batching=batching,
        probe_batching=batching,
        encoder_files={},
        dropout_seed=seed,
    )


@lru_cache
def compute_expected(family, **settings):
    return learn(make_actor(family, **settings), [full_batch(family)])


def test_adapters_alone_learn_and_all_of_them(family):
    actor = make_actor(family)
    before = copy_weights(actor)
    found = learn(actor, [full_batch(family)])
    moved = {name for name, weight in found.weights.items() if not torch.equal(weight, before[name])}
    assert moved == adapter_parameters(actor.model).keys()
    state = actor.snapshot().optimizer_state
    assert {name.rpartition("/")[0] for name in state} == moved, "the optimizer holds nothing of the base"
    assert all("lora_" in name for name in actor.snapshot().weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_do_not_depend_on_the_layout(family, layout):
    check_equal(learn(make_actor(family, LAYOUTS[layout]), [full_batch(family)]), compute_expected(family))


def test_nor_on_packing_nor_on_checkpointing(family):
    """The base is frozen and embeddings have no gradient, so that a checkpointed layer's input has none either."""
    packed = make_actor(family, LAYOUTS["large token budget"], packed=True)
    check_equal(learn(packed, [full_batch(family)]), compute_expected(family))
    check_equal(learn(make_actor(family, checkpointing=True), [full_batch(family)]), compute_expected(family))


def test_in_the_vision_tower_too(family):
    found = learn(make_actor(family, LAYOUTS["small token budget"], lora_vision_tower=True), [full_batch(family)])
    expected = compute_expected(family, lora_vision_tower=True)
    check_equal(found, expected, weights=1e-5)  # a tenth of a step, since some gradients are as small as their noise
    checkpointed = learn(make_actor(family, checkpointing=True, lora_vision_tower=True), [full_batch(family)])
    check_equal(checkpointed, compute_expected(family, lora_vision_tower=True))


# -------------------------------------------------------------------------------------------------------------- dropout
def after(actor, batches, disturbed=False):
    for batch in batches:
        if disturbed:
            torch.rand(7)
        actor.update([batch], FULL_LOSS)
    return copy_weights(actor)


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow  # 3 s
def test_dropout_is_drawn_by_seed_step_and_micro_batch(tmp_path, family="qwen3_vl"):
    dropped = {"batching": MicroBatching(rows=3), "lora_dropout": 0.3}
    batches = [full_batch(family), full_batch(family)]
    whole = after(make_actor(family, seed=5, **dropped), batches)
    random = torch.random.get_rng_state()
    assert same(whole, after(make_actor(family, seed=5, checkpointing=True, **dropped), batches, disturbed=True))
    torch.random.set_rng_state(random)
    after(make_actor(family, seed=5, **dropped), batches)
    assert torch.equal(torch.random.get_rng_state(), random), "the global random state is unchanged"
    assert not same(whole, after(make_actor(family, seed=6, **dropped), batches))
    assert not same(whole, after(make_actor(family, batching=MicroBatching(rows=3)), batches))

    first, second = make_actor(family, seed=5, **dropped), make_actor(family, seed=5, **dropped)
    after(first, batches[:1])
    first.snapshot().write(tmp_path)
    second.restore(tmp_path)
    assert same(whole, after(second, batches[1:])), "a resumed run draws what it would have drawn"
