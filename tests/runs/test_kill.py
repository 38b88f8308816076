"""Kill it at any moment, start it again with the same command: it ends with the same numbers, bitwise.

Real processes, SIGKILL, no warning. A kill is aimed at one of three moments: some time after the start, some time into
a step, or the writing of a checkpoint; how long it waits there is drawn from a seeded generator. The short test forks
the tiny model's run, the slow one starts the embedded model's. `make soak` does the same fifty times, with rewards in
their sandbox.
"""

import random
import signal

import pytest
from interruptions import MOMENTS, strike
from run_helpers import ForkedRun, get_run_dir, read_metrics, same_end, start, tiny_arguments, train_arguments

from mtrl.checkpoint.folder_store import list_checkpoints
from mtrl.checkpoint.manifest import check_manifest


@pytest.mark.parametrize(("kills", "steps"), [(1, 6), pytest.param(20, 60, marks=pytest.mark.slow)])
def test_a_killed_run_ends_with_the_same_numbers(tmp_path, kills, steps):
    settings = [f"training.max_steps={steps}", "training.save_freq=1", "training.val_freq=3", "training.save_limit=2"]
    is_short, whole, killed = kills == 1, get_run_dir(tmp_path / "whole"), get_run_dir(tmp_path / "killed")
    arguments = tiny_arguments if is_short else train_arguments
    completed(arguments(tmp_path / "whole", *settings), is_short)  # in another process, as the others are
    command, dice = arguments(tmp_path / "killed", *settings), random.Random(kills)
    hits = dict.fromkeys(MOMENTS, 0)
    for number in range(kills):
        moment = MOMENTS[-1 - number % len(MOMENTS)]
        status, _ = strike(command, killed, moment, signal.SIGKILL, dice, forked=is_short)
        hits[moment] += status == -signal.SIGKILL
    messages = completed(command, is_short)
    assert "after step" in messages or "is finished" in messages, messages
    assert sum(hits.values()) == kills, f"the run was over before its moment: {hits}"
    same_end(whole, killed, steps)
    assert any(row.get("actor/grad_norm", 0) > 0 for row in read_metrics(killed).values()), "something was learnt"
    for checkpoint in list_checkpoints(killed / "checkpoints"):
        check_manifest(checkpoint)
    assert not list((killed / "checkpoints").glob(".*")), "leftovers of the killed runs are removed"


def completed(command, forked):
    process = ForkedRun(command) if forked else start(command)
    messages = process.communicate()[1]
    assert process.returncode == 0, messages
    return messages
