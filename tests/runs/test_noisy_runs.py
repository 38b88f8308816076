"""NoisyRollout in real runs: they train, resume bitwise, and refuse an odd group."""

import shutil

import pytest
from helpers import slow_but
from run_helpers import SETTINGS, STEPS, get_run_dir, read_metrics, same_end, tiny_arguments
from tiny_models import checkpoint

from mtrl.checkpoint.folder_store import list_checkpoints
from mtrl.cli import main

NOISY = ("worker.rollout.noisy_half=true", "worker.rollout.noise_mid_step=2", "training.val_freq=-1")
OTHERS = {
    "alone": (),
    "sampled ahead": ("worker.rollout.off_policy_steps=1",),
    "filtered and replayed": (
        "optimization.online_filtering=true", "optimization.filter_by=spread", "optimization.max_refills=20",
        "optimization.replay_buffer_size=8",
    ),
}  # fmt: skip


def steps(output):
    return {step: row for (step, validated), row in read_metrics(get_run_dir(output)).items() if not validated}


@pytest.mark.parametrize("others", slow_but(list(OTHERS), "sampled ahead"))
def test_a_run_resumes_bitwise(others, tmp_path):
    """Flags of responses that were sampled ahead, or stored, come from the checkpoint."""
    words = (*SETTINGS, *NOISY, *OTHERS[others])
    for name in ("whole", "parts"):
        assert main(tiny_arguments(tmp_path / name, *words)) == 0
    saves = get_run_dir(tmp_path / "parts") / "checkpoints"
    for path in list_checkpoints(saves)[1:]:
        shutil.rmtree(path)
    (saves / "best_model").unlink(missing_ok=True)
    assert main(tiny_arguments(tmp_path / "parts", *words)) == 0
    same_end(get_run_dir(tmp_path / "whole"), get_run_dir(tmp_path / "parts"), STEPS)
    rows = steps(tmp_path / "whole")
    levels = [rows[step]["rollout/noise_level"] for step in range(1, STEPS + 1)]
    assert levels == sorted(levels, reverse=True) and levels[0] == 499 and levels[1] == 250 and levels[-1] == 0
    assert all({"reward/clean_half", "reward/noised_half"} < row.keys() and row["actor/grad_norm"] > 0
               for row in rows.values())  # fmt: skip


@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl", "qwen3_vl", "qwen3_5"], "qwen2_5_vl"))
@pytest.mark.parametrize("probed", [True, False])
def test_three_steps_whose_gap_is_rounding(family, probed, tmp_path):
    """The log-probs of noised rows are far from the trainer's, with and without a probe before the update."""
    plain = ("optimization.enable_perception_filtering=false", "optimization.enable_trajectory_reweighting=false",
             "optimization.compute_attention_metrics=false", "worker.actor.global_batch_size=2")  # fmt: skip
    words = (f"worker.actor.model.model_path={checkpoint(family)}", "training.max_steps=3", "optimization.tis_clip=2.0")
    assert main(tiny_arguments(tmp_path, *NOISY, *words, *(() if probed else plain))) == 0
    rows = steps(tmp_path)
    assert len(rows) == 3 and all(row["actor/grad_norm"] > 0 for row in rows.values())
    assert ("actor/sensitivity_score_mean" in rows[1]) == probed
    assert max(row["rollout/logprob_gap_mean"] for row in rows.values()) < 1e-4


def test_an_odd_group_is_refused(tmp_path, capsys):
    assert main(tiny_arguments(tmp_path, *NOISY, "worker.rollout.n=5")) == 2
    assert "noisy_half needs an even number of responses to a prompt, not 5" in capsys.readouterr().err
