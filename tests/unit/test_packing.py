"""Whole groups into optimizer steps, micro-batches and ranks, by hand."""

import torch

from mtrl.algorithms.batches import optimizer_steps
from mtrl.algorithms.packing import Piece, balance, cut_groups, fill_micro_batches, row_index


def test_optimizer_steps_count_prompts_not_rows():
    # Groups of 2, 1, 3 and 1 rows, two prompts per step.
    group = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    assert [rows.tolist() for rows in optimizer_steps(group, 2)] == [[0, 1, 2], [3, 4, 5, 6]]
    assert [rows.tolist() for rows in optimizer_steps(group, 3)] == [[0, 1, 2, 3, 4, 5], [6]]
    assert [rows.tolist() for rows in optimizer_steps(group, 4)] == [[0, 1, 2, 3, 4, 5, 6]]


def test_optimizer_steps_in_an_order_drawn_by_a_key():
    group = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5, 5])

    def steps(prompts, *key):
        return [rows.tolist() for rows in optimizer_steps(group, prompts, key)]

    drawn = {tuple(map(tuple, steps(2, 7, step, "minibatches", epoch))) for step in range(4) for epoch in range(3)}
    assert len(drawn) > 9, "another order for each step and epoch"
    assert steps(2, 7, 1, "minibatches", 0) == steps(2, 7, 1, "minibatches", 0), "and the same for the same"
    for order in drawn:
        assert sorted(row for rows in order for row in rows) == list(range(10))
        assert all(list(rows) == sorted(rows) for rows in order), "rows stay in their order"
        assert [len(set(group[list(rows)].tolist())) for rows in order] == [2, 2, 2]
    assert steps(6, 7, 1) == steps(6, 7, 2) == [list(range(10))], "one step of all groups is the same for any key"
    assert optimizer_steps(torch.zeros(0, dtype=torch.long), 2, (1,)) == []


def test_optimizer_steps_find_the_rows_of_a_group_wherever_they_are():
    group = torch.tensor([1, 0, 1, 0])
    assert [rows.tolist() for rows in optimizer_steps(group, 1)] == [[1, 3], [0, 2]]


GROUP = torch.tensor([0, 1, 0, 1, 0])
RESPONSES = torch.tensor([5, 1, 6, 2, 7])
PROMPTS = [10, 20]


def test_a_group_costs_its_prompt_once_with_a_shared_prefix():
    # 10 + 5 + 6 + 7 = 28 and 20 + 1 + 2 = 23.
    assert cut_groups(GROUP, RESPONSES, PROMPTS, budget=28) == [Piece((0, 2, 4), 28), Piece((1, 3), 23)]


def test_a_group_costs_its_prompt_with_every_row_otherwise():
    # 15 + 16 + 17 = 48 and 21 + 22 = 43.
    assert cut_groups(GROUP, RESPONSES, PROMPTS, 48, share_prefix=False) == [Piece((0, 2, 4), 48), Piece((1, 3), 43)]
    assert cut_groups(GROUP, RESPONSES, PROMPTS, 42, share_prefix=False) == [
        Piece((0, 2), 31),
        Piece((4,), 17),
        Piece((1,), 21),
        Piece((3,), 22),
    ]


def test_only_a_group_over_the_budget_is_cut_and_pays_its_prompt_again():
    # Budget 27: 10 + 5 + 6 = 21, with 7 more 28 > 27: the last row goes alone, 10 + 7. Group 1 (23) stays whole.
    assert cut_groups(GROUP, RESPONSES, PROMPTS, 27) == [Piece((0, 2), 21), Piece((4,), 17), Piece((1, 3), 23)]


def test_a_row_over_the_budget_is_a_separate_piece():
    assert cut_groups(GROUP, RESPONSES, PROMPTS, 3) == [
        Piece((0,), 15),
        Piece((2,), 16),
        Piece((4,), 17),
        Piece((1,), 21),
        Piece((3,), 22),
    ]


def pieces(*tokens):
    return [Piece((i,), n) for i, n in enumerate(tokens)]


def test_micro_batches_are_first_fit_decreasing():
    # Budget 10; in falling order 7 5 4 3 1: [7], [5], [5 4], [7 3], [5 4 1].
    batches = fill_micro_batches(pieces(1, 4, 7, 3, 5), 10)
    assert [[piece.tokens for piece in batch] for batch in batches] == [[7, 3], [5, 4, 1]]


def test_an_oversized_piece_travels_alone():
    batches = fill_micro_batches(pieces(1, 12), 10)
    assert [[piece.tokens for piece in batch] for batch in batches] == [[12], [1]]
    assert fill_micro_batches([], 10) == []


def test_ranks_are_balanced_heaviest_first():
    # 7 -> a, 5 -> b, 4 -> b (5 < 7), 3 -> a (7 < 9), 1 -> b (9 < 10): loads 10 and 10.
    shares = balance(pieces(1, 4, 7, 3, 5), 2)
    assert [[piece.tokens for piece in share] for share in shares] == [[7, 3], [5, 4, 1]]
    assert balance(pieces(2), 3) == [pieces(2), [], []]


def test_row_index_is_ascending():
    index = row_index([Piece((4, 7), 1), Piece((0, 5), 1)])
    assert index.tolist() == [0, 4, 5, 7]
    assert index.dtype == torch.int64
    assert row_index([]).tolist() == []
