"""SPEC 4, divergence and its controller, by hand."""

import math

import pytest
import torch
from helpers import close

from mtrl.algorithms.divergence import adapt_coefficient, divergence

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
