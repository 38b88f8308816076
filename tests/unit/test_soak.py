"""The soak detects the failures that it looks for."""

import os
import subprocess
import sys

import pytest
from soak import struck_runs
from soak.ledger import Ledger


def test_a_leftover_process_of_a_run_is_found(monkeypatch):
    """Also one in a separate session."""
    monkeypatch.setenv(struck_runs.MARK, f"mark of {os.getpid()}")
    assert struck_runs.marked() == []
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        assert len(struck_runs.marked()) == 1
        monkeypatch.setattr(struck_runs, "GRACE", 0.1)
        assert struck_runs.left_behind()
    finally:
        left.kill()
        left.wait()
    assert struck_runs.left_behind() == []


def test_a_ledger_continues(tmp_path):
    Ledger(tmp_path).record(strikes=3)
    again = Ledger(tmp_path)
    again.record(strikes=again.get("strikes") + 1)
    assert Ledger(tmp_path).get("strikes") == 4 and Ledger(tmp_path).get("seconds") >= 0


def test_a_run_that_ends_early_is_no_strike(tmp_path, monkeypatch):
    """A signal to an ended run would prove nothing."""
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", struck_runs.MARK):  # the soak sets them; they are put back
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(struck_runs, "MOMENTS", ("step",))
    monkeypatch.setattr(struck_runs, "completed", lambda command: None)
    monkeypatch.setattr(struck_runs, "train_arguments", lambda output, *settings: ["config", "--list"])
    with pytest.raises(AssertionError, match="strike 0, SIGKILL"):
        struck_runs.strikes(Ledger(tmp_path), 1, [struck_runs.signal.SIGKILL])
