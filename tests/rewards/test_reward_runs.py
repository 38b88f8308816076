"""Runs with reward files of every kind, through the command line."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from run_helpers import get_run_dir, tiny_arguments

from mtrl.cli import main
from mtrl.training.loop import Loop

SMALL = [
    "worker.actor.global_batch_size=2",
    "worker.rollout.n=8",
    "worker.reward.num_cpus=2",
    "worker.reward.weights=null",
    "worker.reward.failure_reward=-1",
    "training.val_freq=-1",
    "training.val_before_train=false",
]

HOSTILE = '''
import os, time

calls = []

def reward_function(data):
    """Every response is treated in another way."""
    calls.append(1)
    manners = [
        lambda: 1 / 0, lambda: time.sleep(1000), lambda: os._exit(3), lambda: bytearray(1 << 44), lambda: float("nan"),
        lambda: None, lambda: float("inf"), lambda: [1.0], lambda: print("x" * 10**7), lambda: "text", lambda: 1.0,
    ]
    return manners[sum(map(ord, data["response"])) % len(manners)]()
'''


def train(tmp_path, source, *overrides):
    path = tmp_path / "mine.py"
    path.write_text(source)
    return main(tiny_arguments(tmp_path, *SMALL, f"worker.reward.functions=[{path}]", *overrides))


def metrics(tmp_path):
    lines = (get_run_dir(tmp_path) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "reward/overall" in row]


@pytest.mark.slow
def test_a_hostile_function_does_not_stop_a_run(tmp_path, caplog):
    # two hundred: the log must not swell with them
    many = "dataset.val_files=zoo@validation", "dataset.max_prompt_length=512"
    assert train(tmp_path, HOSTILE, "training.max_steps=2", "worker.reward.timeout_s=1", *many) == 0
    rows = metrics(tmp_path)
    assert len(rows) == 2 and any(row["reward/failed"] > 0 for row in rows)
    assert all(-1 <= row["reward/overall"] <= 1 for row in rows)
    assert "reward function mine failed on" in caplog.text and len(caplog.text) < 50_000


@pytest.mark.slow  # 2 s
def test_ten_steps_of_failures_end_a_run_with_their_cause(tmp_path, capfd):
    source = "def reward_function(data): return data['no such column']\n"
    assert train(tmp_path, source, "training.max_steps=12", "worker.rollout.n=2") == 1
    assert len(metrics(tmp_path)) == 9
    last = capfd.readouterr().err.partition("mtrl: no response could be scored in 10 steps in a row.")[2]
    assert "reward function mine failed on 4 of 4" in last and "KeyError: 'no such column'" in last


def test_weights_and_signals_of_a_function_move_through_a_run(tmp_path):
    source = (
        "def reward_function(data, signals):\n"
        "    tokens = len(data['response_token_ids'])\n"
        "    names = ('old_logprobs', 'entropy', 'dependency')\n"
        "    seen = signals and all(len(signals[name]) == tokens for name in names)\n"
        "    return len(data['response']) % 3, {'measured': bool(seen), 'token_weights': [0.0] * tokens}\n"
    )
    assert train(tmp_path, source, "training.max_steps=1", "optimization.enable_token_weights=true") == 0
    row = metrics(tmp_path)[0]
    assert row["reward/measured"] == 1.0 and row["reward/failed"] == 0.0
    assert row["actor/grad_norm"] == 0.0  # every token has weight 0


def workers_of_this_process():
    """Those that run now, by /proc."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"mtrl.rewards.worker_main" in (directory / "cmdline").read_bytes():
                found.append(directory.name)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_that_fails_leaves_no_process(tmp_path, monkeypatch):
    seen = []

    def stop(loop, step):
        seen.append(workers_of_this_process())
        raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "step", stop)
    assert train(tmp_path, "def reward_function(data): return 1.0\n", "training.max_steps=1") == 130
    assert len(seen[0]) == 1 and not workers_of_this_process()
