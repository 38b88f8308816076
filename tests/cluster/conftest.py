"""Skips tests of forked ranks if OMP_NUM_THREADS is not 1."""

import os

import pytest


@pytest.fixture(autouse=True)
def one_thread(request):
    """A fork of a process that has used OpenMP's threads hangs."""
    if os.environ.get("OMP_NUM_THREADS") != "1" and hasattr(request.module, "run_ranks"):
        pytest.skip("ranks are forked: set OMP_NUM_THREADS=1, as make test does")
