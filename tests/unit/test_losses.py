"""SPEC 4 (policy losses, aggregation, mismatch), 1.3 (denominators), 1.5 (entropy penalty), by hand."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import INF, NAN, close, fake_batch, fake_rollouts, make_mask, padded, same

from mtrl.algorithms.losses import (
    POLICY_LOSSES,
    Cispo,
    Gspo,
    Loss,
    PolicyLoss,
    Ppo,
    Sapo,
    importance_ratio,
    loss_weights,
    mismatch_correction,
    total_loss,
)
from mtrl.types import LossWeights
from mtrl.utils.errors import RunError

LN2, LN3 = math.log(2), math.log(3)
PPO = Ppo()  # clip 0.2 below, 0.3 above, dual clip 3


class Unclipped(PolicyLoss):
    def term(self, ratio, logp, advantage):
        return -ratio * advantage


def term_and_slope(rule, ratios, advantage, logp=None):
    """Each token's loss and its derivative in l, for one row of ratios and one advantage."""
    ratios = torch.tensor([ratios], dtype=torch.float64)
    l = torch.zeros_like(ratios) if logp is None else torch.tensor([logp], dtype=torch.float64)  # noqa: E741
    old = l - ratios.log()
    l.requires_grad_()
    mask = torch.ones(ratios.shape, dtype=torch.bool)
    term = rule.term(importance_ratio(l, old, mask, rule.level), l, torch.full_like(ratios, advantage))
    term.sum().backward()
    return term[0], l.grad[0]


# ---- ppo: -min(rho A, clip(rho, 0.8, 1.3) A), for A < 0 not below 3 A ----


def test_ppo_with_a_positive_advantage():
    # A = 2. rho 1/2: min(1, 1.6) = 1, alive, slope -rho A = -1. rho 1.25: 2.5, alive. rho 2: min(4, 2.6), clipped,
    # slope 0. rho 4: 2.6 too; the dual clip is for negative advantages.
    term, slope = term_and_slope(PPO, [0.5, 1.0, 1.25, 2.0, 4.0], 2.0)
    close(term, [-1, -2, -2.5, -2.6, -2.6])
    close(slope, [-1, -2, -2.5, 0, 0])


def test_ppo_with_a_negative_advantage():
    # A = -2. rho 1/2: min(-1, -1.6) = -1.6, clipped, slope 0. rho 1: -2, slope rho * 2. rho 2: min(-4, -2.6) = -4,
    # alive. rho 4: min(-8, -2.6) = -8, not below 3 * -2 = -6: loss 6, slope 0.
    term, slope = term_and_slope(PPO, [0.5, 1.0, 2.0, 4.0], -2.0)
    close(term, [1.6, 2, 4, 6])
    close(slope, [0, 2, 4, 0])


def test_ppo_without_the_dual_clip():
    term, slope = term_and_slope(replace(PPO, clip_ratio_dual=None), [2.0, 4.0], -2.0)
    close(term, [4, 8])
    close(slope, [4, 8])


def test_ppo_clips_low_and_high_separately():
    rule = Ppo(clip_ratio_low=0.5, clip_ratio_high=0.25)
    close(term_and_slope(rule, [2.0], 1.0)[0], [-1.25])
    close(term_and_slope(rule, [0.25], -1.0)[0], [0.5])


def test_no_advantage_no_loss():
    for kind in ("ppo", "cispo", "sapo"):
        term, slope = term_and_slope(POLICY_LOSSES.make(kind), [0.5, 1.0, 4.0], 0.0)
        assert term.abs().max() == 0
        assert slope.abs().max() == 0


# ---- the sequence level ----


def test_the_sequence_ratio_and_its_gradient():
    # Row 0: l - o = ln 2, ln 8: mean ln 4, s = 4. Row 1: one token, ln 3: s = 3. Each token has the value s and,
    # through exp(l - sg l), the slope s in its own l alone (not s/n, as the derivative of the mean would be).
    logp = torch.tensor([[-1.0, -2.0], [-3.0, 5.0]], requires_grad=True)
    old = torch.tensor([[-1 - LN2, -2 - math.log(8)], [-3 - LN3, -70.0]])
    mask = make_mask(2, 1)
    ratio = importance_ratio(logp, old, mask, "sequence")
    close(ratio[mask], [4, 4, 3])
    (ratio * torch.tensor([[1.0, 10.0], [100.0, 1000.0]])).sum().backward()
    close(logp.grad, [[4, 40], [300, 0]])


def test_the_token_ratio_and_its_gradient():
    logp = torch.tensor([[-1.0, -2.0, 9.0]], requires_grad=True)
    old = torch.tensor([[-1 - LN2, -2 + LN2, -9.0]])
    ratio = importance_ratio(logp, old, make_mask(2, width=3), "token")
    close(ratio[0, :2], [2, 0.5])
    (ratio * torch.tensor([[1.0, 10.0, 100.0]])).sum().backward()
    close(logp.grad, [[2, 5, 0]])


def test_ppo_clips_the_sequence_ratio():
    # Token ratios 1.21 and 1: s = 1.1, within (0.8, 1.3): both tokens -1.1 A, slope -1.1 A.
    rule = replace(PPO, importance_sampling_level="sequence")
    term, slope = term_and_slope(rule, [1.21, 1.0], 2.0)
    close(term, [-2.2, -2.2])
    close(slope, [-2.2, -2.2])
    # 8 and 1/2: s = 2 > 1.3, clipped, although the second token's own ratio is not.
    term, slope = term_and_slope(rule, [8.0, 0.5], 2.0)
    close(term, [-2.6, -2.6])
    close(slope, [0, 0])
    # The same with A = -1: alive, loss 2; and with 32 and 1/2: s = 4, the dual clip holds it at 3.
    term, slope = term_and_slope(rule, [8.0, 0.5], -1.0)
    close(term, [2, 2])
    close(slope, [2, 2])
    term, slope = term_and_slope(rule, [32.0, 0.5], -1.0)
    close(term, [3, 3])
    close(slope, [0, 0])


# ---- cispo and sapo ----


@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo(advantage):
    # -sg(min(rho, 5)) A l at l = -1, -1/2, -3: the gradient is -min(rho, 5) A: it never dies. No clip below.
    rule = Cispo()
    term, slope = term_and_slope(rule, [2.0, 10.0, 0.125], advantage, logp=[-1.0, -0.5, -3.0])
    close(term, [2 * advantage, 2.5 * advantage, 0.375 * advantage])
    close(slope, [-2 * advantage, -5 * advantage, -0.125 * advantage])
    term, slope = term_and_slope(replace(rule, cispo_clip_high=1.5), [2.0], advantage, logp=[-1.0])
    close(slope, [-1.5 * advantage])


def test_cispo_at_the_sequence_level():
    # 8 and 1/2: s = 2 for both tokens; clipped at 1.5.
    rule = Cispo(importance_sampling_level="sequence")
    close(term_and_slope(rule, [8.0, 0.5], 1.0, logp=[-1.0, -3.0])[0], [2, 6])
    close(term_and_slope(rule, [8.0, 0.5], 1.0, logp=[-1.0, -3.0])[1], [-2, -2])
    close(term_and_slope(replace(rule, cispo_clip_high=1.5), [8.0, 0.5], 1.0, logp=[-1.0, -3.0])[1], [-1.5, -1.5])


def test_sapo_positive():
    # tau 1, A = 2. rho 1: sigmoid(0) = 1/2: -4 * 1/2 * 2 = -4, slope -(4/tau) * tau * 1/4 * rho * A = -rho A = -2.
    # rho = 1 + ln 3: sigmoid = 3/4: -6; sigmoid' = 3/16: slope -4 * 3/16 * rho * 2 = -3/2 rho.
    rho = 1 + LN3
    term, slope = term_and_slope(Sapo(), [1.0, rho], 2.0)
    close(term, [-4, -6])
    close(slope, [-2, -1.5 * rho])


def test_sapo_negative():
    # tau 1.05, A = -1. rho 1: (4/1.05)/2. rho = 1 + ln(3)/1.05: sigmoid(ln 3) = 3/4: 3/1.05, slope 4 * 3/16 * rho.
    rho = 1 + LN3 / 1.05
    term, slope = term_and_slope(Sapo(), [1.0, rho], -1.0)
    close(term, [2 / 1.05, 3 / 1.05])
    close(slope, [1, 0.75 * rho])


def test_sapo_takes_the_tau_of_the_sign():
    rule = Sapo(tau_positive=2.0, tau_negative=4.0)
    # rho = 1 + ln 3: sigmoid(2 ln 3) = 9/10, -(4/2) * 9/10;  sigmoid(4 ln 3) = 81/82, (4/4) * 81/82.
    close(term_and_slope(rule, [1 + LN3], 1.0)[0], [-1.8])
    close(term_and_slope(rule, [1 + LN3], -1.0)[0], [81 / 82])


# ---- truncated importance sampling ----

# Row 0: o - b = ln 3, -ln 2. Row 1, one token: ln 5. Ratios 3, 1/2, 5; of the sequences 3/2, 5.
OLD = torch.tensor([[-1.0, -2.0], [-1.0, INF]])
BEHAVIOUR = torch.tensor([[-1 - LN3, -2 + LN2], [-1 - math.log(5), NAN]])


@pytest.mark.parametrize(
    ("clip", "level", "expected"),
    [
        (2.0, "token", [[2, 0.5], [2, 1]]),
        (4.0, "token", [[3, 0.5], [4, 1]]),
        (2.0, "sequence", [[1.5, 1.5], [2, 1]]),
        (1.25, "sequence", [[1.25, 1.25], [1.25, 1]]),
        (None, "token", [[1, 1], [1, 1]]),
        (None, "sequence", [[1, 1], [1, 1]]),
    ],
)
def test_mismatch_correction(clip, level, expected):
    close(mismatch_correction(OLD, BEHAVIOUR, make_mask(2, 1), clip, level), expected)


def test_mismatch_correction_of_a_great_gap_is_finite():
    gap = torch.tensor([[500.0, -500.0]])
    close(mismatch_correction(gap, torch.zeros(1, 2), make_mask(2), 2.0, "token"), [[2, 0]])


# ---- the whole loss ----

LENGTHS = make_mask(1, 3)
ALL = LENGTHS.float()
SELECT = torch.tensor([[True, False, False], [True, False, True]])

# Two responses of 1 and 3 tokens, everything in powers of two. A = 2 and -1.
#   row 0: l = -1, rho = 1                   term -2
#   row 1: l = -2 each, rho = 1, 2, 1/2      terms 1, 2 (alive), 0.8 (clipped below)
# dapo: weights 1/4. Policy loss (-2 + 1 + 2 + 0.8)/4 = 0.45. Slopes -rho A w: -1/2; 1/4, 2/4, 0.
LOGP = padded([[-1], [-2, -2, -2]], fill=5.0)
OLD_LOGP = padded([[-1], [-2, -2 - LN2, -2 + LN2]], fill=-60.0)
ADVANTAGE = padded([[2], [-1, -1, -1]])
REFERENCE = padded([[-1 - LN2], [-2, -2, -2 + LN2]], fill=33.0)
ROLLOUTS = fake_rollouts([1, 3])


def loss_and_slope(loss, **fields):
    logp = LOGP.clone().requires_grad_()
    batch = fake_batch(ROLLOUTS, OLD_LOGP, ADVANTAGE, reference=REFERENCE, **fields)
    total, metrics = total_loss(logp, batch, loss)
    total.backward()
    return total, logp.grad, metrics


def test_policy_loss_alone():
    total, slope, metrics = loss_and_slope(Loss())
    close(total, 0.45)
    close(slope, [[-0.5, 0, 0], [0.25, 0.5, 0]])
    close(metrics["pg_loss"], 0.45)
    assert "divergence_loss" not in metrics
    assert "entropy_penalty" not in metrics


def test_metrics_of_the_ratio():
    # o - l = 0; 0, -ln 2, ln 2: mean 0. One token of four is clipped below (rho 1/2 < 0.8, A < 0), none above: rho 2
    # has A < 0, where the upper clip does not bite.
    _, _, metrics = loss_and_slope(Loss())
    close(metrics["approx_kl"], 0.0)
    close(metrics["clipfrac_low"], 0.25)
    close(metrics["clipfrac_high"], 0.0)
    assert not metrics["pg_loss"].requires_grad


@pytest.mark.parametrize(
    ("policy", "low", "high"),
    [
        (Ppo(), 1 / 4, 1 / 4),  # of 1/2 the one with A < 0, of 8 the one with A > 0
        (Gspo(), 1 / 4, 1 / 4),
        (Cispo(cispo_clip_high=5.0), 0, 2 / 4),  # 8 is capped for both signs; 1/2 never is
        (Cispo(cispo_clip_high=8.5), 0, 0),
        (Sapo(), 0, 0),  # nothing is clipped
        (Unclipped(), 0, 0),  # one's own loss that says nothing of a clip
    ],
)
def test_each_loss_says_what_it_clips(policy, low, high):
    batch = fake_batch(fake_rollouts([1] * 5), torch.zeros(5, 1), torch.tensor([[1.0], [-1], [1], [-1], [0]]))
    logp = torch.tensor([[-LN2], [-LN2], [3 * LN2], [3 * LN2], [3 * LN2]])
    _, metrics = total_loss(logp, batch, Loss(policy))
    close(metrics["clipfrac_low"], low * 4 / 5)
    close(metrics["clipfrac_high"], high * 4 / 5)
    close(metrics["clipfrac"], (low + high) * 4 / 5)


def test_the_tokens_that_cispo_caps():
    low, high = Cispo(cispo_clip_high=5.0).clipped(torch.tensor([5.0, 6, 6, 6]), torch.tensor([1.0, 1, -1, 0]))
    assert not low.any() and high.tolist() == [False, True, True, False]


def test_an_own_loss_of_another_shape_is_refused():
    class Summed(Unclipped):
        def term(self, ratio, logp, advantage):
            return ratio.sum()

    batch = fake_batch(fake_rollouts([2]), torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(RunError, match=r"returned a tensor \[\], not \[1, 2\]: the loss of each token, \[N, T\]$"):
        total_loss(torch.zeros(1, 2), batch, Loss(Summed()))


def test_an_error_in_the_clip_of_an_own_loss_names_it():
    class Broken(Unclipped):
        def clipped(self, ratio, advantage):
            raise ValueError("no clip today")

    batch = fake_batch(fake_rollouts([1]), torch.zeros(1, 1), torch.ones(1, 1))
    with pytest.raises(RunError, match=r"policy loss Broken failed: ValueError: no clip today"):
        total_loss(torch.zeros(1, 1), batch, Loss(Broken()))


def test_clipfrac_follows_the_sign_of_the_advantage():
    # Ratios 2 and 1/4 with A = 1: one of two clipped above, none below. approx_kl: (-ln 2 + ln 4)/2 = ln(2)/2.
    rollouts = fake_rollouts([2])
    batch = fake_batch(rollouts, torch.zeros(1, 2), torch.ones(1, 2))
    _, metrics = total_loss(torch.tensor([[LN2, -2 * LN2]]), batch, Loss())
    close(metrics["clipfrac_high"], 0.5)
    close(metrics["clipfrac_low"], 0.0)
    close(metrics["approx_kl"], LN2 / 2)


def test_entropy_penalty_is_the_mean_of_minus_l():
    # Mean of -l over four tokens: (1 + 2 + 2 + 2)/4 = 1.75; times 0.06 = 0.105. Slope -0.06/4 each: it lowers entropy.
    total, slope, metrics = loss_and_slope(Loss(entropy_penalty_coef=0.06))
    close(total, 0.45 + 0.105)
    close(slope, [[-0.5 - 0.015, 0, 0], [0.25 - 0.015, 0.5 - 0.015, -0.015]])
    close(metrics["entropy_penalty"], 1.75)
    close(metrics["pg_loss"], 0.45)


def test_entropy_penalty_is_a_token_mean_under_every_loss_type():
    for loss_type in ("grpo", "dr_grpo"):
        weights = loss_weights(ALL, SELECT, loss_type, 4, silenced=torch.tensor([True, True]))
        total, _, _ = loss_and_slope(Loss(entropy_penalty_coef=1.0), weights=weights)
        close(total, 1.75)


@pytest.mark.parametrize(
    ("penalty", "distance", "slope"),
    [
        # d = l - ref = ln 2; 0, 0, -ln 2.
        ("kl", 0.0, [[0.25, 0, 0], [0.25, 0.25, 0.25]]),
        ("abs", LN2 / 2, [[0.25, 0, 0], [0, 0, -0.25]]),
        ("mse", LN2**2 / 4, [[LN2 / 4, 0, 0], [0, 0, -LN2 / 4]]),
        # exp(-d) + d - 1 = ln 2 - 1/2; 0, 0, 1 - ln 2: sum 1/2, mean 1/8. Slope (1 - exp(-d))/4.
        ("low_var_kl", 1 / 8, [[0.125, 0, 0], [0, 0, -0.25]]),
    ],
)
def test_divergence_loss(penalty, distance, slope):
    total, grad, metrics = loss_and_slope(Loss(divergence=penalty, divergence_coef=0.5))
    close(metrics["divergence_loss"], distance)
    close(total, 0.45 + 0.5 * distance)
    close(grad, torch.tensor([[-0.5, 0, 0], [0.25, 0.5, 0]]) + 0.5 * torch.tensor(slope))


def test_divergence_and_penalty_ignore_the_filter_and_the_truncation():
    # No token selected for the policy term: what remains is 0.5/8 and 0.06 * 1.75.
    none = torch.zeros_like(LENGTHS)
    for weights in (
        loss_weights(ALL, none, "dapo", 4, "selected"),
        loss_weights(ALL, LENGTHS, "dapo", 4, silenced=torch.tensor([True, True])),
    ):
        total, _, metrics = loss_and_slope(Loss(divergence_coef=0.5, entropy_penalty_coef=0.06), weights=weights)
        close(metrics["pg_loss"], 0.0)
        close(total, 1 / 16 + 0.105)


def test_divergence_loss_follows_the_loss_type():
    # grpo: row means of exp(-d) + d - 1: ln 2 - 1/2 and (1 - ln 2)/3, then the mean of both.
    weights = loss_weights(ALL, LENGTHS, "grpo", 4)
    _, _, metrics = loss_and_slope(Loss(divergence_coef=0.5), weights=weights)
    close(metrics["divergence_loss"], (LN2 - 0.5 + (1 - LN2) / 3) / 2)
    # and the policy: (-2 + (1 + 2 + 0.8)/3)/2.
    close(metrics["pg_loss"], (-2 + 3.8 / 3) / 2)


def test_the_correction_multiplies_the_policy_term_alone():
    # Factors 2; 1/2, 1, 0: (-4 + 1/2 + 2 + 0)/4 = -0.375; slopes -1; 1/8, 1/2, 0.
    correction = padded([[2], [0.5, 1, 0]], fill=1.0)
    total, slope, metrics = loss_and_slope(Loss(divergence_coef=0.5, entropy_penalty_coef=0.06), correction=correction)
    close(metrics["pg_loss"], -0.375)
    close(total, -0.375 + 1 / 16 + 0.105)
    _, slope, _ = loss_and_slope(Loss(), correction=correction)
    close(slope, [[-1, 0, 0], [0.125, 0.5, 0]])


def test_without_old_log_probs_the_policy_is_its_own_old_one():
    """rho is 1 and its slope A/4; the sampler's factors exp(o - b) are 2; 1/2, 4 (cut to 3) and 1."""
    gap = padded([[LN2], [-LN2, 2 * LN2, 0]])
    rollouts = replace(ROLLOUTS, rollout_logprobs=LOGP - gap)
    batch = replace(fake_batch(rollouts, OLD_LOGP, ADVANTAGE), old_logprobs=None, correction=None)
    logp = LOGP.clone().requires_grad_()
    total, metrics = total_loss(logp, batch, Loss(tis_clip=3.0))
    total.backward()
    factors = torch.tensor([[2.0, 1, 1], [0.5, 3, 1]])
    expected = (-ADVANTAGE * factors / 4).where(ROLLOUTS.mask, 0.0)
    close(total, expected.sum())
    close(logp.grad, expected)
    close(metrics["approx_kl"], 0)
    close(metrics["logprob_gap_mean"], LN2)  # (1 + 1 + 2 + 0) / 4
    close(metrics["logprob_gap_kl"], -LN2 / 2)  # (-1 + 1 - 2 + 0) / 4
    _, _, probed = loss_and_slope(Loss())
    assert "logprob_gap_mean" not in probed and "logprob_gap_kl" not in probed


def test_a_divergence_loss_without_a_reference_is_a_mistake():
    batch = replace(fake_batch(ROLLOUTS, OLD_LOGP, ADVANTAGE), ref_logprobs=None)
    with pytest.raises(AssertionError, match="reference"):
        total_loss(LOGP, batch, Loss(divergence_coef=0.5))


def test_a_full_divergence_is_given():
    # KL 1; 2, 0, 3 of the vocabulary: mean 3/2, whatever the log-probs of the sampled tokens are.
    kl = padded([[1], [2, 0, 3]], fill=99.0).requires_grad_()
    batch = fake_batch(ROLLOUTS, OLD_LOGP, ADVANTAGE)
    total, metrics = total_loss(LOGP, batch, Loss(divergence="full", divergence_coef=0.5), kl)
    total.backward()
    close(metrics["divergence_loss"], 1.5)
    close(total, 0.45 + 0.75)
    close(kl.grad, [[0.125, 0, 0], [0.125, 0.125, 0.125]])
    with pytest.raises(AssertionError, match="vocabulary"):
        total_loss(LOGP, batch, Loss(divergence="full", divergence_coef=0.5))


def test_sequence_level_loss_by_hand():
    # Row 0: s = 1. Row 1: ratios 1, 2, 1/2: s = 1 too. Terms -2; 1, 1, 1: mean 1/4. Slopes -rho A/4.
    total, slope, _ = loss_and_slope(Loss(Ppo(importance_sampling_level="sequence")))
    close(total, 0.25)
    close(slope, [[-0.5, 0, 0], [0.25, 0.25, 0.25]])


def test_a_batch_of_empty_rows_has_no_loss():
    rollouts = fake_rollouts([0, 0], width=2)
    batch = fake_batch(rollouts, torch.full((2, 2), -1.0), torch.ones(2, 2), reference=torch.zeros(2, 2))
    logp = torch.zeros(2, 2, requires_grad=True)
    for kind in ("ppo", "cispo", "sapo"):
        for level in ("token", "sequence"):
            rule = Loss(
                POLICY_LOSSES.make(kind, {"importance_sampling_level": level}),
                divergence_coef=1.0,
                entropy_penalty_coef=1.0,
            )
            total, _ = total_loss(logp, batch, rule)
            assert total.item() == 0
            (grad,) = torch.autograd.grad(total, logp)
            same(grad, torch.zeros(2, 2))


def test_term_weights_are_float32():
    weights = loss_weights(ALL, LENGTHS, "dapo", 4)
    assert isinstance(weights, LossWeights)
    assert {weights.policy.dtype, weights.divergence.dtype, weights.token.dtype} == {torch.float32}
