"""The divergence over the whole vocabulary as a loss equals plain torch on all logits in float64, for any layout; and
a reference is synced with the policy."""

import copy
import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from helpers import same
from tiny_models import fresh_backbone, get_encoder, plain_log_probs, plain_model
from update_helpers import ALL_AT_ONCE, FULL_LOSS, difference, full_batch, learn, make_actor, plain_batch, rollouts_for

from mtrl.algorithms.losses import Loss
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.types import Needs
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.reference import Reference, SyncedReference

pytestmark = pytest.mark.pairwise("family", "layout")

TEMPERATURE, COEF = 0.7, 0.3
EXACT = 1e-6  # relative to the largest gradient: transformers' norms are in float32, and the order of rows varies
LAYOUTS = {  # how rows are split into passes, and whether a pass is packed into one sequence
    "all rows": (ALL_AT_ONCE, False),
    "a row each": (MicroBatching(rows=1), False),
    "small token budget": (MicroBatching(tokens=40), False),
    "large token budget, packed": (MicroBatching(tokens=180), True),
    "three rows, prompts not shared": (MicroBatching(rows=3, share_prefix=False), False),
}


def another(model):
    """The model after it has learnt something: every weight a little off."""
    other, draw = copy.deepcopy(model).requires_grad_(False), torch.Generator().manual_seed(7)
    for parameter in other.parameters():
        noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float32)
        parameter.add_(0.1 * float(parameter.std(correction=0)) * noise.to(parameter))
    return other


def actor_with_reference(family, layout="all rows"):
    """An actor in float64 without gradient clipping."""
    batching, packed = LAYOUTS[layout]
    settings = {"temperature": TEMPERATURE, "share_prefix": batching.share_prefix, "packed": packed}
    model = fresh_backbone(family).model.double()
    reference = Forward(Backbone(another(model)), get_encoder(family), **settings)
    policy = Forward(Backbone(model), get_encoder(family), **settings)
    return make_actor(family, batching, policy, Reference(reference), max_grad_norm=math.inf)


def silent(batch):
    """The batch without advantages: only the divergence remains."""
    return replace(batch, advantage=torch.zeros_like(batch.advantage))


@lru_cache
def plain_gradients(family):
    """Row by row through transformers, with all logits of both models: the loss, and its gradient by name."""
    batch = full_batch(family)
    policy = copy.deepcopy(plain_model(family)).double()
    reference, total = another(policy), 0.0
    rollouts = batch.rollouts
    for row, g in enumerate(rollouts.group.tolist()):
        tokens = rollouts.tokens[row][rollouts.mask[row]]
        if len(tokens):
            p, q = (
                plain_log_probs(family, rollouts.prompts[g], tokens, temperature=TEMPERATURE, model=model)
                for model in (policy, reference)
            )
            allowed = p[0] > -math.inf  # picked, not masked: the gradient of inf - inf is NaN even under a mask
            kl = (p[:, allowed].exp() * (p - q)[:, allowed]).sum(-1)
            total = total + (batch.weights.divergence[row, : len(tokens)] * kl).sum()
    (COEF * total).backward()
    return float(total.detach()), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


# --------------------------------------------------------------------------------------------------------- the gradient
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_that_of_plain_torch(family, layout):
    loss = Loss(divergence="full", divergence_coef=COEF)
    distance, gradients = plain_gradients(family)
    actor = actor_with_reference(family, layout)
    found = learn(actor, [silent(full_batch(family))], loss)
    assert found.metrics["divergence_loss"] == pytest.approx(distance, rel=1e-7) and distance > 1e-2
    assert found.metrics["pg_loss"] == 0
    ours = dict(zip(actor.learner.names.values(), found.gradients[0], strict=True))
    assert gradients.keys() == {name for name, gradient in ours.items() if gradient is not None}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert difference([ours[name] for name in gradients], gradients.values()) < EXACT * largest
    frozen = actor.reference.forward.backbone.model
    assert all(p.grad is None for p in frozen.parameters())


def test_it_adds_to_the_policy_loss(family):
    batch, found = full_batch(family), {}
    both = replace(FULL_LOSS, divergence="full", divergence_coef=COEF)
    arms = {"both": (batch, both), "policy": (batch, replace(both, divergence_coef=0.0)),
            "divergence": (silent(batch), Loss(divergence="full", divergence_coef=COEF))}  # fmt: skip
    for name, (given, loss) in arms.items():
        found[name] = learn(actor_with_reference(family), [given], loss).gradients[0]
    summed = [a + b for a, b in zip(found["policy"], found["divergence"], strict=True)]
    largest = max(float(gradient.abs().max()) for gradient in found["both"])
    assert difference(found["both"], summed) < EXACT * largest
    assert min(difference(found["both"], found[each]) for each in ("policy", "divergence")) > 1e-3 * largest


def test_a_policy_equal_to_its_reference_has_no_penalty(family):
    forward = Forward(fresh_backbone(family), get_encoder(family))
    actor = make_actor(family, forward=forward, reference=Reference.frozen(forward))
    found = learn(actor, [silent(plain_batch(family))], Loss(divergence="full", divergence_coef=1.0))
    assert found.metrics["divergence_loss"] == 0 and found.metrics["grad_norm"] < 1e-6


def test_without_a_reference_it_is_a_mistake(family):
    with pytest.raises(AssertionError, match="reference"):
        learn(make_actor(family), [plain_batch(family)], Loss(divergence="full", divergence_coef=1.0))


# -------------------------------------------------------------------------------------------- a reference that follows
def test_a_refreshed_reference_is_the_policy_of_then(family, tmp_path):
    forward = Forward(fresh_backbone(family), get_encoder(family))
    actor = make_actor(family, forward=forward, reference=Reference.frozen(forward), lr=1e-3)
    kept, rollouts, needs = (
        SyncedReference(actor.reference, forward),
        rollouts_for(family),
        Needs("old_logprobs", "ref_logprobs"),
    )
    actor.update([plain_batch(family)], Loss())
    apart = actor.probe(rollouts, needs, 0)
    assert difference([apart.old_logprobs], [apart.ref_logprobs]) > 1e-3
    kept.sync()
    together = actor.probe(rollouts, needs, 0)
    same(together.ref_logprobs, apart.old_logprobs)
    snapshot = kept.snapshot()
    assert snapshot.nbytes == sum(p.nbytes for p in kept.model.parameters())
    snapshot.detached().write(tmp_path)
    actor.update([plain_batch(family)], Loss())
    after = actor.probe(rollouts, needs, 0)
    same(after.ref_logprobs, apart.old_logprobs)
    assert difference([after.old_logprobs], [after.ref_logprobs]) > 1e-3, "it does not change with the policy"
    kept.sync()
    kept.restore(tmp_path)
    same(actor.probe(rollouts, needs, 0).ref_logprobs, apart.old_logprobs)
    assert not any(p.requires_grad for p in kept.model.parameters())
