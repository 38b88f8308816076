"""The quick tests of this folder in every run of the suite, in a process that OpenMP gives one thread."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 1800  # a hang is a failure, and a busy machine is none


@pytest.mark.skipif(
    os.environ.get("OMP_NUM_THREADS") == "1", reason="ranks can be forked here: the tests run themselves"
)
def test_ranks_are_tested():
    """A process that has used OpenMP's threads cannot be forked, and the suite's other tests use them."""
    quiet = ("-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not soak")
    command = [sys.executable, "-m", "pytest", *quiet, str(Path(__file__).parent)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = re.findall(r"(\d+) skipped", done.stdout)
    assert re.search(r"\d+ passed", done.stdout) and skipped == ["1"], f"this test alone is skipped: {done.stdout}"
