"""How many threads a run computes with."""

import os
import subprocess
import sys

import pytest
import torch

from mtrl.cli import WAITING
from mtrl.training import threads
from mtrl.training.threads import FILE, choose_threads, set_threads
from mtrl.utils import machine


@pytest.fixture
def torch_threads(monkeypatch):
    """torch would use four threads on four cores, and no number is configured."""
    for name in threads.CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    taken = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: taken[-1])
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    return taken


def free(monkeypatch, cores):
    monkeypatch.setattr(threads, "free_cores", lambda: cores)


@pytest.mark.parametrize(
    ("usual", "usable", "cores", "chosen"),
    [
        (4, 4, 4.0, 4), (4, 4, 3.1, 4), (2, 2, 1.6, 2),  # the machine is idle: torch's own number
        (4, 4, 2.9, 2), (2, 2, 1.4, 1), (4, 4, 0.0, 1), (64, 64, 20.5, 20),  # others are at work
        (64, 2, 64.0, 2),  # a container of two processors on a large machine
        (1, 4, 0.0, 1),
    ],
)  # fmt: skip
def test_as_many_threads_as_processors_are_free(usual, usable, cores, chosen, monkeypatch, caplog):
    free(monkeypatch, cores)
    assert choose_threads(usual, usable) == chosen
    assert ("processors are free" in caplog.text) == (chosen != usual)


def test_a_quiet_machine_leaves_torch_alone(torch_threads, tmp_path, monkeypatch):
    free(monkeypatch, 4.0)
    set_threads(tmp_path)
    assert torch_threads == [4] and (tmp_path / FILE).read_text() == "4\n"


def test_a_resumed_run_keeps_its_number(torch_threads, tmp_path, monkeypatch, caplog):
    free(monkeypatch, 2.2)
    set_threads(tmp_path)
    assert torch_threads == [4, 2]
    torch_threads.append(4)
    free(monkeypatch, 4.0)
    set_threads(tmp_path, resumed=True)
    assert torch_threads[-1] == 2 and (tmp_path / FILE).read_text() == "2\n"
    torch_threads.append(4)
    set_threads(tmp_path)  # a start that failed before left the number: no run has computed with it
    assert torch_threads[-1] == 4


def test_more_threads_than_there_are_processors_here_are_not_taken(torch_threads, tmp_path, caplog):
    (tmp_path / FILE).write_text("64")
    set_threads(tmp_path, resumed=True)
    assert torch_threads == [4] and "used 64 threads before, now it uses 4" in caplog.text


def test_the_users_number_is_used(torch_threads, tmp_path, monkeypatch, caplog):
    free(monkeypatch, 0.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    (tmp_path / FILE).write_text("2")
    set_threads(tmp_path, resumed=True)
    assert torch_threads == [4] and "last bits" in caplog.text


# ---------------------------------------------------------------------------------------------------------- the machine
@pytest.mark.parametrize(
    ("name", "text", "quotas"),
    [
        ("cpu.max", "150000 100000\n", [1.5]),
        ("cpu.max", "max 100000\n", []),
        ("quota", "-1", []),
        ("quota", "400000", [4]),
    ],
)
def test_the_quota_of_a_container(name, text, quotas, tmp_path, monkeypatch):
    (tmp_path / name).write_text(text)
    (tmp_path / "period").write_text("100000")
    monkeypatch.setattr(machine, "CPU_QUOTA", ((tmp_path / "cpu.max",), (tmp_path / "quota", tmp_path / "period")))
    assert machine._quotas() == quotas


def test_the_share_that_is_free(tmp_path, monkeypatch):
    """Two processors that we are bound to, of three: one is idle for 60 of 100 ticks, one works for a nicer program."""
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine, "CPU_TIMES", stat)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0, 2})
    monkeypatch.setattr(machine.os, "getpriority", lambda kind, process: 0)
    monkeypatch.setattr(machine, "AUTOGROUP", tmp_path / "autogroup")
    stat.write_text("cpu  9 9 9 9 9 9 9 9\ncpu0 1 0 0 5 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0\n")
    before = machine.cpu_times()
    assert before == (5, 6) and machine.free_share(before) is None, "no time has passed"
    stat.write_text("cpu0 31 0 10 55 10 0 0 0 7 7\ncpu1 0 0 0 900 0 0 0 0\ncpu2 20 80 0 0 0 0 0 0\n")
    assert machine.free_share(before) == (60 + 80) / 200
    (tmp_path / "autogroup").write_text("1\n")
    assert machine.free_share((5, 6)) == 60 / 200, "a nicer program of another session does not give way"
    (tmp_path / "autogroup").write_text("0\n")
    assert machine.free_share((5, 6)) == (60 + 80) / 200
    monkeypatch.setattr(machine.os, "getpriority", lambda kind, process: 19)
    assert machine.free_share((5, 6)) == 60 / 200, "we are as nice ourselves"
    monkeypatch.setattr(machine, "CPU_TIMES", tmp_path / "none")
    assert machine.cpu_times() is None and machine.free_share(None) is None


@pytest.mark.parametrize(
    ("chosen", "waiting"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_threads_of_a_command_soon_sleep(chosen, waiting):
    """The variable is set before torch, which reads it once, is imported; a choice of the user stays."""
    code = (
        "import os, sys; from mtrl.cli import WAITING, main; main(['--version']); assert 'torch' not in sys.modules; "
    )
    code += "print({name: os.environ[name] for name in WAITING if name in os.environ})"
    environment = {name: value for name, value in os.environ.items() if name not in WAITING} | chosen
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.splitlines()[-1] == str(waiting)
