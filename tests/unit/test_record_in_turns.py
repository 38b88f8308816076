"""The cost that benchmarks.record_in_turns fits, on known times."""

import pytest

from benchmarks.record_in_turns import cost, is_recorded, pays_for_record

STEPS = range(4, 24)


def test_turns_have_two_steps_and_the_next_step_pays():
    assert [step for step in range(1, 11) if is_recorded(step)] == [2, 3, 6, 7, 10]
    assert [step for step in range(1, 11) if pays_for_record(step)] == [3, 4, 7, 8]


def test_the_cost_is_found_although_the_device_slows_down():
    more, error = cost(STEPS, [3.5 + 0.01 * step + 0.05 * pays_for_record(step) for step in STEPS])
    assert more == pytest.approx(0.05) and error == pytest.approx(0.0, abs=1e-9)


def test_noise_is_in_the_error():
    more, error = cost(STEPS, [3.5 + 0.1 * (-1) ** step for step in STEPS])
    assert abs(more) < 2 * error and 0.02 < error < 0.1
