"""The mdi reward alone evens out the attention, and shuffled rewards do not. Slow."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ stands beside the package

from benchmarks.attention_curves import learn

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("variant", ["mdi", "mdi shuffled"])
def test_rewarded_balance_is_learnt(variant, tmp_path):
    run = learn(variant, seed=5, steps=14, validate_every=14, scratch=tmp_path)
    (_, first), *_, (_, last) = run["imbalance"]
    assert (last < 0.7 * first) == (variant == "mdi"), (first, last)
    (_, length_before), *_, (_, length_after) = run["length"]
    assert 0.8 < length_after / length_before < 1.2
