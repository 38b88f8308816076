"""How token losses are averaged: every loss type by hand, under filters, token weights and truncation."""

import pytest
import torch
from helpers import close, make_mask, same

from mtrl.algorithms.losses import loss_weights

# ---- aggregation: two responses of 1 and 3 tokens, B = 2, longest allowed response 4 ----

LENGTHS = make_mask(1, 3)
ALL = LENGTHS.float()
AGGREGATION = [
    ("grpo", [[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6]]),
    ("dapo", [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4]]),
    ("bnpo", [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4]]),
    ("dr_grpo", [[1 / 8, 0, 0], [1 / 8, 1 / 8, 1 / 8]]),
]


@pytest.mark.parametrize(("loss_type", "expected"), AGGREGATION)
def test_aggregation(loss_type, expected):
    weights = loss_weights(ALL, LENGTHS, loss_type, 4)
    close(weights.policy, expected)
    close(weights.divergence, expected)
    close(weights.token, [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4]])


# Token filtering keeps token 0 of row 0 (k = 1) and tokens 0 and 2 of row 1 (k = 2).
SELECT = torch.tensor([[True, False, False], [True, False, True]])


@pytest.mark.parametrize(
    ("loss_type", "denominator", "policy"),
    [
        ("grpo", "all", [[1 / 2, 0, 0], [1 / 6, 0, 1 / 6]]),
        ("grpo", "selected", [[1 / 2, 0, 0], [1 / 4, 0, 1 / 4]]),
        ("dapo", "all", [[1 / 4, 0, 0], [1 / 4, 0, 1 / 4]]),
        ("dapo", "selected", [[1 / 3, 0, 0], [1 / 3, 0, 1 / 3]]),
        ("bnpo", "selected", [[1 / 3, 0, 0], [1 / 3, 0, 1 / 3]]),
        ("dr_grpo", "all", [[1 / 8, 0, 0], [1 / 8, 0, 1 / 8]]),
        ("dr_grpo", "selected", [[1 / 8, 0, 0], [1 / 8, 0, 1 / 8]]),
    ],
)
def test_filtering_touches_the_policy_term_only(loss_type, denominator, policy):
    weights = loss_weights(ALL, SELECT, loss_type, 4, denominator)
    close(weights.policy, policy)
    close(weights.divergence, dict(AGGREGATION)[loss_type])
    close(weights.token, dict(AGGREGATION)["dapo"])


# Token weights in the mask: v = 2 and 1, 2, 3, so row sums 2 and 6, total 8.
MEASURE = torch.tensor([[2.0, 0, 0], [1, 2, 3]])


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", [[2 / 4, 0, 0], [1 / 12, 2 / 12, 3 / 12]]),
        ("dapo", [[2 / 8, 0, 0], [1 / 8, 2 / 8, 3 / 8]]),
        ("bnpo", [[2 / 8, 0, 0], [1 / 8, 2 / 8, 3 / 8]]),
        ("dr_grpo", [[2 / 8, 0, 0], [1 / 8, 2 / 8, 3 / 8]]),  # B * 4 = 8: this one does not follow the weights
    ],
)
def test_token_weights_in_the_mask_enter_every_term_and_denominator(loss_type, expected):
    weights = loss_weights(MEASURE, LENGTHS, loss_type, 4)
    close(weights.policy, expected)
    close(weights.divergence, expected)
    close(weights.token, [[2 / 8, 0, 0], [1 / 8, 2 / 8, 3 / 8]])


def test_dr_grpo_keeps_its_denominator_under_token_weights():
    close(loss_weights(MEASURE, LENGTHS, "dr_grpo", 8).policy, [[2 / 16, 0, 0], [1 / 16, 2 / 16, 3 / 16]])


def test_token_weights_in_the_mask_and_selected_tokens():
    # Selected: 2 in row 0; 1 + 3 in row 1; 6 in all.
    close(loss_weights(MEASURE, SELECT, "grpo", 4, "selected").policy, [[2 / 4, 0, 0], [1 / 8, 0, 3 / 8]])
    close(loss_weights(MEASURE, SELECT, "dapo", 4, "selected").policy, [[2 / 6, 0, 0], [1 / 6, 0, 3 / 6]])
    close(loss_weights(MEASURE, SELECT, "grpo", 4, "all").policy, [[2 / 4, 0, 0], [1 / 12, 0, 3 / 12]])


@pytest.mark.parametrize(
    ("loss_type", "policy"),
    [
        ("grpo", [[1 / 2, 0, 0], [0, 0, 0]]),  # still two responses
        ("dapo", [[1, 0, 0], [0, 0, 0]]),  # one token left
        ("dr_grpo", [[1 / 8, 0, 0], [0, 0, 0]]),
    ],
)
def test_truncated_responses_have_no_policy_gradient(loss_type, policy):
    weights = loss_weights(ALL, LENGTHS, loss_type, 4, silenced=torch.tensor([False, True]))
    close(weights.policy, policy)
    close(weights.divergence, dict(AGGREGATION)[loss_type])
    close(weights.token, dict(AGGREGATION)["dapo"])
    selected = loss_weights(ALL, SELECT, loss_type, 4, "selected", silenced=torch.tensor([False, True]))
    close(selected.policy, policy)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("denominator", ["all", "selected"])
def test_all_truncated_is_zero_not_nan(loss_type, denominator):
    weights = loss_weights(ALL, SELECT, loss_type, 4, denominator, silenced=torch.tensor([True, True]))
    same(weights.policy, torch.zeros(2, 3))


def test_a_fully_masked_row_counts_as_a_response_of_no_tokens():
    mask = make_mask(2, 0)
    close(loss_weights(mask.float(), mask, "grpo", 4).policy, [[1 / 4, 1 / 4], [0, 0]])
    close(loss_weights(mask.float(), mask, "dapo", 4).policy, [[1 / 2, 1 / 2], [0, 0]])
    close(loss_weights(mask.float(), mask, "dr_grpo", 4).policy, [[1 / 8, 1 / 8], [0, 0]])
