"""Tables of counts against exact fractions: all of up to four in each cell, in one call."""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch

from mtrl.algorithms.contingency import count_table, fisher_p_value, information_gain

TABLES = [table for table in product(range(5), repeat=4) if sum(table)]
COLUMNS = torch.tensor(TABLES, dtype=torch.float64).T


def p_by_definition(a, b, c, d):
    def likely(k):
        return Fraction(math.comb(a + c, k) * math.comb(b + d, a + b - k), math.comb(a + b + c + d, a + b))

    return sum(p for k in range(a + b + 1) if (p := likely(k)) <= likely(a))


def gain_by_definition(a, b, c, d):
    def bits(*counts):
        return -sum(each / sum(counts) * math.log2(each / sum(counts)) for each in counts if each)

    n = a + b + c + d
    return bits(a + c, b + d) - (a + b) / n * bits(a, b) - (c + d) / n * bits(c, d)


def test_fishers_p_value():
    for found, table in zip(fisher_p_value(*COLUMNS).tolist(), TABLES, strict=True):
        p = p_by_definition(*table)
        assert found == 1.0 if p == 1 else found == pytest.approx(float(p), rel=1e-9) and found < 1, table


def test_information_gain():
    for found, table in zip(information_gain(*COLUMNS).tolist(), TABLES, strict=True):
        assert found == pytest.approx(gain_by_definition(*table), abs=1e-12), table


def test_tables_by_hand():
    first = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 1], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
    a, b, c, d = count_table(first, torch.tensor([True, True, False, False, False]))
    assert [each.tolist() for each in (a, b, c, d)] == [[2, 1, 0], [0, 2, 1], [0, 1, 2], [3, 1, 2]]
    # Of ten ways to choose two of five, one has both.
    assert fisher_p_value(a, b, c, d)[0] == pytest.approx(1 / 10)
    assert information_gain(a, b, c, d)[0] == pytest.approx(gain_by_definition(2, 0, 0, 3))
