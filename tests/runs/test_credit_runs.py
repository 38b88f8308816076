"""The weight by entropy change: by hand, in a run, and as a user's file; and invalid rules."""

import json
import math
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import close, fake_experience, fake_rollouts, padded
from run_helpers import get_run_dir, read_metrics, tiny_arguments, train_arguments

from mtrl.algorithms.credit import assign
from mtrl.algorithms.credit.entropy_change import EntropyChange
from mtrl.cli import main
from mtrl.types import Signals

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/credit/my_rule.py"
PLAIN = ("optimization.enable_perception_filtering=false", "optimization.enable_trajectory_reweighting=false")


def apply_rule(rule, change, lengths, visual=None):
    group = range(len(lengths)) if visual else None
    rollouts = fake_rollouts(lengths, group=group, visual=visual)
    experience = fake_experience(rollouts, signals=Signals(entropy_change=padded(change)))
    return rule.apply(experience, (0, 0))


# ------------------------------------------------------------------------------------------------------------- by hand
def test_by_hand():
    # |c| = 1, 3, 2: mean 2, weights 1/2, 3/2, 1. Half as strong: 3/4, 5/4, 1.
    change = [[1.0, -3.0, 2.0]]
    close(apply_rule(EntropyChange(), change, [3]), [[0.5, 1.5, 1.0]])
    close(apply_rule(EntropyChange(strength=0.5), change, [3]), [[0.75, 1.25, 1.0]])
    close(apply_rule(EntropyChange(strength=0.0), change, [3]), [[1, 1, 1]])
    close(apply_rule(EntropyChange(clip=(0.8, 1.2)), change, [3]), [[0.8, 1.2, 1.0]])


def test_padding_text_rows_and_rows_without_change():
    change = [[1.0, 3.0, 99.0], [5.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    found = apply_rule(EntropyChange(), change, [2, 3, 3], visual=[True, False, True])
    close(found, [[0.5, 1.5, 1.0], [1, 1, 1], [1, 1, 1]])


def test_it_multiplies_the_advantage():
    rollouts = fake_rollouts([2])
    signals = Signals(entropy_change=torch.tensor([[1.0, -3.0]]))
    experience = fake_experience(rollouts, signals=signals, advantage=torch.full((1, 2), 2.0))
    credit = assign((EntropyChange(),), experience, (0, 0))
    close(credit.advantage, [[1.0, 3.0]])
    close(credit.weights, [[0.5, 1.5]])


# ------------------------------------------------------------------------------------------------------------- in a run
def run(output, *overrides):
    status = main(tiny_arguments(output, "training.max_steps=2", "training.val_freq=-1", *overrides))
    return status, read_metrics(get_run_dir(output))


def test_the_package_rule_trains(tmp_path):
    status, rows = run(tmp_path, *PLAIN, "optimization.credit=[entropy_change]")
    step = rows[1, False]
    assert status == 0 and step["actor/entropy_change_size"] > 0.001 and step["actor/grad_norm"] > 0
    assert "actor/combined_token_fraction" not in step, "it is a weight, not a filter"


@pytest.mark.slow
def test_rules_after_published_ideas_train_together(tmp_path):
    rules = ("mass_gate", "vision_entropy", "vision_entropy_weights", "hidden_similarity", "attention_anchors",
             "key_tokens", "perception_bonus", "random_filter", "bottom")  # fmt: skip
    status, rows = run(tmp_path, *PLAIN, f"optimization.credit=[{','.join(rules)}]")
    assert status == 0 and rows[1, False]["actor/grad_norm"] > 0
    assert 0.2 < rows[1, False]["actor/combined_token_fraction"] < 1


def test_the_oracle_reads_the_responses_of_a_run(tmp_path):
    """A user's function marks the first token of every answer, <think>."""
    spans = tmp_path / "mine.py"
    spans.write_text("def spans(row, response):\n    assert row['options']\n    return [(0, 7)]\n")
    more = (
        "training.max_steps=1",
        "training.val_freq=-1",
        f"optimization.credit=[{{name: oracle, spans: '{spans}:spans'}}]",
    )
    status = main(train_arguments(tmp_path, *PLAIN, *more))
    step = read_metrics(get_run_dir(tmp_path))[1, False]
    assert status == 0 and step["actor/grad_norm"] >= 0
    assert step["actor/combined_token_fraction"] == pytest.approx(1 / step["response_length/mean"], rel=0.01)


def test_a_rule_of_another_view_trains(tmp_path):
    """Its signal is logged, kept with the responses of a replay, and measured by the same pass as S."""
    rule = f"optimization.credit=[{{name: {EXAMPLE.parent}/without_image.py:NeedsImage, strength: 0.5}}]"
    words = ("optimization.replay_buffer_size=4", "optimization.enable_perception_filtering=true")
    status, rows = run(tmp_path, *words, rule)
    step = rows[2, False]
    assert status == 0 and 0 < step["signal/jsd@none"] < math.log(2) and step["actor/grad_norm"] > 0
    assert 0 < step["actor/perception_token_fraction"] < 1


@pytest.mark.parametrize("view", ["blank", "crop", "none(3)"])
def test_an_unknown_view_is_refused(view, tmp_path, capsys):
    rules = tmp_path / "rules.py"
    text = (EXAMPLE.parent / "without_image.py").read_text().replace("jsd@none", f"jsd@{view}")
    rules.write_text(text)
    assert main(tiny_arguments(tmp_path, f"optimization.credit=['{rules}:NeedsImage']")) != 0
    assert f"there is no view {view}; there are perturbed, black" in capsys.readouterr().err


def test_a_users_file_named_in_a_yaml_trains(tmp_path):
    config = tmp_path / "run.yaml"
    rule = {"name": f"{EXAMPLE}:EntropyChange", "strength": 0.5}
    config.write_text(json.dumps({"optimization": {"credit": [rule], "disable_divergence": True}}))
    status = main([*tiny_arguments(tmp_path, "training.max_steps=2"), str(config)])
    rows = read_metrics(get_run_dir(tmp_path))
    assert status == 0 and rows[1, False]["actor/my_mean_weight"] == pytest.approx(1, abs=0.2)
    assert rows[2, False]["actor/grad_norm"] > 0


HEAD = """
from dataclasses import dataclass
import torch
from mtrl.algorithms.credit import Bonus, Filter, Weight
from mtrl.types import Needs

@dataclass(frozen=True)
"""
WRONG = {
    "asks for what nobody measures": (
        "class Mine(Weight):\n    needs = Needs('values')\n    def apply(self, experience, key): ...",
        "Mine needs the signal values, and there is no critic to measure it; set optimization.advantage_esti",
    ),
    "asks for what does not exist": (
        "class Mine(Weight):\n    needs = Needs('gaze')\n    def apply(self, experience, key): ...",
        "Mine needs the signal gaze, which nothing measures; there are old_logprobs, ",
    ),
    "a wrong shape": (
        "class Mine(Weight):\n    def apply(self, experience, key):\n        return torch.ones(3)",
        "credit rule Mine returned torch.float32 of [3]; it must return a tensor of [8, ",
    ),
    "not a number": (
        "class Mine(Bonus):\n    def apply(self, experience, key):\n        return experience.advantage / 0",
        "credit rule Mine returned",
    ),
    "a negative weight": (
        "class Mine(Weight):\n    def apply(self, experience, key):\n        return -torch.ones(len(experience))",
        "credit rule Mine returned the weight -1; a weight is at least 0",
    ),
    "its applies_to is wrong": (
        "class Mine(Filter):\n    def apply(self, experience, key):\n        return experience.rollouts.mask\n"
        "    def applies_to(self, experience):\n        return torch.ones(1)",
        "credit rule Mine: applies_to must return a bool for each of 8 responses",
    ),
    "its metrics raise": (
        "class Mine(Weight):\n    def apply(self, experience, key): ...\n"
        "    def metrics(self, experience):\n        raise ValueError('one\\ntwo')",
        "credit rule Mine failed: ValueError: one (",
    ),
    "it raises": (
        "class Mine(Filter):\n    def apply(self, experience, key):\n        return experience.rewrads",
        "credit rule Mine failed: AttributeError: 'Experience' object has no attribute 'rewrads'",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_invalid_rules_end_with_one_clear_line(fault, tmp_path, capsys):
    body, said = WRONG[fault]
    file = tmp_path / "mine.py"
    file.write_text(HEAD + textwrap.dedent(body) + "\n")
    status = main(tiny_arguments(tmp_path, *PLAIN, "training.max_steps=1", f"optimization.credit=[{file}:Mine]"))
    errors = [line for line in capsys.readouterr().err.splitlines() if said in line]
    assert status in (1, 2) and len(errors) == 1


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{name: entropy_change, strength: much}", "entropy_change: strength: expected a number, got 'much'"),
        (
            "{name: attention_weights, target: masks}",
            "attention_weights: token_weight_target: expected one of advantage, mask",
        ),
        ("{name: attention_weights, clip: [1]}", "attention_weights: token_weight_clip: expected a list of 2"),
        ("entropy_chnge", "did you mean entropy_change?"),
    ],
)
def test_arguments_are_checked_before_the_first_step(rule, said, tmp_path, capsys):
    assert main(tiny_arguments(tmp_path, f"optimization.credit=[{rule}]")) == 2
    assert said in capsys.readouterr().err
