"""The critic's loss and explained variance, by hand; and against verl's results for the same input."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from helpers import INF, NAN, close, fake_batch, fake_experience, fake_rollouts, make_mask, padded

from mtrl.algorithms.advantages import gae
from mtrl.algorithms.batches import BatchPlan, assemble
from mtrl.algorithms.credit import assign
from mtrl.algorithms.losses import Loss
from mtrl.algorithms.value_loss import ValueLoss, explained_variance, value_loss, value_metrics
from mtrl.config import load_config
from mtrl.types import Signals

# Responses of two tokens and of one, a clip of 1/2. The first value moved by 1/4: it is free, (5/4 - 2)² = 9/16. The
# second moved from 0 to 3/4, past the clip and towards its return 1: (1/2 - 1)² = 1/4 counts, without a gradient. The
# third moved from 2 to 11/4, away from its return 0: (11/4)² = 121/16 is the larger one.
OLD = padded([[1, 0], [2]], fill=NAN)
RETURNS = padded([[2, 1], [0]])
VALUES = padded([[1.25, 0.75], [2.75]], fill=INF)
ROLLOUTS = fake_rollouts([2, 1], group=[0, 1])


def make_batch(rollouts=ROLLOUTS, old=OLD, returns=RETURNS):
    zeros = torch.zeros(rollouts.mask.shape)
    return replace(fake_batch(rollouts, zeros, zeros), values=old, returns=returns)


def test_the_value_loss_by_hand():
    values = VALUES.clone().requires_grad_()
    loss, metrics = value_loss(values, make_batch(), ValueLoss(0.5))
    close(loss, 0.5 * (9 / 16 + 1 / 4 + 121 / 16) / 3)
    loss.backward()
    close(values.grad, [[-0.75 / 3, 0], [2.75 / 3, 0]])
    result = {name: float(value) for name, value in metrics.items()}
    assert result == pytest.approx({"value_loss": 8.375 / 6, "value_clipfrac": 1 / 3, "value_mean": 4.75 / 3})
    assert not any(value.requires_grad for value in metrics.values())


def test_without_a_clip_every_value_learns():
    values = VALUES.clone().requires_grad_()
    loss, metrics = value_loss(values, make_batch(), ValueLoss(math.inf))
    close(loss, 0.5 * (9 / 16 + 1 / 16 + 121 / 16) / 3)
    loss.backward()
    close(values.grad, [[-0.75 / 3, -0.25 / 3], [2.75 / 3, 0]])
    assert metrics["value_clipfrac"] == 0


def test_a_response_of_one_token_is_half_its_square():
    one = fake_rollouts([1])
    loss, _ = value_loss(
        torch.tensor([[3.0]]), make_batch(one, torch.tensor([[2.75]]), torch.tensor([[1.0]])), ValueLoss()
    )
    close(loss, 2.0)


def test_slices_of_an_optimizer_step_add_up():
    whole, metrics = value_loss(VALUES, make_batch(), ValueLoss(0.5))
    parts = [
        value_loss(VALUES[row : row + 1], make_batch().rows(torch.tensor([row])), ValueLoss(0.5)) for row in (0, 1)
    ]
    close(sum(loss for loss, _ in parts), whole)
    for name, value in metrics.items():
        close(sum(result[name] for _, result in parts), value)


def test_token_weights_in_the_mask_count_here_too():
    """Weights 3 and 1 in place of the mask: (3 * 9/16 + 1/4 + 121/16) / 5."""
    batch = make_batch()
    weights = replace(batch.weights, token=padded([[0.6, 0.2], [0.2]]))
    loss, _ = value_loss(VALUES, replace(batch, weights=weights), ValueLoss(0.5))
    close(loss, 0.5 * (3 * 9 / 16 + 1 / 4 + 121 / 16) / 5)


def test_the_clip_is_that_of_the_configuration():
    assert ValueLoss().clip == load_config(None).worker.critic.cliprange_value == 0.5


def test_a_batch_without_returns_is_our_mistake():
    with pytest.raises(AssertionError, match="returns"):
        value_loss(VALUES, replace(make_batch(), returns=None), ValueLoss())


# ------------------------------------------------------------------------------------------------- explained variance
def test_explained_variance_by_hand():
    # Returns 1 2 3, variance 1. What is left of them after the values 1 1 2: 0 1 1, variance 1/3.
    mask = make_mask(2, 1)
    returns = padded([[1, 2], [3]], fill=NAN)
    assert explained_variance(padded([[1, 1], [2]], fill=INF), returns, mask) == pytest.approx(2 / 3)
    assert explained_variance(torch.full((2, 2), 7.0), returns, mask) == pytest.approx(0.0), "the mean is not explained"
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0), "worse than a constant"


def test_two_tokens_are_enough_to_explain():
    # Returns 1 3, variance 2. What is left of them after the values 1 2: 0 1, variance 1/2.
    values, returns = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]])
    assert explained_variance(values, returns, make_mask(2)) == pytest.approx(3 / 4)


def test_variances_are_taken_in_double_precision():
    values, returns = torch.tensor([[0.1, 0.3, 0.7]]), torch.tensor([[0.2, 0.5, 1.7]])
    left = [r - v for r, v in zip(returns[0].tolist(), values[0].tolist(), strict=True)]
    expected = 1 - statistics.variance(left) / statistics.variance(returns[0].tolist())
    assert explained_variance(values, returns, make_mask(3)) == pytest.approx(expected, rel=1e-13)


def test_with_equal_returns_there_is_no_explained_variance():
    assert explained_variance(torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 5.0]]), make_mask(2)) is None
    assert explained_variance(torch.tensor([[1.0]]), torch.tensor([[5.0]]), make_mask(1)) is None


def test_the_metrics_of_a_step():
    experience = fake_experience(ROLLOUTS, Signals(values=padded([[1, 1], [2]])))
    assert value_metrics(experience) == {}, "no critic"
    known = replace(experience, returns=padded([[1, 2], [3]]))
    assert value_metrics(known) == {"critic/return_mean": 2.0, "critic/explained_variance": pytest.approx(2 / 3)}
    flat = replace(experience, returns=torch.ones(2, 2))
    assert value_metrics(flat) == {"critic/return_mean": 1.0}


def test_batches_contain_returns_and_old_values():
    """An optimizer step for each of two prompts."""
    experience = fake_experience(ROLLOUTS, Signals(values=OLD), advantage=torch.zeros(2, 2))
    experience = replace(experience, returns=RETURNS)
    experience = replace(experience, credit=assign((), experience, (0, 0)))
    batches = list(assemble(BatchPlan(global_batch_size=1), Loss(), experience, (0, 0)))
    first, second = sorted(batches, key=lambda batch: -int(batch.rollouts.mask.sum()))  # which is first is drawn
    close(first.values, OLD[:1]), close(first.returns, RETURNS[:1])
    close(second.values, OLD[1:]), close(second.returns, RETURNS[1:])


# ---------------------------------------------------------------------------------------------------------------- verl
# What `compute_gae_advantage_return` and `compute_value_loss` of verl 0.9.1 (trainer/ppo/core_algos.py, both after the
# PPO that TRL had) gave in float64 for the input below, token by token of the mask.
VERL_ADVANTAGES = [
    0.97223785, -1.610826107, -0.441597175, -0.862578115, 1.834353136, 0.101858951, 0.316473601, 0.842071272,
    0.360694454, -0.932787386, -0.579900478,
]  # fmt: skip
VERL_RETURNS = [
    0.90328864, -0.34468908, 0.668930388, -0.439779861, 0.843853959, -0.759687913, -0.171182272, -0.201993729,
    -0.12796369, 0.012595467, -0.640144339,
]  # fmt: skip
VERL_GRADIENTS = [
    0.0, 0.085133815, -0.013801739, 0.105182004, -0.153450589, -0.063879934, -0.011635418, -0.127088452, 0.0,
    0.066385749, 0.077525004,
]  # fmt: skip
VERL_LOSS, VERL_CLIPFRAC = 0.4211259502, 2 / 11
LENGTHS = [5, 1, 3, 2]
PLACES = torch.arange(20.0).reshape(4, 5)
MASK = make_mask(*LENGTHS)
VERL_VALUES = torch.sin(PLACES).where(MASK, 0.0)


def test_advantages_and_returns_are_verls():
    rewards = torch.cos(3 * PLACES).where(MASK, 0.0)
    advantage, returns = gae(rewards, VERL_VALUES, MASK, gamma=0.9, lam=0.8)
    close(advantage[MASK], VERL_ADVANTAGES, rtol=1e-5, atol=1e-6)
    close(returns[MASK], VERL_RETURNS, rtol=1e-5, atol=1e-6)


def test_the_value_loss_and_its_gradient_are_verls():
    returns = torch.zeros(4, 5)
    returns[MASK] = torch.tensor(VERL_RETURNS)
    values = (VERL_VALUES + 0.6 * torch.cos(2 * PLACES)).requires_grad_()
    batch = make_batch(fake_rollouts(LENGTHS), VERL_VALUES, returns)
    loss, metrics = value_loss(values, batch, ValueLoss(0.25))
    loss.backward()
    assert float(metrics["value_loss"]) == pytest.approx(VERL_LOSS, rel=1e-5)
    assert float(metrics["value_clipfrac"]) == pytest.approx(VERL_CLIPFRAC, rel=1e-5)
    close(values.grad[MASK], VERL_GRADIENTS, rtol=1e-4, atol=1e-6)
