"""The mdi reward alone evens out the attention, and shuffled rewards do not. Slow."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is next to the package

from benchmarks.attention_curves import learn

pytestmark = pytest.mark.slow

SEEDS = (1, 2, 3)  # shuffled rewards are a random walk: one seed alone may wander anywhere


def change(variant, seed, scratch):
    """The share of the imbalance that is left after training."""
    run = learn(variant, seed, steps=8, validate_every=8, scratch=scratch)
    (_, first), *_, (_, last) = run["imbalance"]
    (_, length_before), *_, (_, length_after) = run["length"]
    assert 0.8 < length_after / length_before < 1.2
    return last / first


def test_rewarded_balance_is_learnt(tmp_path):
    runs = [(variant, seed) for variant in ("mdi", "mdi shuffled") for seed in SEEDS]
    with ThreadPoolExecutor(2) as pool:  # each is a process of one thread
        ends = dict(zip(runs, pool.map(lambda run: change(*run, tmp_path), runs), strict=True))
    mean = {variant: sum(ends[variant, seed] for seed in SEEDS) / len(SEEDS) for variant, _ in runs}
    assert mean["mdi"] < 0.7, ends
    assert mean["mdi shuffled"] > 0.85, ends
