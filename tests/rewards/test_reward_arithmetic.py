"""SPEC 3, the arithmetic of rewards, and the group filter of SPEC 4, by hand."""

import math

import pytest
import torch
from helpers import NAN, close, same
from hypothesis import given
from hypothesis import strategies as st

from mtrl.algorithms.rewards import (
    VGR_ROUNDING,
    combine,
    mdi_reward,
    neutral_value,
    scheduled_weights,
    soft_overlong,
    vgr_hard_negative_reward,
    vgr_reward,
)


def one_group(n):
    return torch.zeros(n, dtype=torch.int64)


# ---- parts to a total ----


def test_weighted_sum():
    # 4 : 1 : 1 of accuracy, format and mdi.
    parts = {
        "accuracy": torch.tensor([1.0, 0.0]),
        "format": torch.tensor([1.0, 1.0]),
        "mdi": torch.tensor([-0.5, 1.0]),
    }
    close(combine(parts, [4, 1, 1], one_group(2)), [4.5, 2.0])


def test_not_applicable_is_left_out_of_the_sum():
    parts = {"accuracy": torch.tensor([1.0, NAN]), "mdi": torch.tensor([NAN, NAN])}
    close(combine(parts, [2, 1], one_group(2)), [2.0, 0.0])


def test_weights_and_parts_must_match():
    with pytest.raises(ValueError):
        combine({"accuracy": torch.ones(1)}, [1, 2], one_group(1))


def test_normalize_then_sum():
    # Group 0 (rows 0, 2, 4): a = 1, 2, 3: -1, 0, 1. b = 10, NaN, 30: mean 20, std sqrt 200: -+1/sqrt 2.
    # Group 1 (rows 1, 3): a = 5, 5: std 0: 0. b = 0, 4: mean 2, std sqrt 8: -+1/sqrt 2.
    group = torch.tensor([0, 1, 0, 1, 0])
    parts = {"a": torch.tensor([1.0, 5, 2, 5, 3]), "b": torch.tensor([10.0, 0, NAN, 4, 30])}
    h = 1 / math.sqrt(2)
    close(
        combine(parts, [2, 10], group, "normalize_then_sum"),
        [-2 - 10 * h, -10 * h, 0, 10 * h, 2 + 10 * h],
        rtol=3e-6,  # the 1e-6 added to the std
    )


def test_normalize_then_sum_has_the_epsilon_of_grpo():
    # 0 and 2e-6: centred 1e-6 over sqrt(2) * 1e-6 + 1e-6.
    parts = {"a": torch.tensor([0.0, 2e-6])}
    close(combine(parts, [1], one_group(2), "normalize_then_sum"), [1 - math.sqrt(2), math.sqrt(2) - 1])


# ---- schedules ----


def test_early_weights_end_at_their_ratio():
    # step < r * total with r = 0.1 and total = 30: steps 0, 1, 2 are early, step 3 is not.
    schedule = [(0.0, [1, 0]), (0.1, [0, 1])]
    assert [scheduled_weights(step / 30, schedule) for step in range(5)] == [[1, 0]] * 3 + [[0, 1]] * 2


@pytest.mark.parametrize("total", [10, 30, 70, 100, 1000])
@pytest.mark.parametrize("tenths", range(1, 10))
def test_the_change_is_at_the_exact_step(total, tenths):
    schedule = [(0.0, ["early"]), (tenths / 10, ["late"])]
    early = [step for step in range(total) if scheduled_weights(step / total, schedule) == ["early"]]
    assert len(early) == tenths * total // 10


def test_a_longer_schedule():
    schedule = [(0.0, [1]), (0.3, [2]), (0.6, [3])]
    assert [scheduled_weights(p, schedule) for p in (0.0, 0.29, 0.3, 0.59, 0.6, 1.0)] == [[1], [1], [2], [2], [3], [3]]


# ---- length ----


def test_soft_overlong():
    # L_max 100, cache 50: 0 up to 50 tokens, -1/50 a token after, -1 at 100 and beyond.
    length = torch.tensor([1, 50, 51, 75, 99, 100, 101, 500])
    close(soft_overlong(length, 100, 50), [0, 0, -0.02, -0.5, -0.98, -1, -1, -1])
    close(soft_overlong(torch.tensor([80, 85, 90, 100]), 100, 20), [0, -0.25, -0.5, -1])


def test_soft_overlong_with_hardly_any_cache():
    # Cache 1: 0 up to 99, -1 at 100. Cache 0: 0 up to 100, -1 beyond.
    length = torch.tensor([98, 99, 100, 101])
    close(soft_overlong(length, 100, 1), [0, 0, -1, -1])
    close(soft_overlong(length, 100, 0), [0, 0, 0, -1])


# ---- mdi ----


def test_mdi_reward():
    # R = 2. MDI 1: balance 1, reward 1. sqrt 2 and 1/sqrt 2: half way, 0. 2 and 1/2: -1, and no less beyond. NaN stays.
    root = math.sqrt(2)
    mdi = torch.tensor([1.0, root, 1 / root, 2.0, 0.5, 8.0, 0.01, NAN])
    close(mdi_reward(mdi, 2.0), [1, 0, 0, -1, -1, -1, -1, NAN], atol=1e-6)
    # R = 4: MDI 2 is half way; 2^(1/2): balance 3/4, reward 1/2.
    close(mdi_reward(torch.tensor([2.0, 0.5, root, 4.0]), 4.0), [0, 0, 0.5, -1], atol=1e-6)


# ---- vgr within the group ----


def test_vgr_iqr():
    # 1 .. 5: Q25 = 2, Q75 = 4. (4 - v)/2 = 1.5, 1, 0.5, 0, -0.5, clipped to [0, 1]. Lower is better.
    close(vgr_reward(torch.tensor([1.0, 2, 3, 4, 5]), one_group(5)), [1, 1, 0.5, 0, 0])


def test_vgr_iqr_has_linear_quantiles():
    # 0 1 2 3: Q25 at position 0.75 = 0.75, Q75 = 2.25. (2.25 - v)/1.5 = 1.5, 5/6, 1/6, -0.5.
    close(vgr_reward(torch.tensor([3.0, 1, 0, 2]), one_group(4)), [0, 5 / 6, 1, 1 / 6])


def test_vgr_mad():
    # 1 2 3 10: median 2.5, deviations 1.5 0.5 0.5 7.5, their median 1. 0.5 tanh((2.5 - v)/(1.4826 + 1e-6)).
    scale = 1.4826 + 1e-6
    expected = [0.5 * math.tanh((2.5 - v) / scale) for v in (1, 2, 3, 10)]
    assert expected[0] > expected[1] > 0 > expected[2] > expected[3]
    close(vgr_reward(torch.tensor([1.0, 2, 3, 10]), one_group(4), "mad"), expected)


def test_vgr_mad_epsilon():
    # 0, 2e-6, 4e-6: median 2e-6, MAD 2e-6: 2/(2 * 1.4826 + 1) = 0.50439.
    t = 0.5 * math.tanh(2 / 3.9652)
    close(vgr_reward(torch.tensor([0, 2e-6, 4e-6]), one_group(3), "mad"), [t, 0, -t], rtol=1e-5)


@pytest.mark.parametrize(("normalizer", "neutral"), [("iqr", 0.5), ("mad", 0.0)])
def test_vgr_is_neutral_without_spread_or_company(normalizer, neutral):
    # Group 0: no spread. Group 1: one valid value. Group 2: no vision at all. Group 3: one outlier of five, so
    # quartiles and MAD are flat.
    vgr = torch.tensor([2.0, 2.0, 3.0, NAN, NAN, NAN, 1, 1, 1, 1, 9])
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 3])
    expected = [neutral, neutral, neutral, NAN, NAN, NAN, *[neutral] * 5]
    close(vgr_reward(vgr, group, normalizer), expected)


def test_vgr_spread_of_a_millionth_is_none():
    # 0 and 1.9e-6: quartiles 0.25 and 0.75 of the way, 0.95e-6 apart: neutral. 0 and 2.2e-6: 1.1e-6 apart: 1 and 0.
    close(vgr_reward(torch.tensor([0, 1.9e-6]), one_group(2)), [0.5, 0.5])
    close(vgr_reward(torch.tensor([0, 2.2e-6]), one_group(2)), [1, 0])
    # MAD of 0 and 1.9e-6 is 0.95e-6.
    close(vgr_reward(torch.tensor([0, 1.9e-6]), one_group(2), "mad"), [0, 0])


# Six of eight responses at 1.5, two at 1.504: Q25 = 1.5, Q75 = 1.501, which is 7e-4 of the median.
ROUNDED = torch.tensor([1.5, 1.5, 1.504, 1.5, 1.5, 1.504, 1.5, 1.5])


def test_vgr_is_neutral_where_rounding_makes_the_spread():
    ranked = [1, 1, 0, 1, 1, 0, 1, 1]
    close(vgr_reward(ROUNDED, one_group(8)), ranked, atol=1e-3)  # float32 rounds far less: a difference
    close(vgr_reward(ROUNDED, one_group(8), rounding=5e-3), [0.5] * 8)
    right = torch.ones(8)
    close(vgr_hard_negative_reward(ROUNDED, right, one_group(8)), [x - 0.5 for x in ranked], atol=1e-3)
    close(vgr_hard_negative_reward(ROUNDED, right, one_group(8), rounding=5e-3), [0] * 8)


@pytest.mark.parametrize(("normalizer", "neutral"), [("iqr", 0.5), ("mad", 0.0)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_vgr_spread_against_the_median(normalizer, neutral, dtype):
    # v and v + 2d: median v + d, quartiles d apart, MAD d: neutral up to d = r (v + d). Twice v, twice d.
    r = VGR_ROUNDING[dtype]
    for v in (2.0, 4.0):
        for d, flat in ((0.99 * r * v, True), (1.01 * r * v, False)):
            found = vgr_reward(torch.tensor([v, v + 2 * d], dtype=torch.float64), one_group(2), normalizer, r)
            assert (found == neutral).all() == flat and (found[0] > neutral > found[1]) == (not flat)


@pytest.mark.parametrize("normalizer", ["iqr", "mad"])
@given(
    st.lists(st.floats(-0.49, 0.49), min_size=1, max_size=8), st.floats(0.01, 100), st.sampled_from(["fp32", "bf16"])
)
def test_vgr_of_responses_that_differ_by_rounding_is_neutral(normalizer, noise, level, dtype):
    r = VGR_ROUNDING[dtype]
    values = (level * (1 + r * torch.tensor(noise, dtype=torch.float64))).float()
    group, right = one_group(len(noise)), torch.ones(len(noise))
    assert (vgr_reward(values, group, normalizer, r) == neutral_value(normalizer)).all()
    for pool in ("correct", "group"):
        assert (vgr_hard_negative_reward(values, right, group, normalizer, pool, r) == 0).all()


@pytest.mark.parametrize("normalizer", ["iqr", "mad"])
@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.sampled_from(["fp32", "bf16"]))
def test_vgr_of_responses_that_differ_is_ranked(normalizer, values, dtype):
    # Values in steps of 1/10, up to 4: any two that differ do so by more than rounding.
    values = torch.tensor(values, dtype=torch.float64) / 10
    exact = vgr_reward(values, one_group(len(values)), normalizer, rounding=0.0)
    same(vgr_reward(values, one_group(len(values)), normalizer, VGR_ROUNDING[dtype]), exact)


def test_vgr_groups_are_separate_and_not_applicable_is_no_member():
    # Group 0 holds 1 2 3 4 5 and a NaN, group 1 the tenfold, in mixed order.
    vgr = torch.tensor([5.0, 50, 4, 40, NAN, 3, 30, 2, 20, 1, 10])
    group = torch.tensor([0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1])
    close(vgr_reward(vgr, group), [0, 0, 0, 0, NAN, 0.5, 0.5, 1, 1, 1, 1])


# ---- hard negatives ----

VGR = torch.tensor([1.0, 2, 3, 4, 5])
ACCURACY = torch.tensor([1.0, 1, 1, 0, 0])


def test_hard_negative_among_the_correct():
    # Correct: 1 2 3: Q25 = 1.5, Q75 = 2.5: clip(2.5 - v) = 1, 0.5, 0, minus 0.5. Wrong ones: 0.
    close(vgr_hard_negative_reward(VGR, ACCURACY, one_group(5)), [0.5, 0, -0.5, 0, 0])


def test_hard_negative_against_the_group():
    # Q25 = 2, Q75 = 4: 1, 1, 0.5 for the correct ones, minus 0.5.
    close(vgr_hard_negative_reward(VGR, ACCURACY, one_group(5), pool="group"), [0.5, 0.5, 0, 0, 0])


def test_hard_negative_mad():
    # Correct: 1 2 3: median 2, MAD 1. Group: median 3, deviations 2 1 0 1 2, MAD 1. Nothing is subtracted.
    def t(x):
        return 0.5 * math.tanh(x / (1.4826 + 1e-6))

    close(vgr_hard_negative_reward(VGR, ACCURACY, one_group(5), "mad"), [t(1), 0, t(-1), 0, 0])
    close(vgr_hard_negative_reward(VGR, ACCURACY, one_group(5), "mad", "group"), [t(2), t(1), 0, 0, 0])


def test_hard_negative_of_a_single_correct_response():
    accuracy = torch.tensor([1.0, 0, 0, 0, 0])
    close(vgr_hard_negative_reward(VGR, accuracy, one_group(5)), [0, 0, 0, 0, 0])  # fewer than 2: neutral
    close(vgr_hard_negative_reward(VGR, accuracy, one_group(5), pool="group"), [0.5, 0, 0, 0, 0])


def test_hard_negative_needs_an_accuracy_of_one_and_vision():
    # Accuracy 0.9 or None is not 1. Without vision: not applicable, right or wrong.
    vgr = torch.tensor([1.0, 2, 3, NAN, NAN, 1, 3])
    accuracy = torch.tensor([1.0, 1, 1, 1, 0, 0.9, NAN])
    close(vgr_hard_negative_reward(vgr, accuracy, one_group(7)), [0.5, 0, -0.5, NAN, NAN, 0, 0])


def test_hard_negative_separates_groups():
    vgr = torch.tensor([1.0, 10, 2, 20, 3, 30])
    group = torch.tensor([0, 1, 0, 1, 0, 1])
    close(vgr_hard_negative_reward(vgr, torch.ones(6), group), [0.5, 0.5, 0, 0, -0.5, -0.5])
