"""A long run does not grow: memory, open files, threads, seen from outside, with saves and validations on the way."""

import pytest
from soak.ledger import Ledger
from soak.long_run import long_run


@pytest.mark.slow
def test_nothing_grows(tmp_path):
    """`make soak` does the same for a thousand steps, with half the limit."""
    long_run(Ledger(tmp_path), steps=200, most=0.04)
