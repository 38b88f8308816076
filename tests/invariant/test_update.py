"""What an optimizer step does to the weights depends on the batch, and on nothing about how it is cut or laid out."""

import math
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from helpers import close, same
from tiny_models import checkpoint, encoder_of, fresh_backbone, prompts_for, rollouts_of

from mtrl.algorithms.credit import CreditRule, Scaling, TokenWeighting, assign
from mtrl.algorithms.losses import Loss, PolicyLoss, mismatch_correction, term_weights, total_loss
from mtrl.config import load_config
from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.training.build import build_policy
from mtrl.types import Needs, TrainBatch
from mtrl.workers.actor import LocalActor, Optimization
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.reference import Reference

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
# Prompts with one image, none, several, one; four rows of the first group; row 7 is masked from end to end.
GROUP, LENGTHS, MASKED = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3], [6, 2, 9, 5, 4, 1, 7, 3, 5, 5], 7
SMALL, LARGE = 40, 180  # tokens: the one cuts groups, the other joins them
# Adam divides a gradient by its size plus 1e-8: clipped this short, rounding noise stays below the 1e-8, and a weight
# still moves by about LR, a hundred times the tolerance.
LR, CLIP = 1e-4, 0.01
ALL_AT_ONCE = MicroBatching(rows=len(GROUP))
NEEDS = Needs(old=True, entropy=True, dependency="low_var_kl", mass=True)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@lru_cache
def rollouts_for(family):
    rollouts = rollouts_of(prompts_for(family), GROUP, LENGTHS)
    rollouts.mask[MASKED] = False
    behaviour = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(5))
    old = actor_of(family).probe(rollouts, Needs(old=True), 0).old
    return replace(rollouts, behaviour=old + 0.5 * behaviour)


def actor_of(family, batching=ALL_AT_ONCE, forward=None, **optimization):
    settings = {"lr": LR, "warmup_steps": 0, "total_steps": 10, "max_grad_norm": CLIP} | optimization
    share = batching.share_prefix
    return LocalActor(
        forward or Forward(fresh_backbone(family), encoder_of(family), share_prefix=share),
        Optimization(**settings),
        perturbation=Perturbation(seed=3),
        update_batching=batching,
        probe_batching=batching,
        encoder_files={},
    )


@lru_cache
def signals_for(family):
    return actor_of(family).probe(rollouts_for(family), NEEDS, 0)


def noise(like, seed, scale=1.0):
    return scale * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def plain_batch(family, rollouts=None, signals=None):
    """GRPO by hand: one advantage a row, old log-probs a bit off the current ones so that ratios are clipped."""
    rollouts, signals = rollouts or rollouts_for(family), signals or signals_for(family)
    mask = rollouts.mask
    advantage = noise(mask[:, :1], 1).expand(mask.shape).where(mask, 0.0)
    weights = term_weights(mask.float(), mask, "dapo", 16)
    return TrainBatch(rollouts, signals.old + noise(mask, 2, 0.3), advantage, torch.ones(mask.shape), weights)


def full_batch(family, loss_type="grpo"):
    """Every stream at once: filters, trajectory scale, token weights in the mask, correction, reference."""
    rollouts, signals = rollouts_for(family), signals_for(family)
    rule = CreditRule(0.4, 0.2, Scaling(0.8, 2.0), TokenWeighting(target="mask"))
    advantage = noise(rollouts.mask[:, :1], 1).expand(rollouts.mask.shape)
    token_weights = noise(rollouts.mask, 4).exp().clamp(0.2, 3.0)
    credit = assign(rule, advantage, rollouts.mask, rollouts.visual, signals, token_weights)
    return TrainBatch(
        rollouts,
        signals.old + noise(rollouts.mask, 2, 0.3),
        credit.advantage,
        mismatch_correction(signals.old, rollouts.behaviour, rollouts.mask, 2.0, "token"),
        term_weights(credit.measure, credit.select, loss_type, 16, "selected"),
        reference=signals.old + noise(rollouts.mask, 6, 0.5),
    )


FULL_LOSS = Loss(PolicyLoss(), divergence="low_var_kl", divergence_coef=0.1, entropy_penalty_coef=0.06)


def widened(batch, columns):
    """The same batch with more padding. What has no weight there may hold anything."""

    def wider(x, fill):
        return None if x is None else torch.nn.functional.pad(x, (0, columns), value=fill)

    rollouts, weights = batch.rollouts, batch.weights
    return replace(
        batch,
        rollouts=replace(rollouts, tokens=wider(rollouts.tokens, 7), mask=wider(rollouts.mask, False)),
        **{name: wider(getattr(batch, name), math.nan) for name in ("old", "advantage", "reference")},
        correction=wider(batch.correction, 9.0),
        weights=replace(weights, **{name: wider(weight, 0.0) for name, weight in vars(weights).items()}),
    )


def learn(actor, batches, loss=FULL_LOSS):
    """Weights, gradients before each optimizer step, and metrics."""
    gradients = []
    hook = actor.optimizer.register_step_pre_hook(
        lambda *_: gradients.append([None if p.grad is None else p.grad.clone() for p in actor.parameters])
    )
    metrics = actor.update(batches, loss)
    hook.remove()
    return SimpleNamespace(weights=weights_of(actor), gradients=gradients, metrics=metrics)


def weights_of(actor):
    return {name: p.detach().clone() for name, p in actor.model.named_parameters()}


def difference(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def check_equal(found, expected):
    """Weights to 1e-6. Adam and the clip hide the size of a gradient, so that is compared too (`grad_norm`)."""
    worst = difference(found.weights.values(), expected.weights.values())
    assert worst < 1e-6
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        worst = difference(ours, theirs)
        assert worst < 3e-7 * CLIP
    assert found.metrics.keys() == expected.metrics.keys() and expected.metrics["grad_norm"] > 10 * CLIP
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


LAYOUTS = {
    "a row each": MicroBatching(rows=1),
    "three rows": MicroBatching(rows=3),
    "small token budget": MicroBatching(tokens=SMALL),
    "large token budget": MicroBatching(tokens=LARGE),
    "the largest group's tokens": MicroBatching(),
    "all rows, prompts not shared": MicroBatching(rows=len(GROUP), share_prefix=False),
    "token budget, prompts not shared": MicroBatching(tokens=LARGE, share_prefix=False),
}
KINDS = {
    "plain": (plain_batch, Loss()),
    "all streams, grpo": (full_batch, FULL_LOSS),
    "all streams, dapo, gspo": (
        lambda family: full_batch(family, "dapo"),
        replace(FULL_LOSS, policy=PolicyLoss(level="sequence")),
    ),
}


@lru_cache
def expected_of(family, kind):
    make, loss = KINDS[kind]
    return learn(actor_of(family), [make(family)], loss)


# ------------------------------------------------------------------------------------------------------ the invariant
def test_the_budgets_do_what_the_names_say(family):
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
    check_equal(learn(actor_of(family, LAYOUTS[layout]), [make(family)], loss), expected_of(family, kind))


@pytest.mark.parametrize("layout", ["small token budget", "large token budget", "token budget, prompts not shared"])
def test_weights_do_not_depend_on_packing(family, layout):
    batching = LAYOUTS[layout]
    forward = Forward(fresh_backbone(family), encoder_of(family), share_prefix=batching.share_prefix, packed=True)
    found = learn(actor_of(family, batching, forward), [full_batch(family)])
    check_equal(found, expected_of(family, "all streams, grpo"))


@pytest.mark.parametrize("layout", ["three rows", "large token budget", "all rows, prompts not shared"])
@pytest.mark.parametrize("kind", ["plain", "all streams, grpo"])
def test_weights_do_not_depend_on_padding(family, kind, layout):
    make, loss = KINDS[kind]
    found = learn(actor_of(family, LAYOUTS[layout]), [widened(make(family), 5)], loss)
    check_equal(found, expected_of(family, kind))


def test_weights_do_not_depend_on_the_order_of_rows(family):
    rows = torch.randperm(len(GROUP), generator=torch.Generator().manual_seed(0))
    found = learn(actor_of(family, MicroBatching(tokens=SMALL)), [full_batch(family).rows(rows)])
    check_equal(found, expected_of(family, "all streams, grpo"))


def test_the_masked_row_is_not_there(family):
    others = torch.tensor([row for row in range(len(GROUP)) if row != MASKED])
    found = learn(actor_of(family), [full_batch(family).rows(others)])
    check_equal(found, expected_of(family, "all streams, grpo"))


@pytest.mark.parametrize("fault", ["a mean for each micro-batch", "a row forgotten", "the filter forgotten"])
def test_the_comparison_sees_a_fault(family, fault):
    """What others got wrong moves the gradient by far more than the tolerance."""
    expected = expected_of(family, "all streams, grpo")
    batch = full_batch(family)
    actor = actor_of(family, MicroBatching(rows=3))
    if fault == "a mean for each micro-batch":
        plain = actor._loss

        def renormalised(batch, loss):
            policy = batch.weights.policy / batch.weights.policy.sum().clamp(min=1e-9)
            return plain(replace(batch, weights=replace(batch.weights, policy=policy)), loss)

        actor._loss = renormalised
    elif fault == "a row forgotten":
        batch = batch.rows(torch.arange(1, len(GROUP)))
    else:
        batch = replace(batch, weights=replace(batch.weights, policy=batch.weights.divergence))
    with pytest.raises(AssertionError):
        check_equal(learn(actor, [batch]), expected)


# ------------------------------------------------------------------------------------------------------------- probing
@pytest.mark.parametrize(
    ("layout", "dependency"), [*((layout, "low_var_kl") for layout in LAYOUTS), ("small token budget", "full_kl")]
)
def test_signals_do_not_depend_on_the_layout(family, layout, dependency):
    needs = replace(NEEDS, dependency=dependency)
    rows = torch.randperm(len(GROUP), generator=torch.Generator().manual_seed(1))  # groups all mixed up
    rollouts = rollouts_for(family)
    expected = actor_of(family).probe(rollouts, needs, 4)
    found = actor_of(family, LAYOUTS[layout]).probe(rollouts.rows(rows), needs, 4)
    assert expected.dependency[rollouts.visual].max() > 0.1
    for name in ("old", "perturbed", "entropy", "dependency", "mass", "prompt_mass"):
        ours, theirs = getattr(found, name), getattr(expected, name)[rows]
        close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("needs", "brought"),
    [
        (Needs(old=True), ["old"]),
        # old log-probs unasked would take the entropy out of what the update reports (see "fresh rollouts")
        (Needs(mass=True), ["mass", "prompt_mass"]),
    ],
)
def test_only_what_was_asked_for(family, needs, brought):
    signals = actor_of(family).probe(rollouts_for(family), needs, 0)
    assert [name for name, value in vars(signals).items() if value is not None] == brought


@pytest.mark.parametrize("layout", ["three rows", "small token budget", "all rows, prompts not shared"])
@pytest.mark.parametrize("full", [False, True], ids=["reference", "full divergence"])
def test_the_reference_does_not_depend_on_the_layout(family, layout, full):
    rollouts = rollouts_for(family)
    rows = torch.randperm(len(GROUP), generator=torch.Generator().manual_seed(1))
    moved = actor_of(family, lr=1e-3)
    moved.update([plain_batch(family)], Loss())

    def probe(rollouts, batching):
        forward = Forward(fresh_backbone(family), encoder_of(family), share_prefix=batching.share_prefix)
        policy = Forward(moved.forward.backbone, encoder_of(family), share_prefix=batching.share_prefix)
        return Reference(forward, batching, policy if full else None).probe(rollouts, Needs(reference=True), 0)

    expected, found = probe(rollouts, ALL_AT_ONCE), probe(rollouts.rows(rows), LAYOUTS[layout])
    name = "divergence" if full else "reference"
    theirs = getattr(expected, name)
    torch.testing.assert_close(getattr(found, name), theirs[rows], rtol=1e-5, atol=2e-5)
    if full:
        assert theirs[rollouts.mask].min() > -1e-6 and theirs.max() > 1e-3
    else:
        torch.testing.assert_close(theirs, signals_for(family).old, rtol=1e-5, atol=2e-5)  # before the update
    unasked = Reference(moved.forward, ALL_AT_ONCE).probe(rollouts, Needs(old=True), 0)
    assert all(value is None for value in vars(unasked).values())


# ---------------------------------------------------------------------------------------------------- optimizer steps
def by_hand(family, batches):
    """AdamW of PyTorch on the loss of each whole batch."""
    actor = actor_of(family)
    optimizer = torch.optim.AdamW(actor.parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    for batch in batches:
        optimizer.zero_grad()
        total_loss(actor.forward.logp(batch.rollouts), batch, FULL_LOSS)[0].backward()
        torch.nn.utils.clip_grad_norm_(actor.parameters, CLIP)
        optimizer.step()
    return weights_of(actor)


def halves(family):
    """Two optimizer steps of two prompts each, with denominators of their own."""
    batch, parts = full_batch(family), []
    for rows in (torch.arange(6), torch.arange(6, 10)):
        part = batch.rows(rows)
        mask = part.rollouts.mask
        parts.append(replace(part, weights=term_weights(mask.float(), mask, "dapo", 16)))
    return parts


def test_one_optimizer_step_a_batch(family):
    batches = halves(family) * 2  # two passes
    actor = actor_of(family)
    found = learn(actor, batches)
    expected = by_hand(family, batches)
    assert len(found.gradients) == actor.optimizer_step == 4 and actor.version == 1
    assert difference(found.weights.values(), expected.values()) < 1e-7
    moved = difference(found.weights.values(), by_hand(family, batches[:2]).values())
    assert moved > LR / 2, "the second pass counts"


def test_versions_count_updates(family):
    actor = actor_of(family)
    assert actor.publish().version == 0
    actor.update(halves(family), Loss())
    weights = actor.publish()
    assert weights.version == 1
    held = dict(actor.model.named_parameters(remove_duplicate=False))
    published = dict(weights.tensors)
    assert published.keys() >= weights_of(actor).keys()
    assert all(torch.equal(tensor, held[name]) for name, tensor in published.items())


def test_metrics_are_means_over_all_tokens():
    """Not those of the last micro-batch, and means over the optimizer steps."""
    family = FAMILIES[0]
    batches = halves(family)
    frozen = actor_of(family, MicroBatching(rows=1), lr=0.0, weight_decay=0.0)
    metrics = frozen.update(batches, FULL_LOSS)
    expected = {"approx_kl": [], "clipfrac_low": [], "clipfrac_high": [], "pg_loss": [], "entropy_penalty": []}
    for batch in batches:
        mask = batch.rollouts.mask
        logp = frozen.probe(batch.rollouts, Needs(old=True), 0).old.double()
        ratio = (logp - batch.old).exp()
        unclipped, clipped = ratio * batch.advantage, ratio.clamp(0.8, 1.3) * batch.advantage
        gain = torch.minimum(unclipped, clipped)
        gain = torch.where(batch.advantage < 0, torch.maximum(gain, 3 * batch.advantage), gain)
        expected["approx_kl"].append((batch.old - logp)[mask].mean())
        expected["clipfrac_low"].append(((ratio < 0.8) & (batch.advantage < 0))[mask].double().mean())
        expected["clipfrac_high"].append(((ratio > 1.3) & (batch.advantage > 0))[mask].double().mean())
        expected["pg_loss"].append(-(gain * batch.correction)[mask].mean())
        expected["entropy_penalty"].append(-logp[mask].mean())
    for name, (first, second) in expected.items():
        assert abs(float(first - second)) > 1e-3, f"{name}: the two steps can be told apart"
        assert metrics[name] == pytest.approx(float(first + second) / 2, rel=1e-4), name


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 0}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"warmup_steps": 1, "total_steps": 5, "schedule": "linear"}, [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ({"warmup_steps": 0, "total_steps": 4, "schedule": "linear", "min_lr_ratio": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"warmup_steps": 0, "total_steps": 4, "schedule": "cosine"}, [1.0, 0.853553, 0.5, 0.146447, 0.0]),
        ({"warmup_steps": 1, "total_steps": 3, "schedule": "cosine", "min_lr_ratio": 0.1}, [0.5, 1.0, 0.55, 0.1]),
        ({"warmup_steps": 9, "total_steps": 4, "schedule": "cosine"}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"warmup_steps": 0, "total_steps": 0, "schedule": "linear"}, [1.0, 0.0]),
    ],
)  # fmt: skip
def test_learning_rates_by_hand(settings, expected):
    optimization = Optimization(lr=1e-2, **settings)
    close(torch.tensor([optimization.lr_at(step) for step in range(len(expected))]), [1e-2 * x for x in expected])


def test_the_optimizer_uses_the_scheduled_rate():
    """Adam's first step moves every weight by the rate, give or take its epsilon."""
    for step, rate in enumerate((2e-4, 4e-4)):
        actor = actor_of(FAMILIES[0], lr=6e-4, warmup_steps=2, weight_decay=0.0)
        actor.optimizer_step = step
        before = weights_of(actor)
        after = learn(actor, [plain_batch(FAMILIES[0])], Loss())
        moved = (after.weights[TEXT] - before[TEXT]).abs()
        assert after.metrics["lr"] == pytest.approx(rate)
        assert float(moved.max()) == pytest.approx(rate, rel=1e-2)


TEXT = "model.language_model.layers.0.mlp.down_proj.weight"


def test_gradients_are_clipped_to_the_norm(family):
    def norm_of(gradients):
        return float(torch.stack([g.norm() for g in gradients]).norm())

    free = learn(actor_of(family, max_grad_norm=math.inf), [plain_batch(family)], Loss())
    norm = norm_of(free.gradients[0])
    assert norm > 1 and free.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    half = learn(actor_of(family, max_grad_norm=norm / 2), [plain_batch(family)], Loss())
    assert norm_of(half.gradients[0]) == pytest.approx(norm / 2, rel=1e-4)
    assert half.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5), "what is reported is from before the clip"
    loose = learn(actor_of(family, max_grad_norm=norm * 2), [plain_batch(family)], Loss())
    for ours, theirs in zip(loose.gradients[0], free.gradients[0], strict=True):
        same(ours, theirs)


# ------------------------------------------------------------------------------------------------------ fresh rollouts
@pytest.mark.parametrize("kind", ["ppo", "cispo", "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_one_step_on_fresh_rollouts_needs_no_old_pass(family, kind, level):
    """With old log-probs probed just before, or taken from the update's own pass: the same step."""
    rollouts, signals = rollouts_for(family), signals_for(family)
    loss = Loss(PolicyLoss(kind, level), entropy_penalty_coef=0.06, tis_clip=2.0, tis_level=level)
    correction = mismatch_correction(signals.old, rollouts.behaviour, rollouts.mask, 2.0, level)
    probed = replace(plain_batch(family), old=signals.old, correction=correction)
    saved = replace(probed, old=None, correction=None)
    expected = learn(actor_of(family), [probed], loss)
    found = learn(actor_of(family, MicroBatching(rows=3)), [saved], loss)
    said = {name: found.metrics.pop(name) for name in ("entropy", "logprob_gap_mean", "logprob_gap_kl")}
    check_equal(found, expected)
    gap = (signals.old - rollouts.behaviour)[rollouts.mask]
    assert said["entropy"] == pytest.approx(float(signals.entropy[rollouts.mask].mean()), rel=1e-5)
    assert said["logprob_gap_mean"] == pytest.approx(float(gap.abs().mean()), rel=1e-5)
    assert said["logprob_gap_kl"] == pytest.approx(-float(gap.mean()), rel=1e-5)


def test_a_probe_of_nothing_makes_no_pass(family, monkeypatch):
    actor = actor_of(family)
    monkeypatch.setattr(Forward, "signals", None)
    assert actor.probe(rollouts_for(family), Needs(), 0).old is None


# ----------------------------------------------------------------------------------------------------- model switches
def policy_of(family, **switches):
    settings = {f"worker.actor.model.{name}": value for name, value in switches.items()}
    settings |= {"worker.actor.model.model_path": str(checkpoint(family))}
    settings |= {"worker.actor.fsdp.mixed_precision_dtype": "fp32"}
    settings |= {"dataset.min_pixels": 1, "dataset.max_pixels": 10**6}
    return build_policy(load_config(None, settings))[1]


def test_gradient_checkpointing_changes_nothing_but_the_work(family):
    calls = []
    found = {}
    for on in (False, True):
        policy = policy_of(family, enable_gradient_checkpointing=on)
        calls.append(0)

        def count(*_):
            calls[-1] += 1

        policy.backbone.language_model.layers[0].register_forward_pre_hook(count)
        found[on] = learn(actor_of(family, forward=policy), [full_batch(family)])
    assert calls == [1, 2], "with checkpointing a layer runs again on the way back"
    check_equal(found[True], found[False])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_frozen_vision_tower_stays_as_it_is(family, checkpointing):
    policy = policy_of(family, freeze_vision_tower=True, enable_gradient_checkpointing=checkpointing)
    actor = actor_of(family, forward=policy, weight_decay=0.5)
    before = weights_of(actor)
    after = learn(actor, [full_batch(family)]).weights
    seeing = [name for name in before if ".visual." in name]
    assert seeing and all(torch.equal(before[name], after[name]) for name in seeing)
    assert all(not torch.equal(before[name], after[name]) for name in before if ".layers." in name)


def test_a_trained_vision_tower_learns(family):
    actor = actor_of(family)
    before = weights_of(actor)
    after = learn(actor, [full_batch(family)]).weights
    assert not any(torch.equal(before[name], after[name]) for name in before if "mlp" in name)


# -------------------------------------------------------------------------------------------------- non-finite numbers
def poisoned(batch, field, value):
    changed = getattr(batch, field).clone()
    changed[0, 0] = value
    return replace(batch, **{field: changed})


FAULTS = {"nan advantage": ("advantage", math.nan), "inf advantage": ("advantage", -math.inf),
          "nan old": ("old", math.nan), "inf correction": ("correction", math.inf)}  # fmt: skip


def bad_batch(family=FAMILIES[0], fault="nan advantage"):
    return poisoned(plain_batch(family), *FAULTS[fault])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_step_is_skipped(family, fault, caplog):
    actor = actor_of(family)
    actor.update([plain_batch(family)], Loss())
    weights, state = weights_of(actor), optimizer_state(actor)
    metrics = actor.update([bad_batch(family, fault)], Loss())
    assert metrics["skipped_steps"] == 1 and "skipped" in caplog.text
    for name, value in weights_of(actor).items():
        same(value, weights[name])
    for now, then in zip(optimizer_state(actor), state, strict=True):
        same(now, then)
    assert actor.publish().version == 2 and all(p.grad is None for p in actor.parameters)
    assert actor.update([plain_batch(family)], Loss())["skipped_steps"] == 0


def optimizer_state(actor):
    return [value.clone() for p in actor.parameters for value in actor.optimizer.state[p].values()]


def test_a_bad_gradient_of_a_good_loss_is_skipped(family):
    actor = actor_of(family)
    weights = weights_of(actor)
    hook = actor.parameters[0].register_hook(lambda gradient: gradient * math.inf)
    metrics = actor.update([plain_batch(family)], Loss())
    hook.remove()
    assert metrics["skipped_steps"] == 1 and math.isfinite(metrics["pg_loss"])
    for name, value in weights_of(actor).items():
        same(value, weights[name])
    assert actor.update([plain_batch(family)], Loss())["skipped_steps"] == 0


def test_good_steps_of_the_update_count_and_are_reported():
    good, bad = plain_batch(FAMILIES[0]), bad_batch()
    found = learn(actor_of(FAMILIES[0]), [bad, good, bad], Loss())
    alone = learn(actor_of(FAMILIES[0]), [good], Loss())
    assert found.metrics == alone.metrics | {"skipped_steps": 2.0}
    for name, value in found.weights.items():
        same(value, alone.weights[name])


def test_three_bad_steps_in_a_row_stop_the_run():
    actor = actor_of(FAMILIES[0])
    weights = weights_of(actor)
    actor.update([bad_batch(), bad_batch()], Loss())
    with pytest.raises(FloatingPointError, match=r"3 optimizer steps in a row .* worker\.actor\.optim\.lr"):
        actor.update([bad_batch()], Loss())
    for name, value in weights_of(actor).items():
        same(value, weights[name])


def test_a_good_step_starts_the_count_again():
    actor = actor_of(FAMILIES[0])
    good, bad = plain_batch(FAMILIES[0]), bad_batch()
    metrics = actor.update([bad, bad, good, bad, bad, good], Loss())
    assert metrics["skipped_steps"] == 4 and actor.bad_steps_in_a_row == 0
