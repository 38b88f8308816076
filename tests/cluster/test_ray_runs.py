"""`mtrl train` on two Ray ranks: it trains like two ranks without Ray, survives a killed rank and leaves no processes
behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers import close, is_alive
from run_helpers import finish, get_run_dir, read_metrics, same_end, train_arguments, wait_for
from safetensors.torch import load_file

from mtrl.tracking.jsonl import read_rows

pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # Ray takes half a minute to begin and to end

STARTED = []
STEPS = ("training.max_steps=4", "training.save_freq=1", "training.val_freq=-1", "training.val_before_train=false")
SECONDS = 900  # longer is a hang, even on a busy machine


def start(output, *words, ranks=2):
    arguments = train_arguments(output, *STEPS, f"training.n_gpus_per_node={ranks}", *words)
    command = [sys.executable, "-m", "mtrl", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    STARTED.append(subprocess.Popen(command, env=environment, start_new_session=True, **pipes))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def nothing_outlives_a_failure():
    yield
    while STARTED:
        STARTED.pop().kill()  # Ray's processes end with the one that started them (tested in tests/soak)


def processes(output):
    """The pids of all ranks and engines so far, from their logs."""
    logs = sorted((get_run_dir(output) / "logs").glob("*_[0-9].log"))
    return {log.stem: [int(each) for each in re.findall(r"process (\d+) on", log.read_text())] for log in logs}


def updates(output, rank):
    log = get_run_dir(output) / "logs" / f"rank_{rank}.log"
    return log.read_text().count("actor.update begins") if log.exists() else 0


def weights(output):
    return load_file(get_run_dir(output) / "checkpoints/step_4/model.safetensors")


def grad_norms(output):
    rows = {row["step"]: row for row in read_rows(get_run_dir(output) / "metrics.jsonl") if "actor/grad_norm" in row}
    return {step: row["actor/grad_norm"] for step, row in rows.items()}


def nothing_is_left(output):
    found = [number for numbers in processes(output).values() for number in numbers]
    assert found
    wait_for(lambda: not any(map(is_alive, found)), "end of every rank")


def test_a_killed_rank_changes_no_numbers(tmp_path):
    whole = start(tmp_path / "whole")
    said = whole.communicate(timeout=SECONDS)[0]
    assert whole.returncode == 0, said
    nothing_is_left(tmp_path / "whole")

    run = start(tmp_path / "killed")
    wait_for(lambda: updates(tmp_path / "killed", 1) >= 3 or run.poll() is not None, "third update")
    os.kill(processes(tmp_path / "killed")["rank_1"][-1], signal.SIGKILL)
    said = run.communicate(timeout=SECONDS)[0]
    assert run.returncode == 0, said
    assert re.search(r"rank 1 of 2 \(process \d+ on .+\) has ended; its last lines:", said), said
    assert "actor.update begins" in said and "resumes from its last checkpoint (3 more restarts)" in said
    nothing_is_left(tmp_path / "killed")

    expected = weights(tmp_path / "whole")
    for name, weight in weights(tmp_path / "killed").items():
        close(weight, expected[name], rtol=0, atol=0)
    assert grad_norms(tmp_path / "killed") == grad_norms(tmp_path / "whole")


APART = ("worker.hybrid_engine=false", "worker.rollout.n_gpus=1")
LAGS = ("worker.rollout.off_policy_steps=1", "worker.actor.optim.lr=1e-4", "training.max_steps=3")


def test_a_run_on_one_machine_listens_to_that_machine_alone(tmp_path):
    """Ray, torch's store and gloo: nobody else can connect to them."""
    run = start(tmp_path)
    wait_for(lambda: updates(tmp_path, 1), "update")
    tree = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    sockets = [
        (each.name(), end.laddr) for each in tree for end in each.net_connections("tcp") if end.status == "LISTEN"
    ]
    assert len(sockets) >= 6, "those of Ray, of the store and of the ranks"
    assert not [each for each in sockets if each[1].ip not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")], sockets
    run.send_signal(signal.SIGTERM)
    run.wait(SECONDS)


def completed(output, *words):
    run = start(output, *words)
    said = run.communicate(timeout=SECONDS)[0]
    assert run.returncode == 0, said
    nothing_is_left(output)
    return get_run_dir(output)


def alike(found, expected, steps):
    """The same responses at every step, and the same numbers to the rounding of float32."""
    rows = [
        [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()] for run in (found, expected)
    ]
    assert [row["response"] for row in rows[0]] == [row["response"] for row in rows[1]]
    theirs = read_metrics(expected)
    for place, row in read_metrics(found).items():
        for name, value in row.items():
            if "logprob_gap" not in name:
                assert value == pytest.approx(theirs[place][name], rel=1e-3, abs=1e-4), (place, name)
    assert {step for step, _ in theirs} == set(range(1, steps + 1))


def test_a_dedicated_engine_samples_like_colocated_ones(tmp_path):
    alike(completed(tmp_path / "apart", *APART), completed(tmp_path / "shared"), 4)
    logs = {log.stem: log.read_text() for log in (get_run_dir(tmp_path / "apart") / "logs").glob("*_[0-9].log")}
    assert set(logs) == {"rank_0", "rank_1", "engine_0"}
    assert logs["engine_0"].count("engine.generate begins") >= 4 and logs["engine_0"].count("engine.load ends") == 5
    assert "engine." not in logs["rank_0"] and "actor." not in logs["engine_0"]


def test_an_own_engine_samples_like_the_local_one(tmp_path):
    """On the ranks, and in its own process."""
    own = f"worker.rollout.name={Path(__file__).with_name('own_engines.py')}:Samples"
    expected = completed(tmp_path / "local")
    alike(completed(tmp_path / "shared", own), expected, 4)
    alike(completed(tmp_path / "apart", own, *APART), expected, 4)


def test_one_step_ahead_on_ranks(tmp_path):
    """Engines that share the ranks' devices, one that does not, and one process: the same numbers."""
    shared, apart = completed(tmp_path / "shared", *LAGS), completed(tmp_path / "apart", *LAGS, *APART)
    alone = tmp_path / "alone"
    status, said = finish(train_arguments(alone, *STEPS, *LAGS))
    assert status == 0, said
    for run in (shared, apart):
        alike(run, get_run_dir(alone), 3)
        steps = [row for (_, validation), row in read_metrics(run).items() if not validation]
        assert [row["rollout/staleness_mean"] for row in steps] == [0.0, 1.0, 1.0]


def test_a_killed_engine_changes_no_numbers(tmp_path):
    words = (*APART, "worker.rollout.off_policy_steps=1")
    whole = completed(tmp_path / "whole", *words)
    run = start(tmp_path / "killed", *words)
    wait_for(lambda: updates(tmp_path / "killed", 1) >= 3 or run.poll() is not None, "third update")
    os.kill(processes(tmp_path / "killed")["engine_0"][-1], signal.SIGKILL)
    said = run.communicate(timeout=SECONDS)[0]
    assert run.returncode == 0, said
    assert re.search(r"engine 0 of 1 \(process \d+ on .+\) has ended; its last lines:", said), said
    assert "resumes from its last checkpoint (3 more restarts)" in said
    nothing_is_left(tmp_path / "killed")
    same_end(whole, get_run_dir(tmp_path / "killed"), 4)


def test_a_rank_that_does_not_respond_is_lost(tmp_path):
    run = start(tmp_path, "training.max_restarts=0", "training.heartbeat_s=15")
    wait_for(lambda: updates(tmp_path, 1) >= 2 or run.poll() is not None, "second update")
    os.kill(processes(tmp_path)["rank_1"][-1], signal.SIGSTOP)
    said = run.communicate(timeout=SECONDS)[0]
    assert run.returncode == 1 and "rank 1 of 2" in said and "has not answered for 15 s" in said, said
    nothing_is_left(tmp_path)


@pytest.mark.parametrize(("by", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_signal_saves_and_leaves_no_processes(by, status, tmp_path):
    """A terminal sends Ctrl-C to all processes of a command, and a scheduler may do so too."""
    run = start(tmp_path, "training.max_steps=400", "training.save_freq=-1")
    wait_for(lambda: updates(tmp_path, 0) >= 2 or run.poll() is not None, "second update")
    os.killpg(run.pid, signal.SIGINT) if by == signal.SIGINT else run.send_signal(by)
    said = run.communicate(timeout=SECONDS)[0]
    assert run.returncode == status and "saved after step" in said, said
    nothing_is_left(tmp_path)
