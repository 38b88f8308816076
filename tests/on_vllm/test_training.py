"""Whole runs by the command line, with responses of a real vLLM."""

import json
import random
import signal

import pytest
from interruptions import strike
from run_helpers import finish, metrics_of, run_of, same_end, train_arguments
from vllm_engines import INSTALLED

from mtrl import cli
from mtrl.zoo.rows import MODEL_DIRECTORY, SIZES

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

ON_VLLM = "worker.rollout.name=vllm"
SETTINGS = (ON_VLLM, "training.max_steps=4", "training.save_freq=1", "training.val_freq=2", "training.save_limit=2")


@pytest.mark.parametrize("mode", ["inprocess", "process"])
def test_a_killed_run_goes_on_to_the_same_end(tmp_path, mode):
    words = (*SETTINGS, f"worker.rollout.mode={mode}")
    status, said = finish(train_arguments(tmp_path / "whole", *words))
    assert status == 0, said
    command = train_arguments(tmp_path / "killed", *words)
    process, _ = strike(command, run_of(tmp_path / "killed"), "step", signal.SIGKILL, random.Random(0))
    assert process.returncode == -signal.SIGKILL
    status, said = finish(command)
    assert status == 0 and "going on after step" in said, said
    same_end(run_of(tmp_path / "whole"), run_of(tmp_path / "killed"), 4)
    rows = metrics_of(run_of(tmp_path / "killed"))
    assert all(row.get("rollout/logprob_gap_max", 0) < 1e-4 for row in rows.values())


@pytest.mark.slow
def test_it_learns_with_token_weights_by_attention(tmp_path, capsys):
    """The demo's bar in short form: filtering, shaping and weights by attention, on responses of vLLM."""
    words = [ON_VLLM, "optimization.enable_token_weights=true", f"training.output_dir={tmp_path}"]
    assert cli.main(["demo", *words]) == 0
    summary = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert summary["accuracy_before"] < 0.5 and summary["accuracy_after"] > 0.8, summary


def test_evaluation(tmp_path, monkeypatch):
    """Greedy answers of both engines to pictures are the same."""
    monkeypatch.setitem(SIZES, "validation", 40)
    answers = []
    for engine in ("local", "vllm"):
        out = tmp_path / f"{engine}.jsonl"
        words = [f"worker.rollout.name={engine}", "worker.actor.fsdp.mixed_precision_dtype=fp32"]
        assert cli.main(["eval", str(MODEL_DIRECTORY), "--out", str(out), *words]) == 0
        answers.append([json.loads(line)["response"] for line in out.read_text().splitlines()])
    assert answers[0] == answers[1] and len(answers[0]) == 40
