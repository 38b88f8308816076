"""Pairwise covers: only combinations of three and more dimensions are lost."""

from itertools import combinations, product

import pytest
from pairwise import cover

pytest_plugins = "pytester"

DIMENSIONS = [(4, 4, 6), (2, 3), (5,), (3, 3, 3, 3), (2, 2, 2, 2, 2, 2)]


@pytest.mark.parametrize("sizes", DIMENSIONS, ids=str)
def test_every_pair_is_there(sizes):
    rows = [list(enumerate(values)) for values in product(*map(range, sizes))]
    chosen = [rows[index] for index in cover(rows)]

    def pairs(several):
        return {pair for row in several for pair in combinations(row, 2)}

    assert pairs(chosen) == pairs(rows) and cover(rows) == cover(rows)
    assert {cell for row in chosen for cell in row} == {cell for row in rows for cell in row}
    largest = sorted(sizes)[-2:]
    assert len(chosen) <= 2 * largest[0] * largest[-1]


def test_rows_of_several_products_cover_each():
    """One test has a parameter more than the others: each of its values meets each of the shared ones."""
    first = [[("test", "a"), ("family", f), ("route", r)] for f in range(4) for r in range(4)]
    second = [[("test", "b"), ("family", f), ("b", k)] for f in range(4) for k in range(2)]
    chosen = cover([*first, *second])
    assert len([index for index in chosen if index < 16]) == 16, "no third dimension, nothing to leave out"
    assert [index for index in chosen if index >= 16] == list(range(16, 24))


MODULE = """
import pytest
pytestmark = pytest.mark.pairwise("family", "route")

@pytest.fixture(params=["x", "y", "z"])
def family(request):
    return request.param

@pytest.fixture(params=[True, False])
def route(request):
    return request.param

@pytest.mark.parametrize("size", [1, 2])
def test_one(family, route, size): pass
def test_two(family, route): pass
def test_three(family, route): pass
def test_alone(): pass
"""


def test_a_marked_module_runs_its_cover_unless_everything_is_wanted(pytester):
    pytester.makepyfile(MODULE)
    pytester.makeconftest("from pairwise import *")
    some = pytester.runpytest("-p", "no:xdist").parseoutcomes()
    assert some["passed"] + some["deselected"] == 12 + 6 + 6 + 1 and some["passed"] == 6 + 3 + 3 + 1
    assert pytester.runpytest("-p", "no:xdist", "--every-combination").parseoutcomes() == {"passed": 25}
    assert pytester.runpytest("-p", "no:xdist", "-k", "test_one and x and True and 2").parseoutcomes()["passed"] == 1
