"""Plain PPO with a critic on the embedded task: the critic learns the returns, and the policy learns from it."""

from statistics import median

import pytest

from mtrl.compose.run import build, configure
from mtrl.protocols import Tracker

STEPS = 14
SETTINGS = {
    "training.max_steps": STEPS,
    "training.logger": (),
    "training.val_before_train": False,
    "training.val_freq": -1,
    "optimization.advantage_estimator": "gae",
    "optimization.enable_perception_filtering": False,
    "optimization.enable_trajectory_reweighting": False,
    "worker.actor.global_batch_size": 4,
    "worker.actor.optim.lr": 3e-5,
    "worker.critic.optim.lr": 1e-3,
    "worker.critic.optim.warmup_steps": 2,
}


class Kept(Tracker):
    def __init__(self):
        self.rows = []

    def metrics(self, step, values):
        self.rows.append(values)


def mean(rows, name):
    return sum(row[name] for row in rows) / len(rows)


@pytest.mark.slow
def test_the_critic_learns_the_returns_and_the_reward_rises(tmp_path):
    tracker = Kept()
    config, embedded = configure(None, SETTINGS | {"training.output_dir": str(tmp_path)})
    assert embedded
    run = build(config, trackers=[tracker])
    run.loop.components.validation = None
    run.train()
    first, last = tracker.rows[:4], tracker.rows[-4:]
    assert tracker.rows[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6), (
        "a head of zeros explains no variance"
    )
    # The median: in a step whose responses are nearly all correct there is hardly any variance to explain.
    assert median(row["critic/explained_variance"] for row in tracker.rows[-6:]) > 0.2
    assert mean(last, "critic/value_loss") < 0.5 * first[0]["critic/value_loss"]
    assert mean(last, "reward/overall") > mean(first, "reward/overall") + 0.1
