"""Nothing leaks: rounds of update and generation on images that are never the same."""

import pytest
from vllm_engines import INSTALLED

from benchmarks.vllm_growth import run_rounds

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")


@pytest.mark.parametrize("rounds, first", [(60, 30), pytest.param(300, 50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["inprocess", pytest.param("process", marks=pytest.mark.slow)])
def test_memory_does_not_grow(rounds, first, mode):
    seen = run_rounds(rounds, mode)
    assert seen[-1] < 1.05 * seen[first - 1], [each >> 20 for each in seen[::10]]
