"""The whole command on two ranks, as started by torchrun, against the same command in one process: with weights in
CPU memory, with a reward model, with activation checkpointing and a frozen tower, and with users' classes."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch
from reward_model_helpers import vision_reward_model
from run_helpers import get_run_dir, load_in_one_thread, read_metrics, train_arguments, write_into
from safetensors.torch import load_file
from soak.torchrun_ranks import said, start

from mtrl.cli import main
from mtrl.utils.embedded_models import MODELS

pytestmark = [
    pytest.mark.slow,  # six runs
    pytest.mark.skipif(os.environ.get("OMP_NUM_THREADS") != "1", reason="they are forked: OMP_NUM_THREADS=1"),
]

STEPS, SECONDS = 2, 600  # longer is a hang, even on a busy machine
TPRL = (
    "dataset.rollout_batch_size=4", "worker.actor.global_batch_size=2", f"training.max_steps={STEPS}",
    "training.val_freq=-1", "training.val_before_train=false", "optimization.enable_perception_filtering=true",
    "optimization.enable_trajectory_reweighting=true", "optimization.use_entropy_penalty=true",
    "worker.actor.optim.warmup_steps=0",
)  # fmt: skip
REFERENCE = ("optimization.disable_divergence=false", "worker.ref.offload_params=true")
FROZEN = ("worker.actor.model.enable_gradient_checkpointing=true", "worker.actor.model.freeze_vision_tower=true")
JUDGED = ("worker.reward.reward_type=model", "worker.reward.functions=null", "worker.reward.weights=null")
EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = (
    f"optimization.advantage_estimator={EXAMPLES}/estimators/baseline_by_length.py:ByLength",
    f"optimization.policy_loss={EXAMPLES}/losses/quadratic.py:Quadratic", "worker.actor.ppo_epochs=2",
    f"optimization.signals=[{EXAMPLES}/signals/margin.py:Margin]",
    f"optimization.credit=[{EXAMPLES}/signals/margin.py:Hesitant]", "optimization.replay_buffer_size=4",
)  # fmt: skip
# Overrides of both commands, and additional overrides of each run on ranks.
RUNS = {
    "main memory": (
        REFERENCE,
        [("worker.actor.fsdp.cpu_offload=true",), ("worker.actor.offload.offload_optimizer=true",)],
    ),
    "reward model": (JUDGED, [()]),
    "frozen tower": (FROZEN, [()]),
    "classes of users": (OWN, [()]),
}


def joined(output, processes):
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(processes), said(output)
    return get_run_dir(output)


def alone(output, settings):
    """Forked like the ranks, so that nothing is imported again."""
    arguments = train_arguments(output, *settings)

    def run():
        write_into(output / "said.txt")
        load_in_one_thread()
        sys.exit(main(arguments))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return joined(output, [process])


def responses(run):
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    return [(row["step"], row["response"]) for row in rows]


def weights(run):
    return load_file(run / f"checkpoints/step_{STEPS}/model.safetensors")


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one_process(name, tmp_path, monkeypatch):
    settings, of_ranks = RUNS[name]
    settings = (*TPRL, *settings)
    if name == "reward model":
        settings = (*settings, f"worker.reward.model_path={vision_reward_model(tmp_path / 'judge', 'qwen2_5_vl')}")
    expected = alone(tmp_path / "alone", settings)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    for number, more in enumerate(of_ranks):
        output = tmp_path / f"ranks_{number}"
        found = joined(output, start(output, (*settings, "training.n_gpus_per_node=2", *more)))
        same_to_rounding(found, expected)
        check_learnt(weights(found), whole_tower=name != "frozen tower")


def same_to_rounding(found, expected):
    """The same responses, and the same numbers to the rounding of float32; so the weights, that moved by 4e-4."""
    assert responses(found) == responses(expected) and len(responses(found)) > 0
    rows, theirs = read_metrics(found), read_metrics(expected)
    assert rows.keys() == theirs.keys() == {(1, False), (STEPS, False), (STEPS, True)}
    for place, row in theirs.items():
        assert row.keys() == rows[place].keys()
        for metric, value in row.items():
            if "logprob_gap" not in metric:  # rounding only
                assert rows[place][metric] == pytest.approx(value, rel=1e-4, abs=1e-6), (place, metric)
    others = weights(expected)
    for key, weight in weights(found).items():
        torch.testing.assert_close(weight, others[key], rtol=0, atol=1e-5)


def check_learnt(found, whole_tower):
    before = load_file(MODELS["zoo"] / "model.safetensors")
    tower = {key for key in found if "visual" in key}
    moved = {key for key, weight in found.items() if (weight - before[key]).abs().max() > 1e-4}
    assert tower and moved == (set(found) if whole_tower else set(found) - tower)
