"""The local engine against `model.generate`; `benchmarks/generate.py` measures and explains the comparison."""

import pytest


@pytest.mark.slow
def test_the_local_engine_is_faster_than_generate():
    """One thread and medians of paired rounds, so that a busy machine slows both. Measured: 2.9 times."""
    from benchmarks.generate import run

    result = run(rounds=5)
    assert result["ratio"] > 1.7, result
    assert abs(result["local_tokens"] / result["generate_tokens"] - 1) < 0.1, "both do the same work"
