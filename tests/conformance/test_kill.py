"""Kill it at any moment, start it again with the same command: it ends with the same numbers, to the bit.

Real processes, SIGKILL, no warning. A kill is aimed at one of three moments: some time after the start, some time into
a step, or the writing of a checkpoint; how long it waits there is drawn from a seeded generator. `make soak` does the
same fifty times, with rewards in their sandbox.
"""

import random
import signal

import pytest
from interruptions import MOMENTS, strike
from run_helpers import finish, metrics_of, run_of, same_end, train_arguments

from mtrl.checkpoint.folder_store import checkpoints
from mtrl.checkpoint.manifest import check


@pytest.mark.parametrize(("kills", "steps"), [(1, 3), pytest.param(20, 60, marks=pytest.mark.slow)])
def test_a_killed_run_ends_with_the_same_numbers(tmp_path, kills, steps):
    settings = [f"training.max_steps={steps}", "training.save_freq=1", "training.val_freq=3", "training.save_limit=2"]
    whole, killed = run_of(tmp_path / "whole"), run_of(tmp_path / "killed")
    status, said = finish(train_arguments(tmp_path / "whole", *settings))  # a process of its own, as the others are
    assert status == 0, said
    command, dice = train_arguments(tmp_path / "killed", *settings), random.Random(kills)
    hits = dict.fromkeys(MOMENTS, 0)
    for number in range(kills):
        moment = MOMENTS[-1 - number % len(MOMENTS)]
        process, _ = strike(command, killed, moment, signal.SIGKILL, dice)
        hits[moment] += process.returncode == -signal.SIGKILL
    status, said = finish(command)
    assert status == 0 and ("going on after step" in said or "is finished" in said), said
    assert sum(hits.values()) == kills, f"the run was over before its moment: {hits}"
    same_end(whole, killed, steps)
    assert any(row.get("actor/grad_norm", 0) > 0 for row in metrics_of(killed).values()), "something was learnt"
    for checkpoint in checkpoints(killed / "checkpoints"):
        check(checkpoint)
    assert not list((killed / "checkpoints").glob(".*")), "leftovers of the killed are gone"
