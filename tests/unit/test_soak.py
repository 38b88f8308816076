"""The soak detects the failures that it looks for."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import is_alive
from run_helpers import wait_for
from soak import schedule, struck_runs
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


TRIAL = textwrap.dedent(
    """
    import subprocess, sys, time
    from pathlib import Path
    from soak.ledger import Ledger

    ledger = Ledger(Path(sys.argv[1]))
    run = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    ledger.record(cases=ledger.get("cases") + 1, run=run.pid)
    if ledger.get("cases") == 1:
        time.sleep(600)
    if ledger.get("cases") == 2:
        sys.exit("it cannot be")
    ledger.record(passed=True)
    """
)


def test_trials_are_stopped_in_time_and_continue(tmp_path, monkeypatch):
    """First it is stopped with the run that it has started, then it fails, then it passes."""
    for name in ("PYTHONPATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):  # the schedule sets them; they are put back
        monkeypatch.setenv(name, os.environ.get(name, ""))
    folder = tmp_path / "view"

    def start(name, directory, count):
        cases = Ledger(directory / name).get("cases")
        command = [sys.executable, "-c", TRIAL, str(directory / name)]
        with schedule.said(name, directory).open("ab") as said:
            process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stderr=said, start_new_session=True)
        wait_for(lambda: Ledger(directory / name).get("cases") > cases, "case")
        return process

    monkeypatch.setattr(schedule, "start", start)
    found = []
    for status in (0, 1, 0):
        assert (
            schedule.schedule(["view"], tmp_path, 2, 0.1 if not found else 600, None, tmp_path / "out.json") == status
        )
        found.append(json.loads((tmp_path / "out.json").read_text())["trials"]["view"])
        wait_for(lambda: not is_alive(Ledger(folder).get("run")), "end of the run")
    assert [each["cases"] for each in found] == [1, 2, 3] and [each.get("passed") for each in found] == [
        None,
        None,
        True,
    ]
    assert found[2]["failures"] == ["it cannot be"], "a failure is not forgotten"
    assert schedule.schedule(["view"], tmp_path, 1, None, None, None) == 0 and Ledger(folder).get("cases") == 3


def test_a_trial_whose_package_is_missing_is_skipped(tmp_path, monkeypatch):
    for name in ("PYTHONPATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(schedule, "find_spec", lambda package: None)
    assert schedule.schedule(["ranks"], tmp_path, 1, None, None, tmp_path / "out.json") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["trials"] == {"ranks": {"skipped": "ray is not installed"}} and result["versions"]["torch"]
