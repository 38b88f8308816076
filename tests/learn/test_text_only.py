"""A text model without images learns sums by reinforcement from random weights."""

import json
from itertools import product
from statistics import mean

import pytest

from mtrl.compose.run import build, configure
from mtrl.tracking.jsonl import read_rows
from pretraining.tiny_checkpoints import make_tiny_checkpoint

STEPS = 60
REWARD = '''
def score(data):
    """Half for a digit, all for the right one."""
    said = data["response"][:1]
    return 1.0 if said == data["answer"] else 0.5 if said.isdigit() else 0.0
'''


@pytest.mark.slow
def test_a_tiny_text_model_learns_sums(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", "qwen2")
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in product(range(5), repeat=2)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (tmp_path / "rewards.py").write_text(REWARD)
    config, _ = configure(
        None,
        {
            "worker.actor.model.model_path": str(model),
            "dataset.train_files": str(tmp_path / "sums.jsonl"),
            "dataset.rollout_batch_size": 16,
            "dataset.max_response_length": 2,
            "worker.actor.global_batch_size": 16,
            "worker.actor.optim.lr": 3e-3,
            "worker.actor.fsdp.mixed_precision_dtype": "fp32",
            "worker.rollout.n": 16,
            "worker.reward.functions": [f"{tmp_path / 'rewards.py'}:score"],
            "worker.reward.num_cpus": 1,
            "optimization.disable_divergence": True,
            "training.max_steps": STEPS,
            "training.output_dir": str(tmp_path / "runs"),
            "training.logger": [],
        },
    )
    run = build(config)
    run.train()
    reward = [row["reward/overall"] for row in read_rows(run.directory / "metrics.jsonl") if "reward/overall" in row]
    assert len(reward) == STEPS and mean(reward[:5]) < 0.2
    assert mean(reward[-5:]) > mean(reward[:5]) + 0.4, "digits at first, and then which"
