"""Optimizer steps computed by hand: their number, size and weights; and no step on numbers that are not finite."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import close, same
from tiny_models import checkpoint
from update_helpers import (
    CLIP,
    FAMILIES,
    FULL_LOSS,
    LR,
    copy_weights,
    difference,
    full_batch,
    learn,
    make_actor,
    plain_batch,
    rollouts_for,
)

from mtrl.algorithms.losses import Loss, loss_weights, total_loss
from mtrl.compose.policy import build_policy
from mtrl.config import load_config
from mtrl.models.backbone import Backbone
from mtrl.types import Needs
from mtrl.utils.errors import Diverged
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.reference import Reference

TEXT = "model.language_model.layers.0.mlp.down_proj.weight"


# ---------------------------------------------------------------------------------------------------- optimizer steps
def by_hand(family, batches):
    """AdamW of PyTorch on the loss of each whole batch."""
    actor = make_actor(family)
    optimizer = torch.optim.AdamW(actor.learner.parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    for batch in batches:
        optimizer.zero_grad()
        total_loss(actor.forward.logp(batch.rollouts), batch, FULL_LOSS)[0].backward()
        torch.nn.utils.clip_grad_norm_(actor.learner.parameters, CLIP)
        optimizer.step()
    return copy_weights(actor)


def halves(family):
    """Two optimizer steps of two prompts each, with separate denominators."""
    batch, parts = full_batch(family), []
    for rows in (torch.arange(6), torch.arange(6, 10)):
        part = batch.rows(rows)
        mask = part.rollouts.mask
        parts.append(replace(part, weights=loss_weights(mask.float(), mask, "dapo", 16)))
    return parts


def test_one_optimizer_step_a_batch(family):
    batches = halves(family) * 2  # two passes
    actor = make_actor(family)
    found = learn(actor, batches)
    expected = by_hand(family, batches)
    assert len(found.gradients) == actor.learner.optimizer_step == 4 and actor.learner.version == 1
    assert difference(found.weights.values(), expected.values()) < 1e-7
    moved = difference(found.weights.values(), by_hand(family, batches[:2]).values())
    assert moved > LR / 2, "the second pass counts"


@pytest.mark.parametrize("divergence", ["low_var_kl", "full"])
def test_images_of_the_next_pass_are_encoded_ahead(family, divergence, monkeypatch):
    """As on a GPU, before the backward pass of this one. The numbers are bitwise the same."""
    loss, order, found = replace(FULL_LOSS, divergence=divergence), [], {}
    encode, backward = Backbone.encode_images, torch.Tensor.backward
    monkeypatch.setattr(Backbone, "encode_images", lambda self, images: order.append(self) or encode(self, images))
    monkeypatch.setattr(torch.Tensor, "backward", lambda total: order.append("backward") or backward(total))
    for ahead in (False, True):
        actor = make_actor(family, MicroBatching(rows=3))
        actor.reference = Reference.frozen(actor.forward)
        assert not actor.learner.encodes_ahead, "nothing is gained on a CPU"
        actor.learner.encodes_ahead = ahead
        order.clear()
        found[ahead] = learn(actor, halves(family), loss)
        policy = "".join({actor.forward.backbone: "i", "backward": "b"}.get(each, "") for each in order)
        assert policy == 2 * ("iibb" if ahead else "ibib"), "two passes in each of two steps"
    assert found[True].metrics == found[False].metrics
    assert all(torch.equal(found[True].weights[name], weight) for name, weight in found[False].weights.items())


def test_versions_count_updates(family):
    actor = make_actor(family)
    assert actor.publish().version == 0
    actor.update(halves(family), Loss())
    weights = actor.publish()
    assert weights.version == 1
    held = dict(actor.model.named_parameters(remove_duplicate=False))
    assert weights.tensors.keys() == held.keys() > copy_weights(actor).keys(), "tied ones under each name"
    for _ in range(2):  # a handle may be read again
        assert all(torch.equal(tensor, held[name]) for name, tensor in weights.tensors.items())


def test_metrics_are_means_over_all_tokens():
    """Metrics are not those of the last micro-batch, but means over the optimizer steps."""
    family = FAMILIES[0]
    batches = halves(family)
    frozen = make_actor(family, MicroBatching(rows=1), lr=0.0, weight_decay=0.0)
    metrics = frozen.update(batches, FULL_LOSS)
    names = ("approx_kl", "clipfrac_low", "clipfrac_high", "clipfrac", "pg_loss", "entropy_penalty")
    expected: dict[str, list] = {name: [] for name in names}
    for batch in batches:
        mask = batch.rollouts.mask
        logp = frozen.probe(batch.rollouts, Needs("old_logprobs"), 0).old_logprobs.double()
        ratio = (logp - batch.old_logprobs).exp()
        unclipped, clipped = ratio * batch.advantage, ratio.clamp(0.8, 1.3) * batch.advantage
        gain = torch.minimum(unclipped, clipped)
        gain = torch.where(batch.advantage < 0, torch.maximum(gain, 3 * batch.advantage), gain)
        expected["approx_kl"].append((batch.old_logprobs - logp)[mask].mean())
        expected["clipfrac_low"].append(((ratio < 0.8) & (batch.advantage < 0))[mask].double().mean())
        expected["clipfrac_high"].append(((ratio > 1.3) & (batch.advantage > 0))[mask].double().mean())
        expected["clipfrac"].append(expected["clipfrac_low"][-1] + expected["clipfrac_high"][-1])
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
        ({"warmup_steps": 1, "total_steps": 5, "lr_scheduler_type": "linear"}, [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ({"warmup_steps": 0, "total_steps": 4, "lr_scheduler_type": "linear", "min_lr_ratio": 0.2},
         [1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"warmup_steps": 0, "total_steps": 4, "lr_scheduler_type": "cosine"}, [1.0, 0.853553, 0.5, 0.146447, 0.0]),
        ({"warmup_steps": 1, "total_steps": 3, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
         [0.5, 1.0, 0.55, 0.1]),
        ({"warmup_steps": 9, "total_steps": 4, "lr_scheduler_type": "cosine"}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"warmup_steps": 0, "total_steps": 0, "lr_scheduler_type": "linear"}, [1.0, 0.0]),
    ],
)  # fmt: skip
def test_learning_rates_by_hand(settings, expected):
    optimization = OptimizerSettings(lr=1e-2, **settings)
    close(torch.tensor([optimization.lr_at(step) for step in range(len(expected))]), [1e-2 * x for x in expected])


def test_the_optimizer_uses_the_scheduled_rate():
    """Adam's first step moves every weight by the rate, up to its epsilon."""
    for step, rate in enumerate((2e-4, 4e-4)):
        actor = make_actor(FAMILIES[0], lr=6e-4, warmup_steps=2, weight_decay=0.0)
        actor.learner.optimizer_step = step
        before = copy_weights(actor)
        after = learn(actor, [plain_batch(FAMILIES[0])], Loss())
        moved = (after.weights[TEXT] - before[TEXT]).abs()
        assert after.metrics["lr"] == pytest.approx(rate)
        assert float(moved.max()) == pytest.approx(rate, rel=1e-2)


def test_gradients_are_clipped_to_the_norm(family):
    def compute_norm(gradients):
        return float(torch.stack([g.norm() for g in gradients]).norm())

    free = learn(make_actor(family, max_grad_norm=math.inf), [plain_batch(family)], Loss())
    norm = compute_norm(free.gradients[0])
    assert norm > 1 and free.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    half = learn(make_actor(family, max_grad_norm=norm / 2), [plain_batch(family)], Loss())
    assert compute_norm(half.gradients[0]) == pytest.approx(norm / 2, rel=1e-4)
    assert half.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5), "the reported norm is from before clipping"
    loose = learn(make_actor(family, max_grad_norm=norm * 2), [plain_batch(family)], Loss())
    for ours, theirs in zip(loose.gradients[0], free.gradients[0], strict=True):
        same(ours, theirs)


# ----------------------------------------------------------------------------------------------------- model switches
def make_policy(family, **switches):
    settings = {f"worker.actor.model.{name}": value for name, value in switches.items()}
    settings |= {"worker.actor.model.model_path": str(checkpoint(family))}
    settings |= {"worker.actor.fsdp.mixed_precision_dtype": "fp32"}
    settings |= {"dataset.min_pixels": 1, "dataset.max_pixels": 10**6}
    return build_policy(load_config(None, settings))[1]


@pytest.mark.parametrize("compiled", [True, False])
def test_rows_are_packed_by_a_compiled_kernel_or_not_at_all(family, compiled, monkeypatch):
    monkeypatch.setattr(Backbone, "can_pack", True)  # as on a GPU
    settings = {"worker.actor.model.model_path": str(checkpoint(family)), "worker.actor.use_torch_compile": compiled}
    assert build_policy(load_config(None, settings))[1].packed is compiled


def test_gradient_checkpointing_changes_no_numbers(family, monkeypatch):
    """Bitwise equal; the whole layer, or a part of it, is computed twice."""
    work, found = {}, {}
    product = torch.nn.functional.linear
    for what in (False, True, "auto", "mlp", "attention"):
        policy = make_policy(family, enable_gradient_checkpointing=what)
        layer = policy.backbone.language_model.layers[0]
        block = policy.backbone.vision_tower.blocks[0]
        known = {id(layer.mlp.down_proj.weight): "mlp", id(layer.self_attn.q_proj.weight): "attention"}
        known[id(block.attn.proj.weight)] = "vision attention"
        work[what] = Counter()

        def counted(x, weight, *bias, known=known, seen=work[what]):
            seen[known.get(id(weight))] += 1
            return product(x, weight, *bias)

        monkeypatch.setattr(torch.nn.functional, "linear", counted)
        found[what] = learn(make_actor(family, forward=policy), [full_batch(family)])
        monkeypatch.setattr(torch.nn.functional, "linear", product)
    names = ("mlp", "attention", "vision attention")
    assert {what: tuple(seen[name] for name in names) for what, seen in work.items()} == {
        False: (1, 1, 1), True: (2, 2, 2), "auto": (2, 2, 2), "mlp": (2, 1, 1), "attention": (1, 2, 2)
    }  # fmt: skip
    for what in (True, "auto", "mlp", "attention"):
        assert all(torch.equal(weight, found[False].weights[name]) for name, weight in found[what].weights.items())
        assert found[what].metrics == found[False].metrics


def test_activations_of_recomputed_parts_are_not_stored(family):
    """Checks the tensors that a pass holds at its end; a copy of the model, the reference, uses its own weights."""
    held = {}
    for what in (False, "mlp", "attention", True):
        policy, saved = make_policy(family, enable_gradient_checkpointing=what), []
        policy.backbone.model.train()

        def keep(tensor, saved=saved):
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.scores(rollouts_for(family))
        held[what] = sum(saved)
    assert held[True] < min(held["mlp"], held["attention"]) and max(held["mlp"], held["attention"]) < held[False]
    policy = make_policy(family, enable_gradient_checkpointing="mlp")
    reference, before = Reference.frozen(policy), policy.signals(rollouts_for(family)).old_logprobs
    with torch.no_grad():
        policy.backbone.language_model.layers[0].mlp.down_proj.weight.zero_()
    assert not torch.equal(policy.signals(rollouts_for(family)).old_logprobs, before)
    assert torch.equal(reference.forward.signals(rollouts_for(family)).old_logprobs, before)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_frozen_vision_tower_stays_as_it_is(family, checkpointing):
    policy = make_policy(family, freeze_vision_tower=True, enable_gradient_checkpointing=checkpointing)
    actor = make_actor(family, forward=policy, weight_decay=0.5)
    before = copy_weights(actor)
    after = learn(actor, [full_batch(family)]).weights
    seeing = [name for name in before if ".visual." in name]
    assert seeing and all(torch.equal(before[name], after[name]) for name in seeing)
    assert all(not torch.equal(before[name], after[name]) for name in before if ".layers." in name)


def test_a_trained_vision_tower_learns(family):
    actor = make_actor(family)
    before = copy_weights(actor)
    after = learn(actor, [full_batch(family)]).weights
    assert not any(torch.equal(before[name], after[name]) for name in before if "mlp" in name)


# -------------------------------------------------------------------------------------------------- non-finite numbers
def poisoned(batch, field, value):
    changed = getattr(batch, field).clone()
    changed[0, 0] = value
    return replace(batch, **{field: changed})


FAULTS = {"nan advantage": ("advantage", math.nan), "inf advantage": ("advantage", -math.inf),
          "nan old": ("old_logprobs", math.nan), "inf correction": ("correction", math.inf)}  # fmt: skip


def bad_batch(family=FAMILIES[0], fault="nan advantage"):
    return poisoned(plain_batch(family), *FAULTS[fault])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_step_is_skipped(family, fault, caplog):
    actor = make_actor(family)
    actor.update([plain_batch(family)], Loss())
    weights, state = copy_weights(actor), optimizer_state(actor)
    metrics = actor.update([bad_batch(family, fault)], Loss())
    assert metrics["skipped_steps"] == 1 and "skipped" in caplog.text
    for name, value in copy_weights(actor).items():
        same(value, weights[name])
    for now, then in zip(optimizer_state(actor), state, strict=True):
        same(now, then)
    assert actor.publish().version == 2 and all(p.grad is None for p in actor.learner.parameters)
    assert actor.update([plain_batch(family)], Loss())["skipped_steps"] == 0


def optimizer_state(actor):
    return [value.clone() for p in actor.learner.parameters for value in actor.learner.optimizer.state[p].values()]


def test_a_bad_gradient_of_a_good_loss_is_skipped(family):
    actor = make_actor(family)
    weights = copy_weights(actor)
    hook = actor.learner.parameters[0].register_hook(lambda gradient: gradient * math.inf)
    metrics = actor.update([plain_batch(family)], Loss())
    hook.remove()
    assert metrics["skipped_steps"] == 1 and math.isfinite(metrics["pg_loss"])
    for name, value in copy_weights(actor).items():
        same(value, weights[name])
    assert actor.update([plain_batch(family)], Loss())["skipped_steps"] == 0


def test_good_steps_of_the_update_count_and_are_reported():
    good, bad = plain_batch(FAMILIES[0]), bad_batch()
    found = learn(make_actor(FAMILIES[0]), [bad, good, bad], Loss())
    alone = learn(make_actor(FAMILIES[0]), [good], Loss())
    assert found.metrics == alone.metrics | {"skipped_steps": 2.0}
    for name, value in found.weights.items():
        same(value, alone.weights[name])


def test_three_bad_steps_in_a_row_stop_the_run():
    actor = make_actor(FAMILIES[0])
    weights = copy_weights(actor)
    actor.update([bad_batch(), bad_batch()], Loss())
    with pytest.raises(Diverged, match=r"3 optimizer steps in a row .* worker\.actor\.optim\.lr"):
        actor.update([bad_batch()], Loss())
    for name, value in copy_weights(actor).items():
        same(value, weights[name])


def test_a_good_step_starts_the_count_again():
    actor = make_actor(FAMILIES[0])
    good, bad = plain_batch(FAMILIES[0]), bad_batch()
    metrics = actor.update([bad, bad, good, bad, bad, good], Loss())
    assert metrics["skipped_steps"] == 4 and actor.learner.bad_steps_in_a_row == 0
