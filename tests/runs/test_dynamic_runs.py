"""Filtering, replay and greedy baselines in real runs, as small as they get."""

import json
import math
import shutil

import pytest
from run_helpers import QUESTIONS, SETTINGS, STEPS, get_run_dir, read_metrics, same_end, tiny_arguments, tiny_run_files

from mtrl.checkpoint.folder_store import list_checkpoints, read_state
from mtrl.cli import main
from mtrl.tracking.jsonl import read_rows

FILTERED = ("optimization.online_filtering=true", "optimization.filter_key=accuracy")
BY_SPREAD = ("optimization.online_filtering=true", "optimization.filter_by=spread", "optimization.max_refills=20")
NO_VALIDATION = ("training.val_freq=-1", "training.val_before_train=false")


def trained(output, *overrides):
    """Status, and the rows of the steps."""
    rewards = f"worker.reward.functions=[{tiny_run_files() / 'rewards.py'}:accuracy,format]"
    status = main(tiny_arguments(output, *SETTINGS, *NO_VALIDATION, rewards, *overrides))
    return status, [row for (_, validated), row in sorted(read_metrics(get_run_dir(output)).items()) if not validated]


def goes_on_to_the_same_end(tmp_path, *overrides, steps=STEPS):
    """A run cut back after step 2 ends bitwise like an undisturbed one. Returns the rows of its steps."""
    for name in ("whole", "parts"):
        assert trained(tmp_path / name, *overrides)[0] == 0
    saves = get_run_dir(tmp_path / "parts") / "checkpoints"
    for path in list_checkpoints(saves)[1:]:
        shutil.rmtree(path)
    (saves / "best_model").unlink(missing_ok=True)
    status, rows = trained(tmp_path / "parts", *overrides)
    assert status == 0
    same_end(get_run_dir(tmp_path / "whole"), get_run_dir(tmp_path / "parts"), steps)
    stored = [
        get_run_dir(tmp_path / name) / f"checkpoints/step_{steps}/replay/groups.json" for name in ("whole", "parts")
    ]
    assert not stored[0].exists() or stored[0].read_text() == stored[1].read_text()
    return rows


# ------------------------------------------------------------------------------------------------------------ filtering
def test_a_filtered_run_refills_and_counts_every_prompt(tmp_path):
    status, rows = trained(tmp_path, *BY_SPREAD)
    assert status == 0 and len(rows) == STEPS
    total = {name: sum(row[f"filtering/prompts_{name}"] for row in rows) for name in ("used", "dropped", "refilled")}
    assert total["refilled"] > 0 and total["dropped"] == total["refilled"], "every batch is full in the end"
    assert all(row["filtering/prompts_used"] == 2 and row["actor/grad_norm"] > 0 for row in rows)
    state = read_state(get_run_dir(tmp_path) / "checkpoints" / f"step_{STEPS}")
    read = QUESTIONS * state["source"]["epoch"] + state["source"]["position"]
    assert state["prompts"] == total and read == total["used"] + total["dropped"]
    assert rows[-1]["filtering/prompts_dropped_so_far"] == total["dropped"]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["format", "vgr"])
def test_a_filtered_run_resumes_bitwise(tmp_path, other):
    rewards = f"worker.reward.functions=[{tiny_run_files() / 'rewards.py'}:accuracy,{other}]"
    words = (*FILTERED, "optimization.max_refills=20", rewards)
    rows = goes_on_to_the_same_end(tmp_path, *words)
    assert sum(row["filtering/prompts_refilled"] for row in rows) > 0


def test_a_run_that_stays_short_stops_with_its_last_step_saved(tmp_path, capfd):
    """With `on_short_batch: continue`, it continues with fewer prompts."""
    words = (*FILTERED, "optimization.max_refills=0", "training.save_freq=-1", "dataset.rollout_batch_size=4")
    status, rows = trained(tmp_path, *words, "optimization.on_short_batch=stop")
    said = capfd.readouterr().err
    assert status != 0 and "Set optimization.on_short_batch=continue" in said and "Traceback" not in said
    status, more = trained(tmp_path, *words, "optimization.on_short_batch=continue")
    assert status == 0 and len(more) == STEPS
    assert min(row["filtering/prompts_used"] for row in more) < 4
    assert [row["filtering/prompts_used"] for row in more[: len(rows)]] == [4] * len(rows)


# ----------------------------------------------------------------------------------------------------- greedy baselines
REMAX = ("optimization.advantage_estimator=remax", "worker.rollout.n=null")


def test_remax_learns_from_one_response_per_prompt(tmp_path):
    status, rows = trained(tmp_path, *REMAX, "dataset.rollout_batch_size=4")
    assert status == 0 and all(0 <= row["reward/greedy_baseline"] <= 1.2 for row in rows)
    assert any(row["reward/greedy_baseline"] != row["reward/overall"] for row in rows)
    assert any(row["actor/grad_norm"] > 0 for row in rows)
    shown = [row for row in read_rows(get_run_dir(tmp_path) / "rollouts.jsonl") if row["step"] == 1]
    assert len(shown) == 4, "greedy responses are not logged"


@pytest.mark.slow
def test_remax_resumes_bitwise(tmp_path):
    goes_on_to_the_same_end(tmp_path, *REMAX)


# --------------------------------------------------------------------------------------------------------------- replay
REPLAYED = ("optimization.replay_buffer_size=8", "training.max_steps=6", "dataset.rollout_batch_size=3")


@pytest.mark.slow  # 2 s
def test_groups_without_signal_are_replaced_by_stored_ones(tmp_path):
    status, rows = trained(tmp_path, *REPLAYED)
    assert status == 0 and sum(row["replay/hits"] for row in rows) > 0
    assert all(row["replay/hits"] <= row["replay/wanted"] for row in rows)
    assert [row["replay/size"] for row in rows] == sorted(row["replay/size"] for row in rows)
    assert all(math.isfinite(row["actor/grad_norm"]) for row in rows)
    shown = [row for row in read_rows(get_run_dir(tmp_path) / "rollouts.jsonl") if row["version"] < row["step"] - 1]
    assert len(shown) == 4 * sum(row["replay/hits"] for row in rows), "four responses a group, of earlier weights"
    newest = get_run_dir(tmp_path) / "checkpoints" / "step_6" / "replay"
    assert len(json.loads((newest / "groups.json").read_text())) == rows[-1]["replay/size"]


@pytest.mark.slow
def test_a_replaying_run_resumes_bitwise(tmp_path):
    rows = goes_on_to_the_same_end(tmp_path, *REPLAYED, steps=6)
    assert sum(row["replay/hits"] for row in rows[2:]) > 0


@pytest.mark.slow
def test_filtering_and_replay_together_resume_bitwise(tmp_path):
    rewards = f"worker.reward.functions=[{tiny_run_files() / 'rewards.py'}:accuracy,vgr]"
    words = (*FILTERED, *REPLAYED, "optimization.max_refills=0", rewards)
    rows = goes_on_to_the_same_end(tmp_path, *words, steps=6)
    assert sum(row["replay/hits"] for row in rows[2:]) > 0 and sum(row["filtering/prompts_dropped"] for row in rows) > 0
