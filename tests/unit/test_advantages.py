"""SPEC 4, advantages, by hand."""

import math

import pytest
import torch
from helpers import INF, NAN, close, make_mask, padded, same

from mtrl.algorithms.advantages import (
    gae,
    grpo,
    reinforce_plus_plus,
    remax,
    rloo,
    subtract_penalty,
    to_tokens,
    token_rewards,
)

# Groups of 3, 2 and 1, not contiguous.
GROUP = torch.tensor([0, 1, 0, 2, 1, 0])
REWARDS = torch.tensor([1.0, 0.0, 2.0, 5.0, 1.0, 3.0])
ONE_TOKEN = make_mask(*[1] * 6)


def test_grpo_by_hand():
    # Group 0: 1, 2, 3: mean 2, std (ddof 1) 1: -1, 0, 1 over 1 + 1e-6. Group 1: 0, 1: mean 1/2, std sqrt(1/2).
    # Group 2 has one member: std 0, so 0.
    a = 1 / (1 + 1e-6)
    b = 0.5 / (math.sqrt(0.5) + 1e-6)
    close(grpo(REWARDS, GROUP, ONE_TOKEN)[:, 0], [-a, -b, 0, 0, b, a])


def test_grpo_epsilon_is_added_to_the_std():
    # Rewards 0 and 2e-6: centred -+1e-6, std sqrt(2) * 1e-6: A = -+1/(sqrt 2 + 1) = -+(sqrt 2 - 1).
    a = math.sqrt(2) - 1
    close(grpo(torch.tensor([0.0, 2e-6]), torch.tensor([0, 0]), make_mask(1, 1)), [[-a], [a]])


def test_grpo_of_equal_rewards_is_exactly_zero():
    for value in (0.1, 0.7, 1 / 3, 5.3):
        for scale in ("group", "batch", "none"):
            same(
                grpo(torch.full((7,), value), torch.zeros(7, dtype=torch.int64), make_mask(*[1] * 7), scale),
                torch.zeros(7, 1),
            )


def test_grpo_scaled_by_the_batch():
    # Groups (1, 3) and (5, 7): centred -1, 1, -1, 1. Batch: mean 4, squares 9 + 1 + 1 + 9 = 20 over 3: std sqrt(20/3).
    rewards, group = torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.tensor([0, 0, 1, 1])
    a = 1 / (math.sqrt(20 / 3) + 1e-6)
    close(grpo(rewards, group, make_mask(1, 1, 1, 1), "batch")[:, 0], [-a, a, -a, a])
    # A group without variance gets 0 also here.
    close(grpo(torch.tensor([4.0, 4.0, 5.0, 7.0]), group, make_mask(1, 1, 1, 1), "batch")[:2, 0], [0, 0])


def test_grpo_unscaled_is_the_distance_to_the_mean():
    close(grpo(REWARDS, GROUP, ONE_TOKEN, "none")[:, 0], [-1, -0.5, 0, 0, 0.5, 1])


def test_group_estimators_give_every_valid_token_the_same():
    mask = make_mask(2, 3)
    rewards, group = torch.tensor([0.0, 2.0]), torch.tensor([0, 0])
    close(grpo(rewards, group, mask, "none"), [[-1, -1, 0], [1, 1, 1]])
    close(rloo(rewards, group, mask), [[-2, -2, 0], [2, 2, 2]])
    close(remax(rewards, mask, torch.tensor([0.5, 0.5])), [[-0.5, -0.5, 0], [1.5, 1.5, 1.5]])
    assert to_tokens(rewards.double(), mask).dtype == torch.float32


def test_rloo_by_hand():
    # Group 0: 1 - (2 + 3)/2 = -3/2; 2 - (1 + 3)/2 = 0; 3 - (1 + 2)/2 = 3/2. Group 1: 0 - 1, 1 - 0. Alone: 0.
    close(rloo(REWARDS, GROUP, ONE_TOKEN)[:, 0], [-1.5, -1, 0, 0, 1, 1.5])
    # 1, 2, 6: 1 - 4, 2 - 7/2, 6 - 3/2.
    close(
        rloo(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3, dtype=torch.int64), make_mask(1, 1, 1))[:, 0],
        [-3, -1.5, 4.5],
    )


def test_remax_takes_the_greedy_reward_of_its_own_prompt():
    baseline = torch.tensor([2.0, 0.25, 7.0])[GROUP]
    close(remax(REWARDS, ONE_TOKEN, baseline)[:, 0], [-1, -0.25, 0, -2, 0.75, 1])


def test_charge_sums_the_penalty_over_valid_tokens():
    penalty = padded([[0.1, 0.2], [0.5]], fill=INF, width=3)
    close(subtract_penalty(torch.tensor([1.0, 0.0]), penalty, make_mask(2, 1, width=3)), [0.7, -0.5])


def test_token_rewards_sit_on_the_last_valid_token():
    rewards = torch.tensor([1.0, -2.0, 3.0, 4.0])
    mask = make_mask(3, 1, 2, 0)
    close(token_rewards(rewards, mask), [[0, 0, 1], [-2, 0, 0], [0, 3, 0], [0, 0, 0]])
    penalty = padded([[0.5, 0.25, 0.125], [1], [0, 1], []], fill=NAN)
    close(token_rewards(rewards, mask, penalty), [[-0.5, -0.25, 0.875], [-3, 0, 0], [0, 2, 0], [0, 0, 0]])


def test_reinforce_plus_plus_by_hand():
    # gamma 1/2. Row 0, rewards 0 0 1: returns 1/4, 1/2, 1. Row 1, one token: -3/4.
    # Mean of the four: 1/4; deviations 0, 1/4, 3/4, -1; squares 1/16 + 9/16 + 1 = 26/16 over 3: variance 13/24.
    rewards = padded([[0, 0, 1], [-0.75]], fill=INF)
    expected = torch.tensor([[0, 0.25, 0.75], [-1, 0, 0]]) / math.sqrt(13 / 24)
    close(reinforce_plus_plus(rewards, make_mask(3, 1), gamma=0.5), expected)


def test_reinforce_plus_plus_counts_rewards_on_the_way():
    # gamma 1/2, rewards 1 2 4: returns 4; 2 + 2 = 4; 1 + 2 = 3. Mean 11/3, deviations -2/3, 1/3, 1/3: variance 1/3.
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    close(reinforce_plus_plus(rewards, make_mask(3), gamma=0.5), torch.tensor([[-2, 1, 1]]) / 3 / math.sqrt(1 / 3))


# gamma = lam = 1/2, so gamma * lam = 1/4. Row 0: rewards 0 0 1, V = 1/2 1/4 1/2.
#   delta_3 = 1 + 0 - 1/2 = 1/2             A_3 = 1/2
#   delta_2 = 0 + 1/2 * 1/2 - 1/4 = 0       A_2 = 0 + 1/4 * 1/2 = 1/8
#   delta_1 = 0 + 1/2 * 1/4 - 1/2 = -3/8    A_1 = -3/8 + 1/4 * 1/8 = -11/32
# Row 1, one token: reward 1, V = 3/4: A = 1/4.
GAE_REWARDS = padded([[0, 0, 1], [1]], fill=INF)
GAE_VALUES = padded([[0.5, 0.25, 0.5], [0.75]], fill=INF)
GAE_MASK = make_mask(3, 1)


def test_gae_returns_by_hand():
    # A + V, before the whitening: -11/32 + 16/32, 1/8 + 1/4, 1/2 + 1/2; 1/4 + 3/4.
    _, returns = gae(GAE_REWARDS, GAE_VALUES, GAE_MASK, gamma=0.5, lam=0.5)
    close(returns, [[5 / 32, 3 / 8, 1], [1, 0, 0]])


def test_gae_advantages_are_whitened():
    # In 32nds: -11, 4, 16, 8: mean 17/4; deviations -61, -1, 47, 15 in 128ths; squares 3721 + 1 + 2209 + 225 = 6156,
    # over 3: 2052. So A = deviation / sqrt(2052).
    advantage, _ = gae(GAE_REWARDS, GAE_VALUES, GAE_MASK, gamma=0.5, lam=0.5)
    close(advantage, torch.tensor([[-61.0, -1, 47], [15, 0, 0]]) / math.sqrt(2052))


def test_gae_gamma_and_lam_are_not_one_another():
    # gamma 1/2, lam 0: A = delta = -3/8, 0, 1/2. Returns 1/8, 1/4, 1.
    _, returns = gae(GAE_REWARDS[:1], GAE_VALUES[:1], GAE_MASK[:1], gamma=0.5, lam=0.0)
    close(returns, [[1 / 8, 1 / 4, 1]])
    # gamma 1, lam 1/2: delta = 1/4 - 1/2, 1/2 - 1/4, 1/2 = -1/4, 1/4, 1/2; A_2 = 1/4 + 1/4, A_1 = -1/4 + 1/4.
    _, returns = gae(GAE_REWARDS[:1], GAE_VALUES[:1], GAE_MASK[:1], gamma=1.0, lam=0.5)
    close(returns, [[1 / 2, 3 / 4, 1]])


def test_gae_with_lam_one_returns_the_discounted_reward():
    # With lam = 1 the values drop out of A + V: gamma² r, gamma r, r.
    _, returns = gae(GAE_REWARDS, GAE_VALUES, GAE_MASK, gamma=0.5, lam=1.0)
    close(returns, [[1 / 4, 1 / 2, 1], [1, 0, 0]])


@pytest.mark.parametrize("empty_row", [0, 1])
def test_a_fully_masked_row_has_no_advantage(empty_row):
    lengths = [2, 2]
    lengths[empty_row] = 0
    mask = make_mask(*lengths, width=2)
    rewards = token_rewards(torch.tensor([1.0, 2.0]), mask)
    advantage, returns = gae(rewards, torch.tensor([[0.5, 0.25], [0.25, 0.5]]), mask, 1.0, 1.0)
    for x in (
        advantage,
        returns,
        reinforce_plus_plus(rewards, mask, 0.5),
        grpo(rewards[:, 1], torch.tensor([0, 0]), mask),
    ):
        same(x[empty_row], torch.zeros(2))
        assert x.isfinite().all()
    assert returns[1 - empty_row].abs().min() > 0
