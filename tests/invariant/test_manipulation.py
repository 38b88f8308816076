"""What credit rules do to the gradient of a first step: against gradients taken one by one."""

from dataclasses import replace

import pytest
import torch
from helpers import close, fake_experience, fake_rollouts, padded

from mtrl.algorithms.credit import assign
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.compose.run import build, configure
from mtrl.training.gradient_effect import effective, measure_gradient_effect, surprise
from mtrl.types import Signals

pytestmark = pytest.mark.usefixtures("few_rows")
PLAIN = {"optimization.enable_perception_filtering": False, "optimization.enable_trajectory_reweighting": False}


def measured(directory, **overrides):
    settings = {"training.output_dir": str(directory), "training.logger": (), "dataset.rollout_batch_size": 4}
    config, _ = configure(None, settings | {"worker.actor.global_batch_size": 2} | PLAIN | overrides)
    run = build(config)
    with run.closing:
        before = [p.detach().clone() for p in run.loop.components.actor.learner.parameters]
        found = measure_gradient_effect(run.loop)
        after = run.loop.components.actor.learner.parameters
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "nothing is learnt"
        assert all(p.grad is None for p in after)
    return found


def test_plain_credit_is_itself(tmp_path):
    found = measured(tmp_path)
    assert found.cosine == pytest.approx(1.0, abs=1e-6) and found.size == pytest.approx(1.0, abs=1e-6)
    assert found.kept_surprise == pytest.approx(1.0) and found.effective_tokens == found.plain_tokens >= 1


def test_a_rule_that_halves_everything_changes_the_size_alone(tmp_path):
    rule = tmp_path / "half.py"
    rule.write_text(
        "from dataclasses import dataclass\nimport torch\nfrom mtrl.algorithms.credit import Weight\n\n"
        "@dataclass(frozen=True)\nclass Half(Weight):\n"
        "    def apply(self, experience, key):\n        return torch.full((len(experience),), 0.5)\n"
    )
    found = measured(tmp_path / "run", **{"optimization.credit": [f"{rule}:Half"]})
    assert found.cosine == pytest.approx(1.0, abs=1e-6) and found.size == pytest.approx(0.5, abs=1e-6)
    assert found.kept_surprise == pytest.approx(0.5) and found.effective_tokens == pytest.approx(found.plain_tokens)


def test_the_least_dependent_tokens_turn_the_gradient(tmp_path):
    found = measured(tmp_path, **{"optimization.credit": ["bottom"]})
    assert found.cosine < 0.9 and found.kept_surprise < 0.5


def test_shares_by_hand():
    # p = 1, 1/2, 1/4 and |A| = 2: c = 0, 1, 3/2. Effective tokens (5/2)² / (1 + 9/4). The filter keeps the last.
    rollouts = replace(fake_rollouts([3]), rollout_logprobs=torch.tensor([[1.0, 0.5, 0.25]]).log())
    signals = Signals(entropy=padded([[0.0, 1, 2]]))
    experience = fake_experience(rollouts, signals, advantage=torch.full((1, 3), -2.0))
    plain = surprise(credited(experience))
    close(plain, [[0.0, 1.0, 1.5]])
    assert effective(plain) == pytest.approx(6.25 / 3.25)
    kept = surprise(credited(experience, EntropyFilter(0.3)))
    close(kept, [[0.0, 0.0, 1.5]])
    assert effective(kept) == 1.0
    assert effective(torch.zeros(2, 2)) == 0.0


def credited(experience, *rules):
    return replace(experience, credit=assign(rules, experience, (0, 0)))
