"""How rows are split into passes, and into smaller ones if those do not fit."""

import pytest
import torch
from helpers import fake_rollouts, same

from mtrl.models.parallel.ranks import Ranks
from mtrl.models.parallel.sequence import SequenceParallelGroup
from mtrl.types import Needs, Signals
from mtrl.workers.micro_batches import MicroBatching


def passes(rollouts, views=None, **settings):
    given = () if views is None else (views,)
    return [rows.tolist() for rows in MicroBatching(**settings).split(rollouts, *given)]


# Two groups of prompts of 4 tokens: 4 + 2 + 2 and 4 + 3 + 1.
ROLLOUTS = fake_rollouts([2, 2, 3, 1], group=[0, 0, 1, 1])


def prompt_tokens():
    (size,) = {len(prompt.ids) for prompt in ROLLOUTS.prompts}
    return size


def test_passes_of_so_many_rows():
    assert passes(ROLLOUTS, rows=3) == [[0, 1, 2], [3]]


def test_passes_up_to_a_budget_of_tokens():
    size = prompt_tokens() + 4
    assert passes(ROLLOUTS, tokens=2 * size) == [[0, 1, 2, 3]]
    assert passes(ROLLOUTS, tokens=2 * size - 1) == [[0, 1], [2, 3]]
    assert passes(ROLLOUTS, views=2, tokens=4 * size - 1) == [[0, 1], [2, 3]], "each view reads both"
    assert passes(ROLLOUTS, views=2, tokens=4 * size) == [[0, 1, 2, 3]]


def test_without_a_budget_a_pass_takes_the_largest_group():
    size = prompt_tokens() + 4
    assert passes(ROLLOUTS) == [[0, 1], [2, 3]]
    assert passes(ROLLOUTS, at_least=2 * size) == [[0, 1, 2, 3]]
    assert passes(ROLLOUTS, at_least=2 * size - 1) == [[0, 1], [2, 3]]


def test_prompts_that_are_not_shared_count_for_each_row():
    rows = 2 * prompt_tokens() + 4
    assert passes(ROLLOUTS, tokens=2 * rows, share_prefix=False) == [[0, 1, 2, 3]]
    assert len(passes(ROLLOUTS, tokens=2 * rows - 1, share_prefix=False)) == 2
    assert MicroBatching() == MicroBatching(None, 0, None, True)


def test_a_view_that_shares_no_prompt_counts_one_for_each_row():
    size = (
        3 * prompt_tokens() + 2 * 4
    )  # of a group: its prompt once and in one view for each row, two views of responses
    batching = MicroBatching(tokens=2 * size).reading(Needs("logprobs@counterfactual(2)"))
    assert (batching.views, batching.unshared) == (2, 1)
    assert [rows.tolist() for rows in batching.split(ROLLOUTS)] == [[0, 1, 2, 3]]
    assert [rows.tolist() for rows in batching.within(2 * size - 1).split(ROLLOUTS)] == [[0, 1], [2, 3]]
    assert batching.largest(ROLLOUTS) == 2 * size


def test_signals_are_in_the_order_of_the_rows():
    """Passes take the fullest groups first. All are queued before one is waited for."""
    rollouts = fake_rollouts([1, 1, 3, 3], group=[0, 0, 1, 1])
    batching, seen = MicroBatching(tokens=2 * prompt_tokens() + 7), []

    def measure(rows):
        seen.append(rows.version.tolist())

        def collect():
            seen.append("waited")
            return Signals(old_logprobs=rows.version[:, None].float().expand(rows.mask.shape))

        return collect

    found = batching.probe(rollouts, measure)
    assert seen == [[2, 3], [0, 1], "waited", "waited"] and found.entropy is None
    same(found.old_logprobs[:, 0], torch.arange(4.0))
    seen.clear()
    MicroBatching(tokens=2 * prompt_tokens() + 8).probe(rollouts, measure)
    assert seen == [[0, 1, 2, 3], "waited"], "one view by default"


# ---------------------------------------------------------------------------------------------------------- idle passes
class Busy(Ranks):
    """One of two ranks; the other one has three passes."""

    def all_reduce_max(self, number):
        return max(3, number)


def test_a_rank_without_rows_goes_along_with_its_shortest():
    rollouts = fake_rollouts([3, 2, 3, 1], group=[0, 0, 1, 1])
    ranks = Busy(None, 1, 2)
    found = [(rows.tolist(), counts) for rows, counts in MicroBatching(rows=2, ranks=ranks).passes(rollouts)]
    assert found == [([0, 1], True), ([2, 3], True), ([3], False)]
    assert len(MicroBatching(rows=1, ranks=ranks).passes(rollouts)) == 4, "no rank has more"
    assert [counts for _, counts in MicroBatching(rows=2).passes(rollouts)] == [True, True]


def test_a_pass_has_one_view_by_default():
    size = prompt_tokens() + 4
    for tokens, count in [(2 * size, 1), (2 * size - 1, 2)]:
        assert len(MicroBatching(tokens).passes(ROLLOUTS)) == count
    assert len(MicroBatching(2 * size).passes(ROLLOUTS, 2)) == 2


# ------------------------------------------------------------------------------------------------------- smaller passes
@pytest.mark.parametrize(
    ("rows", "half"),
    [(4, 2), (100, 2), (3, 1), (2, 1), (1, None)],  # four rows
)
def test_half_of_a_number_of_rows(rows, half):
    assert MicroBatching(rows=rows).first_half(ROLLOUTS) == half


# A group with a prompt and 2 + 2 + 2, and one with a prompt and 1: with one group per pass, the first is the largest.
UNEVEN = fake_rollouts([2, 2, 2, 1], group=[0, 0, 0, 1])


def test_half_of_the_tokens_that_the_largest_pass_takes():
    size = prompt_tokens()
    assert MicroBatching().first_half(UNEVEN) == (size + 6) // 2
    assert MicroBatching(10**6).first_half(UNEVEN) == (2 * size + 7) // 2, "both groups, and not the budget"
    assert MicroBatching(10**6).first_half(UNEVEN, 2) == 2 * size + 7, "each view reads both"
    assert MicroBatching(10**6).first_half(fake_rollouts([3, 3])) == (size + 6) // 2


def test_the_largest_pass():
    size = prompt_tokens()
    assert MicroBatching().largest(UNEVEN) == size + 6, "one view by default"
    assert MicroBatching().largest(UNEVEN, 2) == 2 * (size + 6)
    assert MicroBatching(rows=3).largest(UNEVEN) == 3 and MicroBatching(rows=9).largest(UNEVEN) == 4


def test_three_quarters_of_the_largest_pass():
    size = prompt_tokens()
    assert MicroBatching(10**6).smaller(UNEVEN) == (2 * size + 7) * 3 // 4
    assert MicroBatching(rows=4).smaller(UNEVEN) == 3 and MicroBatching(rows=2).smaller(UNEVEN) == 1
    assert MicroBatching(rows=1).smaller(UNEVEN) is None and MicroBatching(1).smaller(UNEVEN) is None
    equal = fake_rollouts([2, 2, 2, 2], group=[0, 1, 2, 3])
    three = MicroBatching(3 * (size + 2))
    assert three.smaller(equal) == 3 * (size + 2) * 3 // 4, "two and two instead of three and one"


def test_a_pass_of_one_row_has_no_half():
    assert MicroBatching().first_half(fake_rollouts([5])) is None, "a single response"
    assert MicroBatching(1).first_half(ROLLOUTS) is None, "a response each"
    assert MicroBatching(rows=1).first_half(fake_rollouts([1])) is None


def test_the_limit_of_counted_tokens():
    assert MicroBatching(rows=4).within(3) == MicroBatching(rows=3)
    assert MicroBatching(rows=4).within(5) == MicroBatching(rows=4)
    assert MicroBatching(100).within(50) == MicroBatching(50)
    assert MicroBatching(100).within(200) == MicroBatching(100)
    assert MicroBatching(at_least=7).within(50) == MicroBatching(50, at_least=7)


def test_ranks_that_share_a_sequence_hold_so_much_more_together():
    """A budget counts the tokens of one rank."""
    ranks = Ranks(size=4)
    assert MicroBatching(100, at_least=7).over(ranks) == MicroBatching(100, at_least=7, ranks=ranks)
    ranks = Ranks(size=4, sp_group=SequenceParallelGroup(size=2))
    assert MicroBatching(100, at_least=7).over(ranks) == MicroBatching(200, at_least=14, ranks=ranks)
    assert MicroBatching(at_least=7).over(ranks) == MicroBatching(at_least=14, ranks=ranks)
