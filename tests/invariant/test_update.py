"""An optimizer step depends on the batch, not on how it is split or laid out."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from helpers import close, same
from tiny_models import fresh_backbone, get_encoder
from update_helpers import (
    ALL_AT_ONCE,
    FULL_LOSS,
    GROUP,
    LAYOUTS,
    MASKED,
    MIXED,
    NEEDS,
    SMALL,
    check_equal,
    full_batch,
    learn,
    make_actor,
    plain_batch,
    rollouts_for,
    signals_for,
    widened,
)

from mtrl.algorithms.losses import POLICY_LOSSES, Loss, Ppo, mismatch_correction
from mtrl.models.forward import Forward
from mtrl.types import VIEWS, Needs
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.reference import Reference

pytestmark = pytest.mark.pairwise("family", "layout")
KINDS = {
    "plain": (plain_batch, Loss()),
    "all streams, grpo": (full_batch, FULL_LOSS),
    "all streams, dapo, gspo": (
        lambda family: full_batch(family, "dapo"),
        replace(FULL_LOSS, policy=Ppo(importance_sampling_level="sequence")),
    ),
}


@lru_cache
def compute_expected(family, kind):
    make, loss = KINDS[kind]
    return learn(make_actor(family), [make(family)], loss)


# ------------------------------------------------------------------------------------------------------ the invariant
def test_the_layouts_split_as_their_names_say(family):
    rollouts = rollouts_for(family)
    small, large = (LAYOUTS[f"{size} token budget"].split(rollouts) for size in ("small", "large"))
    first_group = [rows for rows in small if 0 in rollouts.group[rows]]
    assert len(first_group) > 1, "a group is cut"
    assert any(len(rollouts.group[rows].unique()) > 1 for rows in large), "groups share a pass"
    assert 1 < len(large) < len(small)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_do_not_depend_on_the_layout(family, kind, layout):
    make, loss = KINDS[kind]
    check_equal(learn(make_actor(family, LAYOUTS[layout]), [make(family)], loss), compute_expected(family, kind))


@pytest.mark.parametrize("layout", ["small token budget", "large token budget", "token budget, prompts not shared"])
def test_weights_do_not_depend_on_packing(family, layout):
    batching = LAYOUTS[layout]
    forward = Forward(fresh_backbone(family), get_encoder(family), share_prefix=batching.share_prefix, packed=True)
    found = learn(make_actor(family, batching, forward), [full_batch(family)])
    check_equal(found, compute_expected(family, "all streams, grpo"))


@pytest.mark.parametrize("layout", ["three rows", "large token budget", "all rows, prompts not shared"])
@pytest.mark.parametrize("kind", ["plain", "all streams, grpo"])
def test_weights_do_not_depend_on_padding(family, kind, layout):
    make, loss = KINDS[kind]
    found = learn(make_actor(family, LAYOUTS[layout]), [widened(make(family), 5)], loss)
    check_equal(found, compute_expected(family, kind))


def test_weights_do_not_depend_on_the_order_of_rows(family):
    rows = torch.randperm(len(GROUP), generator=torch.Generator().manual_seed(0))
    found = learn(make_actor(family, MicroBatching(tokens=SMALL)), [full_batch(family).rows(rows)])
    check_equal(found, compute_expected(family, "all streams, grpo"))


def test_the_masked_row_is_not_there(family):
    others = torch.tensor([row for row in range(len(GROUP)) if row != MASKED])
    found = learn(make_actor(family), [full_batch(family).rows(others)])
    check_equal(found, compute_expected(family, "all streams, grpo"))


@pytest.mark.parametrize("fault", ["a mean for each micro-batch", "a row forgotten", "the filter forgotten"])
def test_the_comparison_sees_a_fault(family, fault):
    """What others got wrong moves the gradient by far more than the tolerance."""
    expected = compute_expected(family, "all streams, grpo")
    batch = full_batch(family)
    actor = make_actor(family, MicroBatching(rows=3))
    if fault == "a mean for each micro-batch":
        plain = actor._loss

        def renormalised(batch, loss, prepared):
            policy = batch.weights.policy / batch.weights.policy.sum().clamp(min=1e-9)
            return plain(replace(batch, weights=replace(batch.weights, policy=policy)), loss, prepared)

        actor._loss = renormalised
    elif fault == "a row forgotten":
        batch = batch.rows(torch.arange(1, len(GROUP)))
    else:
        batch = replace(batch, weights=replace(batch.weights, policy=batch.weights.divergence))
    found = learn(actor, [batch])
    with pytest.raises(AssertionError, match=r"(weights|gradients) differ"):
        check_equal(found, expected)


# ------------------------------------------------------------------------------------------------------------- probing
@lru_cache
def probed_at_once(family, dependency):
    return make_actor(family, dependency=dependency).probe(rollouts_for(family), NEEDS, 4)


@pytest.mark.parametrize(
    ("layout", "dependency"), [*((layout, "low_var_kl") for layout in LAYOUTS), ("small token budget", "full_kl")]
)
def test_signals_do_not_depend_on_the_layout(family, layout, dependency):
    rollouts, expected = rollouts_for(family), probed_at_once(family, dependency)
    found = make_actor(family, LAYOUTS[layout], dependency=dependency).probe(rollouts.rows(MIXED), NEEDS, 4)
    assert expected.dependency[rollouts.visual].max() > 0.1
    for name in (
        "old_logprobs",
        "perturbed_logprobs",
        "entropy",
        "entropy_change",
        "dependency",
        "similarity",
        "layer_similarity",
        "attention_mass",
        "prompt_attention_mass",
    ):
        close(getattr(found, name), getattr(expected, name)[MIXED], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("needs", "brought"),
    [
        (Needs("old_logprobs"), ["old_logprobs"]),
        # unrequested old log-probs would remove the entropy from the update's metrics (see "fresh rollouts")
        (Needs("attention_mass"), ["attention_mass", "prompt_attention_mass"]),
    ],
)
def test_only_requested_signals_are_computed(family, needs, brought):
    signals = make_actor(family).probe(rollouts_for(family), needs, 0)
    assert [name for name in VIEWS if getattr(signals, name) is not None] == brought


@lru_cache
def moved_actor(family):
    """One that has learned, so that it differs from its reference; only probed from here on."""
    actor = make_actor(family, lr=1e-3)
    actor.update([plain_batch(family)], Loss())
    return actor


@pytest.mark.parametrize("layout", ["three rows", "small token budget", "all rows, prompts not shared"])
@pytest.mark.parametrize("full", [False, True], ids=["reference", "full divergence"])
def test_the_reference_does_not_depend_on_the_layout(family, layout, full):
    rollouts, moved = rollouts_for(family), moved_actor(family)

    def probe(rollouts, batching):
        forward = Forward(fresh_backbone(family), get_encoder(family), share_prefix=batching.share_prefix)
        policy = Forward(moved.forward.backbone, get_encoder(family), share_prefix=batching.share_prefix)
        actor = make_actor(family, batching, policy, Reference(forward))
        return actor.probe(rollouts, Needs("divergence" if full else "ref_logprobs"), 0)

    expected, found = probe(rollouts, ALL_AT_ONCE), probe(rollouts.rows(MIXED), LAYOUTS[layout])
    name = "divergence" if full else "ref_logprobs"
    theirs = getattr(expected, name)
    torch.testing.assert_close(getattr(found, name), theirs[MIXED], rtol=1e-5, atol=2e-5)
    if full:
        assert theirs[rollouts.mask].min() > -1e-6 and theirs.max() > 1e-3
    else:
        torch.testing.assert_close(theirs, signals_for(family).old_logprobs, rtol=1e-5, atol=2e-5)  # before the update
    assert [name for name in VIEWS if getattr(found, name) is not None] == [name]


def test_the_reference_stays_when_the_policy_learns(family):
    forward = Forward(fresh_backbone(family), get_encoder(family))
    actor = make_actor(family, forward=forward, reference=Reference.frozen(forward), lr=1e-3)
    rollouts, needs = rollouts_for(family), Needs("old_logprobs", "ref_logprobs")
    before = actor.probe(rollouts, needs, 0)
    same(before.ref_logprobs, before.old_logprobs)
    actor.update([plain_batch(family)], Loss())
    after = actor.probe(rollouts, needs, 0)
    same(after.ref_logprobs, before.ref_logprobs)
    assert (after.old_logprobs - before.old_logprobs).abs().max() > 1e-3
    frozen = actor.reference.forward.backbone.model
    assert not any(p.requires_grad for p in frozen.parameters()) and not frozen.training
    assert actor.probe(rollouts, Needs("old_logprobs"), 0).ref_logprobs is None, "and only if requested"


# ------------------------------------------------------------------------------------------------------ fresh rollouts
@pytest.mark.parametrize("kind", ["ppo", "cispo", "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_one_step_on_fresh_rollouts_needs_no_old_pass(family, kind, level):
    """With old log-probs probed just before, or taken from the update's own pass: the same step."""
    rollouts, signals = rollouts_for(family), signals_for(family)
    loss = Loss(
        POLICY_LOSSES.make(kind, {"importance_sampling_level": level}),
        entropy_penalty_coef=0.06,
        tis_clip=2.0,
        tis_level=level,
    )
    correction = mismatch_correction(signals.old_logprobs, rollouts.rollout_logprobs, rollouts.mask, 2.0, level)
    probed = replace(plain_batch(family), old_logprobs=signals.old_logprobs, correction=correction)
    saved = replace(probed, old_logprobs=None, correction=None)
    expected = learn(make_actor(family), [probed], loss)
    found = learn(make_actor(family, MicroBatching(rows=3)), [saved], loss)
    said = {name: found.metrics.pop(name) for name in ("entropy", "logprob_gap_mean", "logprob_gap_kl")}
    check_equal(found, expected)
    gap = (signals.old_logprobs - rollouts.rollout_logprobs)[rollouts.mask]
    assert said["entropy"] == pytest.approx(float(signals.entropy[rollouts.mask].mean()), rel=1e-5)
    assert said["logprob_gap_mean"] == pytest.approx(float(gap.abs().mean()), rel=1e-5)
    assert said["logprob_gap_kl"] == pytest.approx(-float(gap.mean()), abs=1e-5 * said["logprob_gap_mean"])


def test_one_step_on_fresh_rollouts_compares_on_the_sampled_support(family):
    """With top-p or top-k, the update's own pass reports the same as a probe."""
    rollouts, actor = rollouts_for(family), make_actor(family)
    actor.forward = replace(actor.forward, top_k=5)
    signals = actor.probe(rollouts, Needs("old_logprobs", "support"), 0)
    gap = (signals.old_logprobs - signals.support - rollouts.rollout_logprobs)[rollouts.mask]
    fresh = replace(plain_batch(family), old_logprobs=None, correction=None)
    result = learn(actor, [fresh], Loss()).metrics["support_gap_mean"]
    assert result == pytest.approx(float(gap.abs().mean()), rel=1e-5)
    assert "support_gap_mean" not in learn(make_actor(family), [fresh], Loss()).metrics


def test_a_probe_without_needs_runs_no_pass(family, monkeypatch):
    actor = make_actor(family)
    monkeypatch.setattr(Forward, "signals", None)
    assert actor.probe(rollouts_for(family), Needs(), 0).old_logprobs is None
