"""Where ranks cannot be forked, tests of them are skipped before they compute anything."""

import os

import pytest


@pytest.fixture(autouse=True)
def one_thread(request):
    """The fork of a process that has used OpenMP's threads hangs in them."""
    if os.environ.get("OMP_NUM_THREADS") != "1" and hasattr(request.module, "run_ranks"):
        pytest.skip("ranks are forked: OMP_NUM_THREADS=1, as make test has it")
