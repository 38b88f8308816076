"""docs/speed.md is what `make speed` writes from the recorded results."""

from pathlib import Path

import pytest

from benchmarks.speed_page import LARGE, LONG_TPRL, MEASURED, Unmeasured, least_seconds, make_page, read_mfu

PAGE = Path(__file__).parents[2] / "docs" / "speed.md"


def test_the_page_is_that_of_the_results():
    assert PAGE.read_text() == make_page(), "run make speed"


@pytest.mark.parametrize("measured", [each for each in MEASURED if each.part], ids=lambda each: each.part)
def test_older_results_get_the_mfu_that_newer_ones_recorded(measured):
    result = measured.read()
    recorded = read_mfu(result)
    older = {name: value for name, value in result["median_of_measured_steps"].items() if "mfu" not in name}
    assert read_mfu(result | {"median_of_measured_steps": older}) == recorded


def test_a_bound_by_arithmetic_is_below_what_was_measured():
    args, seconds = LARGE.read()["args"], LARGE.read()["median_of_measured_steps"]["wall"]
    bound = least_seconds(Unmeasured(args["prompts"], args["completion"], LONG_TPRL))
    assert 0.7 * seconds < bound < seconds
