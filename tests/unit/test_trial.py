"""`mtrl doctor --try`: one whole step on real weights, and log-probs against transformers' own forward."""

import re

import pytest
import torch
from tiny_models import checkpoint, get_encoder, plain_logp, plain_model, prompts_for, random_rollouts

from mtrl import cli
from mtrl.commands import doctor_trial as trial
from mtrl.config import load_config
from mtrl.models.parity import Gap, log_prob_gap

SMALL = [
    "dataset.rollout_batch_size=2", "worker.actor.global_batch_size=2", "worker.rollout.n=2",
    "dataset.max_response_length=6", "training.max_steps=7",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ log-probs
@pytest.mark.parametrize("family", ["qwen2", "qwen3_vl"])
def test_the_gap_is_that_to_a_plain_forward(family):
    rollouts = random_rollouts(prompts_for(family), [0, 2, 2], [4, 3, 5])
    theirs = plain_logp(family, rollouts, temperature=0.7).detach()
    settings = {"temperature": 0.7, "compute_dtype": torch.float32}
    same = log_prob_gap(theirs, rollouts, plain_model(family), get_encoder(family), **settings)
    assert same.tokens == 12 and same.largest < 1e-4 and same.within
    moved = theirs.clone()
    moved[1, 2] += 0.6
    gap = log_prob_gap(moved, rollouts, plain_model(family), get_encoder(family), **settings)
    assert gap.largest == pytest.approx(0.6, abs=1e-3) and gap.mean == pytest.approx(0.05, abs=1e-3)
    assert not gap.within


@pytest.mark.parametrize("mean", [float("nan"), float("inf"), 0.2])
def test_nan_is_not_within_a_limit(mean):
    assert not Gap(mean, mean, 3, limit=0.1).within


# ------------------------------------------------------------------------------------------------------------ the trial
@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "what is it", "answer": "red"}\n' * 8)
    return file


@pytest.fixture
def words(tmp_path, rows):
    path = checkpoint("qwen2")
    return [f"worker.actor.model.model_path={path}", f"dataset.train_files={rows}", *SMALL]


def test_a_checkpoint_is_tried_and_no_files_are_left(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert cli.main(["doctor", "--try", *words]) == 0
    said = capfd.readouterr().out
    assert re.search(r"loaded +\S+: 0\.\d million parameters on \w+", said)
    gap = re.search(
        r"log-probs +(\S+) nats from transformers' own forward .* tokens of 2 responses; (\S+) allowed", said
    )
    assert gap and float(gap[1]) < float(gap[2])
    assert re.search(r"one step +2 prompts x 2 responses: \d+\.\d s \(generate .*update ", said)
    assert re.search(r"peak +\d+\.\d\d GiB, in \w+", said) and "7 such steps" in said
    assert said.splitlines()[-1] == "  It runs here."
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rows.jsonl", "scratch"]
    assert list(scratch.iterdir()) == []


def test_log_probs_that_differ_are_a_problem(words, monkeypatch, capfd):
    monkeypatch.setattr(trial, "log_prob_gap", lambda *_, **__: Gap(0.5, 2.0, 12, limit=1e-3))
    monkeypatch.setattr(trial, "check_step", lambda run: [])
    assert cli.main(["doctor", "--try", *words]) == 2
    said = capfd.readouterr().out
    assert re.search(
        r"PROBLEM  the log-probs of \S+ differ from those of transformers by 0\.5 nats per token, 0\.001", said
    )
    assert "It runs here" not in said and "It can run" not in said


@pytest.mark.slow  # 2 s
def test_errors_of_training_are_problems(words, rows, capfd):
    """Seen only once the rewards are there."""
    rows.with_name("mine.py").write_text("def f(sample):\n    raise ValueError('no')\n")
    reward = f"worker.reward.functions=[{rows.with_name('mine.py')}:f]"
    assert cli.main(["doctor", "--try", *words, reward, "worker.reward.weights=null"]) == 2
    assert "PROBLEM  the rewards of every response failed" in capfd.readouterr().out


def test_a_trial_is_here(capsys):
    assert cli.main(["doctor", "--try", "--gpu", "80"]) == 2
    assert "leave out --gpu" in capsys.readouterr().err


def test_nothing_of_the_run_is_written_to(tmp_path):
    places = {"rollout_log_path": "a", "attention_diag_log_path": "b", "output_dir": "c"}
    config = load_config(None, {f"training.{name}": str(tmp_path / place) for name, place in places.items()})
    tried = trial.redirect_outputs(config, "folder").training
    assert (tried.output_dir, tried.rollout_log_path, tried.attention_diag_log_path) == ("folder", None, None)


@pytest.mark.slow
def test_the_embedded_task_is_tried(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "--try"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "  It runs here."
    assert list(tmp_path.iterdir()) == []
