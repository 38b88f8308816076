"""Rows of tokens become Rollouts: one function for engines and for recorded responses."""

import pytest
import torch
from helpers import fake_prompt

from mtrl.rollout.responses import finish_reasons, make_rollouts

PROMPTS = [fake_prompt("a"), fake_prompt("b")]
TOKENS = [[7, 9, 2], [7, 2], [8]]


def assembled(**changes):
    given = {
        "group": [0, 1, 1],
        "tokens": TOKENS,
        "rollout_logprobs": [[-1, -2, -3], [-4, -5], [-6]],
        "text": ["x", "y", "z"],
        "finish": finish_reasons(TOKENS, [2]),
        "version": 5,
        "pad_id": 3,
    }
    return make_rollouts(PROMPTS, **given | changes)


def test_lists_as_a_server_returns_them():
    rollouts = assembled()
    assert rollouts.tokens.tolist() == [[7, 9, 2], [7, 2, 3], [8, 3, 3]], "pads are the encoder's"
    assert rollouts.mask.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    assert rollouts.rollout_logprobs.tolist() == [[-1, -2, -3], [-4, -5, 0], [-6, 0, 0]]
    assert rollouts.group.tolist() == [0, 1, 1] and rollouts.prompts == tuple(PROMPTS)
    assert rollouts.text == ("x", "y", "z") and rollouts.finish_reason == ("stop", "stop", "length")
    assert rollouts.version.tolist() == [5, 5, 5]
    dtypes = [rollouts.tokens.dtype, rollouts.rollout_logprobs.dtype, rollouts.group.dtype, rollouts.version.dtype]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_tensors_give_the_same_record():
    rows = assembled(
        tokens=[torch.tensor(row) for row in TOKENS],
        rollout_logprobs=[torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0, -5.0]), torch.tensor([-6.0])],
    )
    assert torch.equal(rows.tokens, assembled().tokens) and torch.equal(
        rows.rollout_logprobs, assembled().rollout_logprobs
    )


def test_responses_without_log_probs():
    """Their log-probs are zero; and where no model is known they have no tokens either."""
    assert assembled(rollout_logprobs=None).rollout_logprobs.tolist() == [[0.0] * 3] * 3
    bare = assembled(tokens=[[], [], []], rollout_logprobs=None)
    assert bare.tokens.shape == bare.mask.shape == bare.rollout_logprobs.shape == (3, 0) and len(bare) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_logprobs": [[-1.0], [-4.0, -5.0], [-6.0]]}, "each token needs one log-prob"),
        ({"rollout_logprobs": [[-1.0, -2.0, -3.0], [-4.0, -5.0]]}, "each token needs one log-prob"),
        ({"group": [0, 1]}, "differ in number"),
        ({"text": ["x"]}, "differ in number"),
    ],
    ids=["a log-prob missing", "a row missing", "group", "text"],
)
def test_an_engine_that_returns_uneven_rows_is_an_error(changes, said):
    with pytest.raises(AssertionError, match=said):
        assembled(**changes)
