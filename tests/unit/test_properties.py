"""Properties of every batch: any order of rows, any padding, any split, no effect outside the mask."""

import math
from dataclasses import fields, replace

import pytest
import torch
from helpers import INF, NAN, close, make_mask, same
from hypothesis import given
from hypothesis import strategies as st
from property_helpers import (
    ALL_RULES,
    DECIDED,
    DENOMINATORS,
    LOSS_TYPES,
    LOSSES,
    MAX_LENGTH,
    RULES,
    Step,
    assign_credit,
    steps,
    teacher_loss,
    train_batch,
)
from torch import Tensor

from mtrl.algorithms import advantages
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.groups import group_std
from mtrl.algorithms.losses import Loss, total_loss
from mtrl.algorithms.rewards import combine, vgr_hard_negative_reward, vgr_reward
from mtrl.algorithms.signals import pool_sizes, sequence_mass, vgr
from mtrl.utils.record_rows import take_rows


def assert_records_close(actual, expected, **tolerance) -> None:
    for f in fields(expected):
        torch.testing.assert_close(getattr(actual, f.name), getattr(expected, f.name), **tolerance, msg=f.name)


# ---- rows in any order ----


@given(steps(), RULES, st.randoms(use_true_random=False))
def test_permuting_rollouts_permutes_credit(step, rules, random):
    order = torch.tensor(random.sample(range(len(step.rollouts)), len(step.rollouts)))
    credit = assign_credit(step, rules)
    # Sums in another order: float64 inside, so at most a last bit of float32.
    assert_records_close(assign_credit(permuted(step, order), rules), take_rows(credit, order), rtol=3e-7, atol=1e-9)


@given(steps(), RULES, LOSS_TYPES, DENOMINATORS, LOSSES, st.randoms(use_true_random=False))
def test_permuting_rollouts_permutes_weights_and_keeps_the_loss(step, rules, loss_type, denominator, loss, random):
    order = torch.tensor(random.sample(range(len(step.rollouts)), len(step.rollouts)))
    batch = train_batch(step, rules, loss_type, denominator)
    other = train_batch(permuted(step, order), rules, loss_type, denominator)
    assert_records_close(other.weights, take_rows(batch.weights, order), rtol=3e-7, atol=1e-9)
    total, grad, _ = teacher_loss(step.logp.double(), batch, loss)
    other_total, other_grad, _ = teacher_loss(step.logp.double()[order], other, loss)
    close(other_total, total, rtol=1e-6, atol=1e-7)
    close(other_grad, grad[order], rtol=1e-6, atol=1e-7)


def permuted(step: Step, order: Tensor) -> Step:
    """Rows in another order with all prompts, so that group numbers stay."""
    shuffled = step.rows(order)
    return replace(
        shuffled, rollouts=replace(shuffled.rollouts, prompts=step.rollouts.prompts, group=step.rollouts.group[order])
    )


@given(steps(), st.randoms(use_true_random=False))
def test_permuting_rollouts_permutes_every_estimator_and_reward(step, random):
    rollouts, order = step.rollouts, torch.tensor(random.sample(range(len(step.rollouts)), len(step.rollouts)))
    shuffled = permuted(step, order)

    def everything(step: Step) -> list[Tensor]:
        group, mask, r = step.rollouts.group, step.rollouts.mask, step.rewards
        baseline = torch.linspace(0, 1, len(rollouts.prompts))[group]
        placed = advantages.token_rewards(r, mask, step.entropy)
        ratio = vgr(sequence_mass(step.mass[:, :, None], mask)[:, 0], pool_sizes(step.rollouts.prompts)[group])
        return [
            *(advantages.grpo(r, group, mask, scale) for scale in ("group", "batch", "none")),
            *(advantages.grpo(r, group, mask, scale, step.entropy) for scale in ("group", "batch", "none")),
            advantages.rloo(r, group, mask),
            advantages.remax(r, mask, baseline),
            advantages.reinforce_plus_plus(placed, mask, 0.9),
            *advantages.gae(placed, step.old, mask, 0.9, 0.8),
            combine({"a": r, "b": ratio}, [1, 2], group, "normalize_then_sum"),
            *(vgr_reward(ratio, group, normalizer) for normalizer in ("iqr", "mad")),
            *(vgr_hard_negative_reward(ratio, (r > 0).float(), group, "iqr", pool) for pool in ("correct", "group")),
        ]

    for actual, expected in zip(everything(shuffled), everything(step), strict=True):
        torch.testing.assert_close(actual, expected[order], rtol=1e-6, atol=1e-6, equal_nan=True)


@given(steps(min_rows=2))
def test_rloo_is_the_centred_reward_stretched(step):
    # r_i - (n m - r_i)/(n - 1) = n/(n - 1) * (r_i - m), for groups of two and more; sums to 0 in the group.
    group, mask = step.rollouts.group, make_mask(*[1] * len(step.rewards))
    n = torch.bincount(group)[group].double()
    centred = advantages.grpo(step.rewards, group, mask, "none")[:, 0].double()
    close(advantages.rloo(step.rewards, group, mask)[:, 0], (n / (n - 1).clamp(min=1)) * centred, atol=1e-6)


@given(steps(min_rows=2), st.sampled_from(["group", "batch", "none"]))
def test_a_penalty_of_rounding_size_has_no_effect_if_rewards_are_equal(step, scale):
    group, mask = step.rollouts.group, step.rollouts.mask
    rewards = step.rewards.where(group != 0, 1.5)
    flat = group_std(rewards, group)[group] == 0
    penalty = 1e-8 * (step.entropy - 1)  # up to 1e-7 over a response
    for advantage in (
        advantages.grpo(rewards, group, mask, scale, penalty),
        advantages.rloo(advantages.subtract_penalty(rewards, penalty, mask), group, mask),
    ):
        assert advantage[flat].abs().max() <= 1e-6


# ---- any padding, and nothing outside the mask ----


@given(steps(), RULES, LOSS_TYPES, st.integers(0, 3), st.sampled_from([0.0, 1e30, -1e30, INF, -INF, NAN]))
def test_credit_and_weights_ignore_padding(step, rules, loss_type, extra, fill):
    wide = step.widened(extra, fill)
    width = step.rollouts.mask.shape[1]
    expected, actual = train_batch(step, rules, loss_type), train_batch(wide, rules, loss_type)
    for name in ("advantage", "correction"):
        same(getattr(actual, name)[:, :width], getattr(expected, name))
    for name in ("policy", "divergence", "token", "gap"):
        wide_weights = getattr(actual.weights, name)
        torch.testing.assert_close(wide_weights[:, :width], getattr(expected.weights, name), rtol=2e-7, atol=0)
        assert (wide_weights[~wide.rollouts.mask] == 0).all()
    credit = assign_credit(wide, rules)
    assert (credit.advantage[~wide.rollouts.mask] == 0).all()
    assert (credit.token_weight[~wide.rollouts.mask] == 0).all()
    assert not credit.keep_mask[~wide.rollouts.mask].any()


@given(steps(), LOSSES, st.integers(0, 3), st.sampled_from([0.0, 1e30, -1e30, INF, -INF, NAN]))
def test_the_loss_ignores_padding(step, loss, extra, fill):
    wide = step.widened(extra, fill)
    width = step.rollouts.mask.shape[1]
    total, grad, metrics = teacher_loss(step.logp, train_batch(step, ALL_RULES), loss)
    other_total, other_grad, other_metrics = teacher_loss(wide.logp, train_batch(wide, ALL_RULES), loss)
    close(other_total, total, rtol=1e-5, atol=1e-6)  # float32 sums of another length
    close(other_grad[:, :width], grad, rtol=1e-6)
    assert (other_grad[~wide.rollouts.mask] == 0).all()
    for name, value in metrics.items():
        close(other_metrics[name], value, rtol=1e-5, atol=1e-6)


@given(steps(), st.integers(0, 3), st.sampled_from([0.0, 1e30, INF, NAN]))
def test_estimators_ignore_padding(step, extra, fill):
    wide = step.widened(extra, fill)
    width = step.rollouts.mask.shape[1]

    def everything(step: Step) -> list[Tensor]:
        mask = step.rollouts.mask
        placed = advantages.token_rewards(step.rewards, mask, step.entropy)
        return [
            placed,
            advantages.grpo(step.rewards, step.rollouts.group, mask, "group", step.entropy),
            advantages.reinforce_plus_plus(placed, mask, 0.9),
            *advantages.gae(placed, step.old, mask, 0.9, 0.8),
        ]

    for actual, expected in zip(everything(wide), everything(step), strict=True):
        torch.testing.assert_close(actual[:, :width], expected, rtol=1e-6, atol=1e-6)
        assert (actual[~wide.rollouts.mask] == 0).all()
    mask = step.rollouts.mask
    charged = advantages.subtract_penalty(step.rewards, wide.entropy, wide.rollouts.mask)
    same(charged, advantages.subtract_penalty(step.rewards, step.entropy, mask))
    masses = [sequence_mass(s.mass[:, :, None], s.rollouts.mask) for s in (wide, step)]
    same(*masses)


# ---- any split ----


@given(steps(min_rows=2), RULES, LOSS_TYPES, DENOMINATORS, LOSSES, st.booleans(), st.randoms(use_true_random=False))
def test_micro_batches_only_add(step, rules, loss_type, denominator, loss, truncate, random):
    """Any partition of the rows: losses and metrics add up, gradients equal those of the whole, to 1e-12 in float64."""
    rows = len(step.rollouts)
    silenced = torch.arange(rows) % 2 == 0 if truncate else None
    batch = train_batch(step, rules, loss_type, denominator, silenced)
    logp = step.logp.double()
    total, grad, metrics = teacher_loss(logp, batch, loss)

    order = random.sample(range(rows), rows)
    cuts = sorted(random.sample(range(1, rows), random.randint(0, rows - 1)))
    parts = [torch.tensor(order[a:b]) for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    added = torch.zeros((), dtype=torch.float64)
    added_metrics = dict.fromkeys(metrics, 0.0)
    for index in parts:
        part_total, part_grad, part_metrics = teacher_loss(logp[index], batch.rows(index), loss)
        added += part_total
        close(part_grad, grad[index], rtol=1e-12, atol=1e-15)
        for name, value in part_metrics.items():
            added_metrics[name] += value.item()
    close(added, total, rtol=1e-12, atol=1e-12)
    for name, value in metrics.items():
        assert added_metrics[name] == pytest.approx(value.item(), rel=1e-6, abs=1e-6)  # some are counted in float32


# ---- weights of one are plain GRPO ----


@given(steps(), LOSSES, LOSS_TYPES, st.sampled_from(["advantage", "mask"]))
def test_weights_and_scales_of_one_are_bitwise_plain_grpo(step, loss, loss_type, target):
    # No image changed anything (S = 0, so a flat range), every token weight is 1, all tokens are kept.
    step = replace(step, perturbed=step.old, mass=torch.full_like(step.mass, 0.25))
    rules = (
        PerceptionFilter(1.0),
        EntropyFilter(1.0),
        TrajectoryScaling(),
        AttentionWeights(target, token_weight_smooth_sigma=0.0),
    )
    shaped, plain = assign_credit(step, rules), assign_credit(step, ())
    for name in DECIDED:
        same(getattr(shaped, name), getattr(plain, name))
    results = [teacher_loss(step.logp, train_batch(step, r, loss_type), loss) for r in (rules, ())]
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])


@given(steps(min_rows=2, empty_rows=False), LOSS_TYPES)
def test_plain_grpo_equals_a_loop_in_python(step, loss_type):
    rollouts = step.rollouts
    group, lengths = rollouts.group.tolist(), rollouts.mask.sum(1).tolist()
    row_losses = []
    for i, n in enumerate(lengths):
        mates = [step.rewards[j].item() for j in range(len(group)) if group[j] == group[i]]
        mean = sum(mates) / len(mates)
        std = math.sqrt(sum((r - mean) ** 2 for r in mates) / max(len(mates) - 1, 1))
        advantage = (step.rewards[i].item() - mean) / (std + 1e-6) if std > 0 else 0.0
        losses = []
        for t in range(n):
            rho = math.exp(step.logp[i, t].item() - step.old[i, t].item())
            gain = min(rho * advantage, min(max(rho, 0.8), 1.3) * advantage)
            losses.append(-max(gain, 3 * advantage) if advantage < 0 else -gain)
        row_losses.append(losses)
    rows = len(lengths)
    expected = {
        "grpo": sum(sum(losses) / len(losses) for losses in row_losses) / rows,
        "dapo": sum(map(sum, row_losses)) / sum(lengths),
        "bnpo": sum(map(sum, row_losses)) / sum(lengths),
        "dr_grpo": sum(map(sum, row_losses)) / (rows * MAX_LENGTH),
    }[loss_type]
    batch = train_batch(step, (), loss_type)
    batch = replace(batch, correction=torch.ones_like(batch.correction))
    total, _ = total_loss(step.logp.double(), batch, Loss())
    assert total.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
