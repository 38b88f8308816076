"""From logits to a token: exact shares, exact cuts, draws that depend only on the row."""

import pytest
import torch

from mtrl.algorithms.vocab import top_p_top_k
from mtrl.rollout.sampling import choose, first_sample_numbers, row_uniforms
from mtrl.types import Sampling

PROBABILITIES = torch.tensor([0.05, 0.4, 0.0, 0.3, 0.15, 0.1], dtype=torch.float64)
GRID = 10_000


def shares(**options):
    """The share of each token over evenly spaced draws: exact up to 1 / GRID. And each token's reported probability."""
    uniform = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    logits = PROBABILITIES.log().float().expand(GRID, -1)
    tokens, logp = choose(logits, uniform, Sampling(**options))
    reported = torch.zeros(6, dtype=torch.float64)
    reported[tokens] = logp.double().exp()
    return torch.bincount(tokens, minlength=6) / GRID, reported


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 3, 4, 5]),
        ({"top_k": 0}, [0, 1, 3, 4, 5]),
        ({"top_k": 99}, [0, 1, 3, 4, 5]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 1}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 0.99}, [0, 1, 3, 4, 5]),
        ({"top_p": 1e-9}, [1]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),  # 0.4 + 0.3 are 0.82 of the remaining three
        ({"top_k": 3, "top_p": 0.83}, [1, 3, 4]),
    ],
    ids=str,
)
def test_cuts_and_shares(options, kept):
    share, reported = shares(**options)
    expected = torch.zeros(6, dtype=torch.float64)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    torch.testing.assert_close(share.double(), expected, rtol=0, atol=1.5 / GRID)
    torch.testing.assert_close(reported, expected, rtol=1e-5, atol=0)


def test_temperature_comes_before_the_nucleus():
    """At temperature 0.5 the shares are 0.55, 0.31, 0.08, 0.03, 0.01: the first two hold 0.86, not 0.7."""
    share, _ = shares(temperature=0.5, top_p=0.86)
    squared = PROBABILITIES[[1, 3]] ** 2
    torch.testing.assert_close(share[[1, 3]].double(), squared / squared.sum(), rtol=0, atol=1.5 / GRID)


def test_greedy_reports_the_model_s_own_log_prob():
    logits = PROBABILITIES.log().float()[None]
    tokens, logp = choose(logits, torch.tensor([0.99]), Sampling(temperature=0, top_k=1))
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logp.exp(), torch.tensor([0.4]))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53], ids=["lowest", "highest"])
def test_the_ends_of_the_range_are_possible_tokens(uniform):
    """The first and the last token have no probability; no draw may find them."""
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf, 3.0, -torch.inf]])
    tokens, logp = choose(logits, torch.tensor([uniform], dtype=torch.float64), Sampling())
    assert tokens.tolist() == [1 if uniform == 0 else 4] and logp.isfinite().all()


def test_a_large_vocabulary_is_reached_to_its_end():
    count = 150_000
    uniform = torch.tensor([0.0, 75_000.5 / count, 1 - 2**-53], dtype=torch.float64)
    tokens, _ = choose(torch.zeros(3, count), uniform, Sampling())
    assert tokens.tolist() == [0, 75_000, count - 1]


def test_rare_tokens_are_distinguished():
    """One near-certain token, then a thousand of probability 1e-9: sums in float32 would not see them."""
    logits = torch.cat([torch.zeros(1), torch.full((1000,), 1e-9).log()])
    uniform = 1 - 5e-7 + 1.1e-9 * torch.arange(10, dtype=torch.float64)
    tokens, _ = choose(logits.expand(10, -1), uniform, Sampling())
    assert tokens.min() > 300 and tokens.max() < 700 and len(tokens.unique()) == 10


def test_a_nucleus_of_a_certain_token_is_not_empty():
    logits = torch.tensor([[50.0, 0.0, -torch.inf]])
    assert top_p_top_k(logits, top_p=1e-9, top_k=-1).tolist() == [[50.0, -torch.inf, -torch.inf]]


def test_draws_belong_to_seed_step_task_and_sample():
    def draws(*ids, **changes):
        sampling, ids = Sampling(**{"n": 3, "max_new_tokens": 8, **changes}), ids or ("a", "b")
        return row_uniforms(ids, first_sample_numbers(ids, sampling), sampling)

    base = draws()
    assert base.shape == (6, 8) and base.dtype == torch.float64 and len(base.unique()) == 48
    assert torch.equal(base, draws()) and torch.equal(base[3:], draws("b"))
    assert torch.equal(base[[0, 3]], draws(n=1))
    assert torch.equal(base[:, :5], draws(max_new_tokens=5))
    for other in (draws(seed=2), draws(step=1), draws("c", "d")):
        assert not (base == other).any()
    again = draws("a", "b", "a")  # a step may take a task twice: its second group must not be a copy of the first
    assert torch.equal(again[:6], base) and len(again.unique()) == 72
    assert torch.equal(again[6:], draws("a", n=6)[3:]), "it counts on"
    assert torch.equal(again[6:], draws("a", times_sampled={"a": 1})), "also from one call to the next"


def test_draws_are_uniform():
    ids = [str(i) for i in range(100)]
    draws = row_uniforms(ids, [0] * 100, Sampling(n=4, max_new_tokens=50)).flatten()
    counts = torch.histc(draws, bins=20, min=0, max=1)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 43.8  # 19 degrees of freedom, 1 in 1,000


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_give_a_log_prob_that_is_not_finite(value, temperature):
    """And a token of the vocabulary: an index beyond it would end a GPU's process with an assertion."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [value] * 3])
    tokens, logp = choose(logits, torch.tensor([0.5, 0.5]), Sampling(temperature=temperature))
    assert 0 <= int(tokens[1]) < 3
    assert logp.isfinite().tolist() == [True, False]
