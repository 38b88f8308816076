"""Estimators by name, with numbers of test_advantages.py: rewards in, advantages and returns out."""

import math

import pytest
import torch
from helpers import INF, close, fake_experience, fake_rollouts, padded

from mtrl.algorithms.advantages import ESTIMATORS
from mtrl.types import Needs, Rewards, Signals

GROUP = [0, 1, 0, 2, 1, 0]
REWARDS = torch.tensor([1.0, 0.0, 2.0, 5.0, 1.0, 3.0])
SCALED, PAIR = 1 / (1 + 1e-6), 0.5 / (math.sqrt(0.5) + 1e-6)
BASELINE = torch.tensor([2.0, 0.25, 2.0, 7.0, 0.25, 2.0])
# name, its fields: the advantage of each response.
BY_RESPONSE = [
    ("grpo", {}, [-SCALED, -PAIR, 0, 0, PAIR, SCALED]),
    ("grpo", {"scale_rewards": "none"}, [-1, -0.5, 0, 0, 0.5, 1]),
    ("rloo", {}, [-1.5, -1, 0, 0, 1, 1.5]),
    ("remax", {}, [-1, -0.25, 0, -2, 0.75, 1]),
]


def estimate(name, lengths, total, penalty=None, group=None, baseline=None, values=None, **settings):
    rewards = Rewards(total, {}, torch.zeros(len(total), dtype=torch.bool), baseline)
    experience = fake_experience(fake_rollouts(lengths, group), Signals(values=values), rewards=rewards)
    return ESTIMATORS.builtin[name](**settings).estimate(experience, penalty)


@pytest.mark.parametrize(("name", "settings", "expected"), BY_RESPONSE)
def test_estimators_that_compare_responses(name, settings, expected):
    lengths = [1, 2, 1, 1, 2, 1]
    advantage, returns = estimate(name, lengths, REWARDS, group=GROUP, baseline=BASELINE, **settings)
    close(advantage, padded([[a] * n for a, n in zip(expected, lengths, strict=True)]))
    assert returns is None


# A penalty, summed over the response, taken off the reward. Group 0: 1 - 0.5, 2 - 0.5, 3 - 2, centred -0.5 0.5 0; the
# std of its rewards alone is 1. Group 1: 4 - 1.25, 4 + 0.5, centred -0.875 0.875; its rewards are equal, so nothing
# scales them. Group 2 is alone. Rewards of the batch: mean 19/6, variance (71 - 361/6)/5 = 13/6.
EQUAL_IN_A_GROUP = torch.tensor([1.0, 4.0, 2.0, 5.0, 4.0, 3.0])
PENALTY = padded([[0.5], [0.25, 1], [0.5], [7], [-1, 0.5], [2]], fill=INF)
BY_BATCH = 0.5 / (math.sqrt(13 / 6) + 1e-6)
CHARGED = [
    ("grpo", {}, [-0.5 * SCALED, -0.875, 0.5 * SCALED, 0, 0.875, 0]),
    ("grpo", {"scale_rewards": "batch"}, [-BY_BATCH, -0.875, BY_BATCH, 0, 0.875, 0]),
    ("grpo", {"scale_rewards": "none"}, [-0.5, -0.875, 0.5, 0, 0.875, 0]),
    ("rloo", {}, [-0.75, -1.75, 0.75, 0, 1.75, 0]),
    ("remax", {}, [-1.5, 2.5, -0.5, -9, 4.25, -1]),
]


@pytest.mark.parametrize(("name", "settings", "expected"), CHARGED)
def test_a_penalty_is_taken_off_the_reward_of_the_whole_response(name, settings, expected):
    lengths = [1, 2, 1, 1, 2, 1]
    advantage, _ = estimate(name, lengths, EQUAL_IN_A_GROUP, PENALTY, GROUP, BASELINE, **settings)
    close(advantage, padded([[a] * n for a, n in zip(expected, lengths, strict=True)]))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_where_all_rewards_of_the_batch_are_equal_the_centred_penalty_stays_as_it_is(scale):
    penalty = torch.tensor([[1e-7], [3e-7], [0.5], [1.5]])
    advantage, _ = estimate("grpo", [1] * 4, torch.zeros(4), penalty, [0, 0, 1, 1], scale_rewards=scale)
    close(advantage, [[1e-7], [-1e-7], [0.5], [-0.5]], atol=1e-14)


def test_reinforce_plus_plus():
    expected = torch.tensor([[0, 0.25, 0.75], [-1, 0, 0]]) / math.sqrt(13 / 24)
    advantage, returns = estimate("reinforce_plus_plus", [3, 1], torch.tensor([1.0, -0.75]), gamma=0.5)
    close(advantage, expected)
    assert returns is None
    # Charged token by token: 0 - -1, 0 - -2, 5 - 1 are the rewards 1 2 4.
    advantage, _ = estimate(
        "reinforce_plus_plus", [3], torch.tensor([5.0]), torch.tensor([[-1.0, -2.0, 1.0]]), gamma=0.5
    )
    close(advantage, torch.tensor([[-2, 1, 1]]) / 3 / math.sqrt(1 / 3))


VALUES = padded([[0.5, 0.25, 0.5], [0.75]], fill=INF)


def test_gae():
    advantage, returns = estimate("gae", [3, 1], torch.ones(2), values=VALUES, gamma=0.5, lam=0.5)
    close(returns, [[5 / 32, 3 / 8, 1], [1, 0, 0]])
    close(advantage, torch.tensor([[-61.0, -1, 47], [15, 0, 0]]) / math.sqrt(2052))


def test_gae_charges_the_token_itself():
    # A quarter off the second token: delta_2 = -1/4 + 1/4 - 1/4, A_2 = -1/4 + 1/8 = -1/8, A_1 = -3/8 - 1/32 = -13/32.
    penalty = padded([[0, 0.25, 0], [0]], fill=INF)
    advantage, returns = estimate("gae", [3, 1], torch.ones(2), penalty, values=VALUES, gamma=0.5, lam=0.5)
    close(returns, [[3 / 32, 1 / 8, 1], [1, 0, 0]])
    # In 32nds: -13, -4, 16, 8: mean 7/4; deviations -59, -23, 57, 25 in 128ths; squares 7884, over 3: 2628.
    close(advantage, torch.tensor([[-59.0, -23, 57], [25, 0, 0]]) / math.sqrt(2628))


def test_what_they_need_and_their_defaults():
    assert {name for name, kind in ESTIMATORS.builtin.items() if kind().needs} == {"gae"}
    assert ESTIMATORS.builtin["gae"]().needs == Needs("values")
    assert ESTIMATORS.builtin["gae"]() == ESTIMATORS.builtin["gae"](gamma=1.0, lam=0.95)
    assert ESTIMATORS.builtin["grpo"]() == ESTIMATORS.builtin["grpo"](scale_rewards="group")
    assert ESTIMATORS.builtin["reinforce_plus_plus"]() == ESTIMATORS.builtin["reinforce_plus_plus"](gamma=1.0)


def test_missing_inputs_are_named():
    with pytest.raises(AssertionError, match="greedy"):
        estimate("remax", [1], torch.ones(1))
    with pytest.raises(AssertionError, match="values"):
        estimate("gae", [1], torch.ones(1))
