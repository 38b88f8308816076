"""SPEC 4, divergence and its controller, by hand."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import INF, close, make_mask, padded

from mtrl.algorithms.divergence import Divergence, adapt_coefficient, divergence
from mtrl.algorithms.losses import Loss
from mtrl.types import Needs, Signals

LN2, LN3 = math.log(2), math.log(3)
LOGP = torch.tensor([0.5, 0.25, 0.1]).log()
REFERENCE = torch.tensor([0.25, 0.5, 0.1]).log()
# d = logp - reference = ln 2, -ln 2, 0.


@pytest.mark.parametrize(
    ("penalty", "expected", "slope"),
    [
        ("kl", [LN2, -LN2, 0], [1, 1, 1]),
        ("abs", [LN2, LN2, 0], [1, -1, 0]),
        ("mse", [LN2**2 / 2, LN2**2 / 2, 0], [LN2, -LN2, 0]),
        # x = -d: exp(-d) + d - 1 = 1/2 + ln 2 - 1, 2 - ln 2 - 1, 0; its slope in logp is 1 - exp(-d) = 1/2, -1, 0.
        ("low_var_kl", [LN2 - 0.5, 1 - LN2, 0], [0.5, -1, 0]),
    ],
)
def test_divergence_value_and_gradient(penalty, expected, slope):
    logp = LOGP.clone().requires_grad_()
    value = divergence(logp, REFERENCE, penalty)
    close(value, expected)
    value.sum().backward()
    close(logp.grad, slope)


def test_low_var_kl_is_held_within_10():
    # d = -3: e^3 - 3 - 1 = 16.09 -> 10.  d = 12: e^-12 + 12 - 1 = 11.00 -> 10.  d = 5: e^-5 + 4.  d = -500: finite.
    logp = torch.tensor([-3.0, 12.0, 5.0, -500.0], requires_grad=True)
    value = divergence(logp, torch.zeros(4), "low_var_kl")
    close(value, [10, 10, math.exp(-5) + 4, 10])
    value.sum().backward()
    close(logp.grad, [0, 0, 1 - math.exp(-5), 0])


def test_full_is_not_a_function_of_two_log_probs():
    with pytest.raises(ValueError, match="full"):
        divergence(LOGP, REFERENCE, "full")


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        # coef 0.01, target 6, horizon 10000, 1000 responses: each unit of error moves it by a tenth.
        (6.0, 0.01),  # on target
        (6.6, 0.01 * 1.01),  # e = 0.1
        (5.4, 0.01 * 0.99),  # e = -0.1
        (60.0, 0.01 * 1.02),  # e = 9 -> 0.2
        (7.2, 0.01 * 1.02),  # e = 0.2
        (0.0, 0.01 * 0.98),  # e = -1 -> -0.2
    ],
)
def test_adaptive_controller(kl, expected):
    assert adapt_coefficient(0.01, kl, responses=1000, target=6.0, horizon=10000.0) == pytest.approx(
        expected, rel=1e-12
    )


def test_adaptive_controller_counts_responses_against_the_horizon():
    # e = 0.2, 512 of 1024: factor 1.1.
    assert adapt_coefficient(2.0, 99.0, responses=512, target=1.0, horizon=1024.0) == pytest.approx(2.2, rel=1e-12)


# ---- where it is charged ----

MASK = make_mask(2, 1)
SIGNALS = Signals(old_logprobs=padded([[-1, -2], [-3]], fill=INF), ref_logprobs=padded([[-1.5, -1], [-5]], fill=-9.0))
# d = 1/2, -1 and 2.


def test_the_distance_is_of_the_policy_before_the_updates():
    assert Divergence("kl", 0.1).needs == Divergence("low_var_kl", 0.1).needs == Needs("old_logprobs", "ref_logprobs")
    close(Divergence("kl", 0.1).distance(SIGNALS)[MASK], [0.5, -1, 2])
    close(Divergence("mse", 0.1).distance(SIGNALS)[MASK], [0.125, 0.5, 2])


def test_the_full_distance_comes_from_the_probe():
    rule = Divergence("full", 0.5)
    assert rule.needs == Needs("old_logprobs", "divergence")
    signals = Signals(old_logprobs=torch.zeros(1, 2), divergence=torch.tensor([[1.0, 3.0]]))
    close(rule.distance(signals), [[1, 3]])
    close(rule.reward_penalty(signals), [[0.5, 1.5]])


def test_the_full_distance_as_a_loss_is_computed_in_the_update():
    assert not Divergence("full", 0.5, use_divergence_loss=True).needs
    assert Divergence("full", 0.5, use_divergence_loss=True, divergence_type="adaptive").needs == Needs(
        "old_logprobs", "divergence"
    )
    assert Loss().with_divergence(Divergence("full", 0.5, use_divergence_loss=True)).full_divergence
    assert not Loss().with_divergence(Divergence("full", 0.5)).full_divergence
    assert not Loss(divergence="full").full_divergence, "a coefficient of 0 takes the term out"


def test_in_the_reward_or_as_a_loss():
    charge = Divergence("kl", 0.5).reward_penalty(SIGNALS)
    close(charge[MASK], [0.25, -0.5, 1])
    assert Divergence("kl", 0.5, use_divergence_loss=True).reward_penalty(SIGNALS) is None
    loss = Loss(entropy_penalty_coef=0.25)
    assert loss.with_divergence(Divergence("mse", 0.5)) == loss.with_divergence(None) == loss
    assert loss.with_divergence(Divergence("mse", 0.5, use_divergence_loss=True)) == replace(
        loss, divergence="mse", divergence_coef=0.5
    )


def test_the_mean_is_over_responses_of_the_sum_over_tokens():
    # (1/2 - 1 + 2) / 2.
    assert Divergence("kl", 0.5).mean(SIGNALS, MASK) == pytest.approx(0.75)


def test_the_coefficient_of_the_next_step():
    fixed = Divergence("kl", 2.0)
    assert fixed.adapted(99.0, 512) is fixed
    adaptive = Divergence(
        "kl",
        2.0,
        use_divergence_loss=True,
        divergence_type="adaptive",
        divergence_target=1.0,
        divergence_horizon=1024.0,
    )
    assert adaptive.adapted(99.0, 512) == replace(adaptive, divergence_coef=pytest.approx(2.2))
