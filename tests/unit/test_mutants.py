"""Edge cases found by a mutation run (tests/mutation.py): values exactly on a limit, and far beyond one."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from helpers import close, fake_batch, fake_experience, fake_prompt, fake_rollouts, make_mask

from mtrl.algorithms.credit import assign
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.groups import top_fraction
from mtrl.algorithms.losses import POLICY_LOSSES, Loss, Ppo, loss_weights, mismatch_correction, total_loss
from mtrl.types import SEGMENTS, Signals


@pytest.mark.parametrize(
    ("p", "n", "k"),
    [
        (0.6, 100, 60),  # 60.000004 in float32: more than 1e-6 too much
        (0.72, 75, 54),  # 54.000004 in float32
        ((1 + 1.2e-6) / 2, 2, 2),  # p*n = 1 + 1.2e-6: ceil(1 + 0.2e-6)
        ((1 + 0.8e-6) / 2, 2, 1),  # p*n = 1 + 0.8e-6: ceil(1 - 0.2e-6)
    ],
)
def test_the_rounding_of_k(p, n, k):
    assert top_fraction(torch.zeros(1, n), make_mask(n), p).sum() == k


@pytest.mark.parametrize(("gap", "scale"), [(1e-6, [1.0, 1.0]), (1.1e-6, [0.8, 1.2])])
def test_a_range_of_exactly_the_limit_is_flat(gap, scale):
    # Above it u = (0, 1), mean 1/2, top = 0.8 + 0.2/0.5 = 1.2.
    score = torch.tensor([[0.0], [gap]], dtype=torch.float64)
    close(TrajectoryScaling().scale(score, make_mask(1, 1), torch.tensor([True, True])), scale)


def clip_fractions(log_ratio, advantage, **clips):
    rollouts = fake_rollouts([1] * len(advantage))
    batch = fake_batch(rollouts, torch.zeros(len(advantage), 1), torch.tensor(advantage)[:, None])
    logp = torch.full((len(advantage), 1), log_ratio)
    _, metrics = total_loss(logp, batch, Loss(Ppo(**clips)))
    return metrics["clipfrac_low"].item(), metrics["clipfrac_high"].item()


def test_clip_fractions_count_only_tokens_whose_gradient_the_clip_took():
    # Of the advantages only -0.5 and -2 are clipped below, only 0.5 and 2 above; 0 never is.
    advantages = [-2.0, -0.5, 0.0, 0.5, 2.0]
    assert clip_fractions(-1.0, advantages) == pytest.approx((2 / 5, 0))
    assert clip_fractions(1.0, advantages) == pytest.approx((0, 2 / 5))
    # A ratio of 1 between clips at 1 is on the limit, not beyond it.
    assert clip_fractions(0.0, advantages, clip_ratio_low=0.0, clip_ratio_high=0.0) == (0, 0)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["ppo", "cispo", "sapo"])
def test_absurd_ratios_leave_loss_and_gradient_finite(kind, level):
    # exp(200) is inf in float32, and inf * 0 in a clipped branch's gradient would be NaN
    rollouts = fake_rollouts([2, 2, 2, 2])
    old = torch.tensor([[-200.0, -1.0], [-200.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
    logp = torch.tensor([[-0.5, -1.0], [-0.5, -1.0], [-200.0, -1.0], [-200.0, -1.0]], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None].expand(4, 2)
    policy = POLICY_LOSSES.make(kind, {"importance_sampling_level": level, "clip_ratio_dual": None})
    loss, _ = total_loss(logp, fake_batch(rollouts, old, advantage), Loss(policy))
    (grad,) = torch.autograd.grad(loss, logp)
    assert loss.isfinite() and grad.isfinite().all()


def test_the_denominator_counts_all_valid_tokens_unless_told_otherwise():
    mask, select = make_mask(4), torch.tensor([[True, False, False, True]])
    close(loss_weights(mask.float(), select, "dapo", 9).policy, [[1 / 4, 0, 0, 1 / 4]])
    close(loss_weights(mask.float(), select, "dapo", 9, "selected").policy, [[1 / 2, 0, 0, 1 / 2]])


def test_denominators_are_summed_in_float64():
    # 2**24 + 1 is 2**24 in float32, and the first weight would be 1
    measure = torch.tensor([[2.0**24, 1.0]])
    assert loss_weights(measure, make_mask(2), "dapo", 9).token[0, 0] == 1 - 2.0**-24


def test_a_denominator_may_be_below_one():
    close(loss_weights(torch.tensor([[0.1, 0.3]]), make_mask(2), "dapo", 9).policy, [[1 / 4, 3 / 4]])


def test_the_gap_of_a_sequence_does_not_depend_on_the_order_of_its_tokens():
    # 64 + 1e-6 is 64 in float32: summed there, some orders would give a factor of 1
    gap = torch.tensor(list(permutations([64.0, 1e-6, -64.0])))
    factor = mismatch_correction(gap, torch.zeros(6, 3), make_mask(*[3] * 6), 2.0, "sequence")
    assert (factor > 1).all()
    close(factor, torch.full((6, 3), 1 + 1e-6))


def test_token_weights_come_from_whoever_has_them():
    """Pools of 2 and 4 tokens; VGR 1 and 4 in the layers that weights read (1 elsewhere): 1 and 1/4 over 5/8."""
    rollouts = replace(fake_rollouts([2]), prompts=(fake_prompt("p"),))
    mass = torch.tensor([1 / 3, 2 / 3]).repeat(1, 2, len(SEGMENTS), 1)
    mass[0, 1, SEGMENTS.index("weight")] = torch.tensor([2 / 3, 1 / 3])
    looking, blind, supplied = Signals(attention_mass=mass), Signals(), torch.full((1, 2), 2.0)

    def weights(signals, given=None, *rules):
        experience = fake_experience(rollouts, signals, torch.ones(1, 2), token_weights=given)
        return assign(rules, experience, (0, 0)).weights

    on = AttentionWeights()
    close(weights(looking, None, on), [[1.6, 0.4]])
    assert weights(looking, supplied, on) is supplied
    assert weights(blind, supplied, on) is supplied
    assert weights(blind, None, on) is None
    assert weights(looking) is None
    assert weights(looking, supplied) is None


def test_credit_shows_the_weights_it_used():
    weights = torch.tensor([[1.6, 0.4]])
    experience = fake_experience(fake_rollouts([2]), advantage=torch.ones(1, 2), token_weights=weights)
    assert assign([AttentionWeights()], experience, (0, 0)).weights is weights
    assert assign([], experience, (0, 0)).weights is None
