"""From functions to rewards: the effect of failures on a run, and token weights for the credit."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import close, fake_experience, fake_rollouts
from reward_helpers import rows

from mtrl.algorithms.credit import assign
from mtrl.compose.algorithm import make_credit_rules
from mtrl.compose.reward_scorer import build_scorer
from mtrl.config import load_config
from mtrl.utils.errors import RunError


def make_scorer(*functions, **settings):
    return build_scorer(
        load_config(None, {f"worker.reward.{key}": value for key, value in settings.items()}), 100, functions
    )


# ---------------------------------------------------------------------------------------------- a run that cannot learn
def fragile(data):
    if data["response"] == "bad":
        raise RuntimeError("no luck")
    return 1.0


BAD, MIXED = rows(["bad", "bad"], ["x"] * 2), rows(["bad", "fine"], ["x"] * 2)


def test_ten_steps_without_a_score_stop_the_run():
    scorer = make_scorer(fragile, failure_reward=-1.0)
    for step in range(9):
        close(scorer.submit(BAD, step).result().total, [-1, -1])
    with pytest.raises(RunError) as stopped:
        scorer.submit(BAD, 9).result()
    for word in ("10 steps in a row", "fragile", "2 of 2", "fake p0", "RuntimeError: no luck"):
        assert word in str(stopped.value)


def test_one_score_in_ten_steps_is_enough():
    scorer = make_scorer(fragile)
    for step in range(30):
        scorer.submit(MIXED if step % 10 == 9 else BAD, step).result()


def test_neither_validations_nor_repeated_rounds_of_a_step_count():
    scorer = make_scorer(fragile)
    for _ in range(20):
        scorer.submit(BAD, None).result()
        scorer.submit(BAD, 3).result()


def test_printed_output_is_in_the_log(tmp_path, caplog):
    path = tmp_path / "loud.py"
    path.write_text("def f(data):\n    print('x' * 10**6, 'looking at', data['response'])\n    return 'one'\n")
    scorer = build_scorer(
        load_config(None, {"worker.reward.functions": (f"{path}:f",), "worker.reward.num_cpus": 1}), 10
    )
    assert scorer.submit(MIXED, 0).result().failed.all()
    scorer.close()
    for word in ("reward function f failed on 2 of 2", "fake p0", "it returned str", "looking at"):
        assert word in caplog.text
    assert len(caplog.text) < 10_000


# -------------------------------------------------------------------------------------------- a part that never applies
def test_answers_in_another_column_are_reported_once(caplog):
    scorer = make_scorer("accuracy", "format")
    for step in (None, 1, 2):
        found = scorer.submit(rows(["A", "B"], [None, None], solution=["A", "B"]), step).result()
        assert found.parts["accuracy"].isnan().all() and found.total.tolist() == [0, 0]
    (said,) = [record.getMessage() for record in caplog.records]
    for word in ("at validation reward accuracy applies to none of 2", "column 'answer'", "dataset.answer_key"):
        assert word in said


def test_a_part_that_applies_to_one_response_is_not_complained_of(caplog):
    make_scorer("accuracy").submit(rows(["A", "B"], ["A", None]), 1).result()
    assert not caplog.records


def test_a_function_that_returns_none_is_reported_without_blaming_the_answers(caplog):
    scorer = make_scorer(lambda data: None)
    scorer.submit(rows(["A"], ["A"]), 3).result()  # steps done before: the console calls it the fourth
    assert "at step 4 reward <lambda> applies to none of 1 responses" in caplog.text and "column" not in caplog.text


# ------------------------------------------------------------------------------------------------------- token weights
def test_shorter_lists_are_filled_with_ones_and_longer_ones_are_cut(caplog):
    weights = {"row 0": [0.5, 2.0], "row 1": [3.0], "row 2": [1.0, 2.0, 3.0, 4.0, 5.0], "row 3": None, "row 4": []}

    def function(data):
        given = weights[data["response"]]
        return 1.0 if given is None else (1.0, {"token_weights": given})

    scorer = make_scorer(function)
    for step in range(3):
        rewards = scorer.submit(fake_rollouts([2, 3, 3, 3, 1]), step).result()
        close(rewards.token_weights, [[0.5, 2, 1], [3, 1, 1], [1, 2, 3], [1, 1, 1], [1, 1, 1]])
    assert list(rewards.parts) == ["function"]
    assert caplog.text.count("function returned no token_weights for 1 of 5 responses") == 1  # not once per step


def test_missing_token_weights_are_reported_once(caplog):
    """Attention could provide them, but is not read."""
    overrides = {"optimization.enable_token_weights": True, "worker.reward.functions": ("file.py",)}
    overrides["optimization.compute_attention_metrics"] = False
    scorer = build_scorer(load_config(None, overrides), 10, [lambda data: 1.0])
    for step in range(2):
        assert scorer.submit(MIXED, step).result().token_weights is None
    assert caplog.text.count("the reward functions returned no token_weights for 2 of 2 responses") == 1


def test_without_lists_there_are_no_weights_and_no_message(caplog):
    assert make_scorer(lambda data: 1.0).submit(MIXED, 0).result().token_weights is None
    assert not caplog.text


def test_the_first_function_that_brings_weights_decides():
    functions = [
        lambda data: 1.0,
        lambda data: (0.0, {"token_weights": [2.0]}),
        lambda data: (0.0, {"token_weights": [3.0]}),
    ]
    rewards = make_scorer(*functions).submit(fake_rollouts([1]), 0).result()
    close(rewards.token_weights, [[2]])


@pytest.mark.parametrize(("target", "advantage", "measure"), [("advantage", [2, 6], [1, 1]), ("mask", [2, 2], [1, 3])])
def test_weights_reach_the_credit(target, advantage, measure):
    overrides = {"optimization.enable_token_weights": True, "optimization.token_weight_target": target}
    plain = {"optimization.enable_perception_filtering": False, "optimization.enable_trajectory_reweighting": False}
    config = load_config(None, overrides | plain | {"worker.reward.reward_fn_path": "unused.py"})
    rollouts = fake_rollouts([2])
    rewards = make_scorer(lambda data: (1.0, {"token_weights": [1.0, 3.0]})).submit(rollouts, 0).result()
    experience = fake_experience(rollouts, advantage=torch.full((1, 2), 2.0), rewards=rewards)
    credit = assign(make_credit_rules(config), experience, (0, 0))
    close(credit.advantage, [advantage])
    close(credit.token_weight, [measure])


def test_extra_values_that_are_no_finite_numbers_are_not_logged():
    scorer = make_scorer(lambda data: (1.0, {"whole": 10**400, "endless": math.inf, "text": "2", "seen": 2}))
    rewards = scorer.submit(rows(["a"], ["x"]), 0).result()
    assert not rewards.failed.any() and set(rewards.parts) == {"<lambda>", "seen"}


def test_extra_values_are_separate_parts():
    scorer = make_scorer(lambda data: (1.0, {"seen": 2, "said": "much", "flag": True}), lambda data: (1.0, {"seen": 4}))
    parts = scorer.submit(replace(MIXED), 0).result().parts
    assert list(parts) == ["<lambda>", "<lambda>#2", "seen", "flag"]
    close(parts["seen"], [3, 3])
    close(parts["flag"], [1, 1])
