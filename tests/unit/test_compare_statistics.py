"""Statistics of runs with the same seeds: by hand, and against examples of textbooks."""

import doctest

import pytest

from mtrl.compare import statistics
from mtrl.compare.statistics import Discordant, area, compare_paired, estimate, holm, mcnemar, paired_p


def test_the_examples_hold():
    assert doctest.testmod(statistics).failed == 0


def test_a_mean_has_an_interval_from_two_seeds_on():
    assert estimate([0.4]) == statistics.MeanEstimate(0.4)
    found = estimate([0.1, 0.3, 0.5, 0.7, 0.9])
    assert found.mean == pytest.approx(0.5)
    # The mean of five drawn from these five has the standard deviation sqrt(0.08 / 5) = 0.126.
    assert found.low == pytest.approx(0.5 - 1.96 * 0.1265, abs=0.03)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.1265, abs=0.03)
    assert estimate([0.1, 0.3, 0.5, 0.7, 0.9]) == found, "drawn by a key"


def test_runs_are_paired_by_their_seed():
    baseline = {0: 0.1, 1: 0.5, 2: 0.9}
    found = compare_paired({0: 0.2, 1: 0.6, 2: 1.0, 7: 5.0}, baseline)
    assert found.seeds == 3 and found.difference.mean == pytest.approx(0.1)
    assert found.p is None, "all differences are equal"
    assert compare_paired({3: 1.0}, baseline) is None
    # However much seeds differ from each other, the differences count.
    assert compare_paired({0: 0.21, 1: 0.59, 2: 1.0}, baseline).p < 0.01


def test_the_paired_t_test_is_that_of_textbooks():
    # d = 1 2 3 4 5: mean 3, sd sqrt 2.5, t = 3 / sqrt(2.5 / 5) = 4.243 with 4 degrees of freedom: p = 0.0132.
    assert paired_p([1, 2, 3, 4, 5]) == pytest.approx(0.0132, abs=5e-5)
    assert paired_p([1, -1]) == pytest.approx(1.0)
    assert paired_p([1]) is None


def test_holm_never_falls_and_stops_at_one():
    assert holm([]) == []
    assert holm([0.2, 0.001, 0.02]) == pytest.approx([0.2, 0.003, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_mcnemar_counts_the_questions_on_which_two_disagree():
    right = {"a": True, "b": True, "c": True, "d": False, "e": True, "only here": True}
    baseline = {"a": True, "b": False, "c": False, "d": True, "e": False}
    # Three won, one lost: two-sided binomial of 3 or more of 4, (1 + 4) / 16 * 2 = 0.625.
    assert mcnemar(right, baseline) == Discordant(3, 1, pytest.approx(0.625))
    assert mcnemar({"a": True}, {"a": True}) == Discordant(0, 0, 1.0)
    assert mcnemar({"a": True}, {"b": True}) is None, "the runs have no question in common"


def test_the_area_is_the_mean_height():
    assert area([(0, 1.0), (10, 0.0)]) == pytest.approx(0.5)
    assert area([(0, 0.0), (1, 1.0), (10, 1.0)]) == pytest.approx(0.95)
    assert area([(3, 0.7)]) == 0.7
