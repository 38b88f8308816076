"""Reductions over tokens and groups, by hand."""

import math

import torch
from helpers import NAN, close, make_mask, padded, same

from mtrl.algorithms.groups import (
    group_count,
    group_mean,
    group_sizes,
    group_std,
    group_sum,
    masked_mean,
    row_mean,
    whiten,
)

UNEVEN = torch.tensor([0, 1, 0, 2, 0])  # groups of 3, 1 and 1, not contiguous


def test_group_reductions_by_hand():
    # Group 0 holds 1, 2, 6: sum 9, mean 3, deviations -2 -1 3, squares 4 + 1 + 9 = 14, over 3 - 1: std = sqrt 7.
    x = torch.tensor([1.0, 10.0, 2.0, -4.0, 6.0])
    assert group_count(UNEVEN) == 3
    assert group_sizes(UNEVEN).tolist() == [3, 1, 1]
    close(group_sum(x, UNEVEN), [9, 10, -4])
    close(group_mean(x, UNEVEN), [3, 10, -4])
    close(group_std(x, UNEVEN), [math.sqrt(7), 0, 0])


def test_not_applicable_is_left_out():
    # Group 0 holds 1, NaN, 3: mean 2, squares 1 + 1 over 1: std sqrt 2. Group 1 holds NaN alone.
    x = torch.tensor([1.0, NAN, NAN, 5.0, 3.0])
    close(group_mean(x, UNEVEN), [2, NAN, 5])
    close(group_std(x, UNEVEN), [math.sqrt(2), 0, 0])


def test_equal_values_have_a_std_of_exactly_zero():
    for value in (0.1, 0.7, 1 / 3, 1e-3, 123.456):
        for n in range(2, 40):
            assert group_std(torch.full((n,), value), torch.zeros(n, dtype=torch.int64)).item() == 0


def test_no_rows():
    assert group_count(torch.zeros(0, dtype=torch.int64)) == 0


def test_row_mean_with_unequal_lengths():
    x = padded([[1, 2, 6], [5]], fill=NAN)
    close(row_mean(x, make_mask(3, 1)), [3, 5])
    close(row_mean(x, make_mask(0, 1, width=3)), [0, 5])


def test_masked_mean_is_summed_in_double_precision():
    # In float32, 1e8 + 1 is 1e8.
    assert masked_mean(torch.tensor([[1e8, 1.0, -1e8, NAN]]), make_mask(3, width=4)) == 1 / 3
    assert masked_mean(torch.tensor([[NAN]]), make_mask(0, width=1)) == 0


def test_whiten_by_hand():
    # Values 1, 2, 6: mean 3, variance 14/2 = 7 (ddof 1).
    x = padded([[1, 2], [6]], fill=NAN)
    close(whiten(x, make_mask(2, 1)), [[-2 / math.sqrt(7), -1 / math.sqrt(7)], [3 / math.sqrt(7), 0]])


def test_whiten_of_two_values():
    # 1 and 3: mean 2, variance (1 + 1)/1 = 2.
    close(whiten(torch.tensor([[1.0, 3.0]]), make_mask(2)), [[-1 / math.sqrt(2), 1 / math.sqrt(2)]])


def test_whiten_of_neighbouring_numbers():
    # 1 and the next float32: their mean lies between them, the variance is far below the 1e-8 that is added to it.
    half = 2**-24
    expected = half / math.sqrt(2 * half**2 + 1e-8)
    close(whiten(torch.tensor([[1.0, 1 + 2 * half]]), make_mask(2)), [[-expected, expected]])


def test_whiten_of_a_constant_is_zero():
    same(whiten(torch.tensor([[5.0, 7.0]]), make_mask(1, width=2)), torch.zeros(1, 2))
    same(whiten(torch.full((2, 2), 0.3), make_mask(2, 2)), torch.zeros(2, 2))
    same(whiten(torch.ones(1, 2), make_mask(0, width=2)), torch.zeros(1, 2))
