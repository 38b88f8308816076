"""Built-in rewards of form and length, and how the scorer makes a total of parts."""

import math
import re
from dataclasses import replace

import pytest
import torch
from helpers import NAN, close, fake_rollouts

from mtrl.compose.algorithm import make_reward_schedule
from mtrl.compose.reward_scorer import build_scorer, warn_about_unmatched_answers
from mtrl.compose.run import build
from mtrl.config import load_config
from mtrl.data import DataSettings, RowList, open_dataset
from mtrl.rewards.builtin import accuracy, format, length, think_format
from mtrl.rewards.sandbox import InProcess
from mtrl.rewards.scorer import Builtin, RewardScorer


@pytest.mark.parametrize(
    ("text", "whole", "leading"),
    [
        ("<think>x</think><answer>B</answer>", 1, 1),
        ("  <think>\nx\n</think>\n\n<answer>\nB\n</answer>\n", 1, 1),
        ("<think></think><answer></answer>", 1, 1),
        ("<think>x</think>B", 0, 1),
        ("<think>x</think>", 0, 0),
        ("<think>x</think>  \n ", 0, 0),
        ("<think>x", 0, 0),
        ("x</think>B", 0, 0),
        ("<answer>B</answer>", 0, 0),
        ("B", 0, 0),
        ("", 0, 0),
        ("so <think>x</think><answer>B</answer>", 0, 0),
        ("<think>x</think> so <answer>B</answer>", 0, 1),
        ("<think>x</think><answer>B</answer> so", 0, 1),
        ("<answer>B</answer><think>x</think>", 0, 0),
        ("<think>x</think><answer>B</answer><answer>C</answer>", 0, 1),
        ("<think>x</think><think>y</think><answer>B</answer>", 0, 0),
        ("<think>a <answer>B</answer> b</think><answer>B</answer>", 0, 1),
        ("<think>x<answer>B</answer></think>", 0, 0),
        ("<THINK>x</THINK><answer>B</answer>", 0, 0),
    ],
)
def test_forms(text, whole, leading):
    assert format({"response": text}) == whole
    assert think_format({"response": text}) == leading


@pytest.mark.parametrize(
    ("tokens", "punished"), [(0, 0), (50, 0), (51, -0.02), (75, -0.5), (99, -0.98), (100, -1), (150, -1)]
)
def test_length(tokens, punished):
    """The limit is 100 and the last 50 tokens cost 1/50 each."""
    assert length(100, 50)({"response_token_ids": [1] * tokens}) == pytest.approx(punished)


# ------------------------------------------------------------------------------------------------------------- totals
def by_row(*values):
    """A reward function that identifies its rows by the text of `fake_rollouts`; NaN means None."""

    def function(sample):
        value = values[int(sample["response"].split()[1])]
        return None if math.isnan(value) else value

    return Builtin(function)


def scorer(*columns, schedule=None, **options):
    functions = {f"f{i}": by_row(*column) for i, column in enumerate(columns)}
    return RewardScorer(functions, schedule or [(0.0, (1.0,) * len(columns))], 10, **options)


def test_none_is_left_out_of_the_total():
    rewards = scorer((1, NAN, NAN), (0.5, 0.25, NAN)).submit(fake_rollouts([1, 1, 1]), 0).result()
    close(rewards.total, [1.5, 0.25, 0])
    close(rewards.parts["f0"], [1, NAN, NAN])
    assert not rewards.failed.any()


def test_weights_follow_the_schedule():
    # Ten steps: [1, 0] for steps 0 to 2, [0, 2] from step 3 on.
    given = scorer((1, 1), (1, 0.5), schedule=[(0.0, (1.0, 0.0)), (0.3, (0.0, 2.0))])
    totals = {step: given.submit(fake_rollouts([1, 1]), step).result().total for step in (0, 2, 3, 9)}
    close(totals[0], [1, 1])
    close(totals[2], [1, 1])
    close(totals[3], [2, 1])
    close(totals[9], [2, 1])


def test_normalize_then_sum():
    # One group: 0 and 4 have mean 2 and std sqrt 8: -+1/sqrt 2 for any size; weights 1 and 10.
    given = scorer((0, 4), (0.1, 0), schedule=[(0.0, (1.0, 10.0))], normalize="normalize_then_sum")
    h = 1 / math.sqrt(2)
    close(given.submit(fake_rollouts([1, 1]), 0).result().total, [9 * h, -9 * h], rtol=1e-4)


def test_validation_has_the_weights_of_the_end_and_a_plain_sum():
    """Otherwise scores of different steps could not be compared: early weights change, and normalized parts always have
    mean 0."""
    given = scorer((0, 4), (0.5, 0), schedule=[(0.0, (7.0, 7.0)), (0.5, (1.0, 2.0))], normalize="normalize_then_sum")
    close(given.submit(fake_rollouts([1, 1]), step=None).result().total, [1, 4])


def test_parts_keep_their_order_for_any_timing():
    rewards = scorer((1, 2), (3, 4), schedule=[(0.0, (1.0, 100.0))]).submit(fake_rollouts([1, 1]), 0).result()
    assert list(rewards.parts) == ["f0", "f1"]
    close(rewards.total, [301, 402])


# ------------------------------------------------------------------------------------------- what a function is told
def test_a_function_sees_the_row():
    rollouts = fake_rollouts([2, 3], group=[0, 1], visual=[False, False])
    prompts = tuple(
        replace(
            prompt,
            task=replace(
                prompt.task,
                answer=f"answer {i}",
                columns={"level": i, "choices": ["x", "y"], "response": "shadowed", "ground_truth": "shadowed"},
                messages=(
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which?"}]},
                ),
            ),
            media=(torch.full((4, 6, 3), i, dtype=torch.uint8).numpy(),),
        )
        for i, prompt in enumerate(rollouts.prompts)
    )
    seen = []
    RewardScorer(
        {"look": InProcess(lambda data: seen.append(data) or 0.0, {})}, [(0.0, (1.0,))], 1, options_key="choices"
    ).submit(replace(rollouts, prompts=prompts), 0).result()
    assert seen[1]["prompt"] == "be brief\n<image>which?"
    assert seen[1]["response"] == "row 1" and seen[1]["ground_truth"] == "answer 1"
    assert seen[0]["response_token_ids"] == [0, 1] and seen[1]["response_token_ids"] == [100, 101, 102]
    assert seen[1]["level"] == 1 and seen[1]["options"] == ["x", "y"]
    assert seen[1]["images"][0].size == (6, 4) and seen[1]["images"][0].getpixel((0, 0)) == (1, 1, 1)


# ---------------------------------------------------------------------------------------------------- Python callables
def half(data):
    return 0.5


def test_callables_run_in_this_process():
    here = []
    given = build_scorer(load_config(None, {}), 10, [half, lambda data: here.append(1) or 1.0])
    close(given.submit(fake_rollouts([1, 1]), 0).result().total, [1.5, 1.5])
    assert len(here) == 2 and list(given.functions) == ["half", "<lambda>"]


def test_callables_with_kwargs_and_extras():
    config = load_config(None, {"worker.reward.reward_fn_kwargs": {"scale": 3}})
    given = build_scorer(config, 10, [lambda data, scale: (scale, {"seen": len(data["response"])})])
    rewards = given.submit(fake_rollouts([1, 1]), 0).result()
    close(rewards.total, [3, 3])
    close(rewards.parts["seen"], [5, 5])


def test_a_callable_that_raises_fails_its_sample(caplog):
    def moody(data):
        if data["response"] == "row 1":
            raise KeyError("no such thing")
        return 1.0

    config = load_config(None, {"worker.reward.failure_reward": -2.0})
    rewards = build_scorer(config, 10, [moody]).submit(fake_rollouts([1, 1, 1]), 0).result()
    close(rewards.total, [1, -2, 1])
    assert rewards.failed.tolist() == [False, True, False]
    for word in ("moody", "1 of 3", "fake p0", "KeyError", "no such thing"):
        assert word in caplog.text


def test_an_object_that_is_called():
    class RewardModel:
        def __call__(self, data):
            return 2.0

    given = build_scorer(load_config(None, {}), 10, [RewardModel()])
    assert list(given.functions) == ["RewardModel"]
    close(given.submit(fake_rollouts([1]), 0).result().total, [2])


def test_functions_of_one_name_stay_separate():
    one, two = (lambda data: 1.0), (lambda data: 2.0)
    given = build_scorer(load_config(None, {"worker.reward.weights": (1.0, 10.0)}), 10, [one, two])
    assert len(given.functions) == 2
    close(given.submit(fake_rollouts([1]), 0).result().total, [21])


def test_as_many_weights_as_functions():
    with pytest.raises(ValueError, match=r"worker\.reward\.weights: 2 weights for 1 rewards \(half\)"):
        build_scorer(load_config(None, {"worker.reward.weights": (1.0, 10.0)}), 10, [half])


# ----------------------------------------------------------------------------------------------------- from the config
def test_built_ins_by_name():
    config = load_config(
        None,
        {
            "worker.reward.functions": ("accuracy", "format", "think_format", "length"),
            "worker.reward.weights": (4.0, 1.0, 1.0, 2.0),
            "worker.reward.soft_punish_cache": 2,
            "dataset.max_response_length": 4,
        },
    )
    rollouts = fake_rollouts([3, 4], group=[0, 1])
    prompts = tuple(replace(p, task=replace(p.task, answer="B")) for p in rollouts.prompts)
    text = ("<think>x</think><answer>B</answer>", "<think>x</think>C")
    given = build_scorer(config, 10)
    assert given.functions["accuracy"].function is accuracy
    rewards = given.submit(replace(rollouts, prompts=prompts, text=text), 0).result()
    close(torch.stack(list(rewards.parts.values())), [[1, 0], [1, 0], [1, 1], [-0.5, -1]])
    close(rewards.total, [5, -1])


@pytest.mark.parametrize(
    ("overrides", "schedule"),
    [
        ({}, [(0.0, (1.0, 1.0))]),
        ({"weights": (2.0, 1.0)}, [(0.0, (2.0, 1.0))]),
        ({"weights": (2.0, 1.0), "early_weights": (0.0, 1.0)}, [(0.0, (0.0, 1.0)), (0.1, (2.0, 1.0))]),
        ({"early_weights": (0.0, 1.0), "early_ratio": 0.25}, [(0.0, (0.0, 1.0)), (0.25, (1.0, 1.0))]),
        ({"early_weights": (0.0, 1.0), "early_ratio": 0.0}, [(0.0, (1.0, 1.0))]),
        ({"weight_schedule": ((0.0, (1.0, 0.0)), (0.3, (0.0, 1.0)))}, [(0.0, (1.0, 0.0)), (0.3, (0.0, 1.0))]),
    ],
)
def test_schedules_of_the_config(overrides, schedule):
    config = load_config(None, {f"worker.reward.{k}": v for k, v in overrides.items()})
    assert make_reward_schedule(config, len(config.reward_functions)) == schedule


def test_early_weights_last_for_the_warm_up():
    config = load_config(None, {"worker.reward.early_weights": (0.0, 1.0), "worker.actor.optim.warmup_ratio": 0.4})
    assert make_reward_schedule(config, 2) == [(0.0, (0.0, 1.0)), (0.4, (1.0, 1.0))]


# -------------------------------------------------------------------------------------------------------- at the start
ROWS = [
    {"prompt": "which?", "options": ["red", "green"], "answer": answer}
    for answer in ("A", 1, "green", "C", 2, "purple", ["A", "B"], None, "")
]


@pytest.mark.parametrize(
    ("rows", "functions", "said"),
    [
        (ROWS, ["accuracy"], "3 of the 9 rows checked .*row 4, 'C'"),
        (ROWS, ["format", "accuracy#2"], "3 of the 9 rows"),
        (ROWS, ["vgr_hard_negative"], "3 of the 9 rows"),
        (ROWS, ["format", "half"], None),
        (ROWS[:3], ["accuracy"], None),
        ([{"prompt": "which?", "answer": answer} for answer in ("A", 7, "purple", "AC", None)], ["accuracy"], None),
        ([{"prompt": "which?", "label_idx": index} for index in (0, 9, 10)], ["accuracy"], "1 of the 3 .*row 3, 10"),
        ([{"prompt": "which?", "answer": ["Paris", "paris"]}], ["accuracy"], "1 of the 1 rows"),
        (ROWS[3:4] * 5000, ["accuracy"], "1000 of the 1000 rows"),
    ],
)
def test_truths_that_no_response_could_match_are_reported(caplog, rows, functions, said):
    dataset = open_dataset([RowList(rows, "rows")], DataSettings(), None)
    warn_about_unmatched_answers(dataset, functions)
    messages = [record.getMessage() for record in caplog.records]
    assert not messages if said is None else len(messages) == 1 and re.search(said, messages[0])


def test_a_run_reports_it_at_its_start(tmp_path, caplog):
    config = load_config(None, {"training.output_dir": str(tmp_path), "worker.reward.functions": ("accuracy",)})
    rows = [{"prompt": "which?", "options": ["red", "green"], "answer": "C"}] * 4
    with build(config, data=rows).closing:
        assert "4 of the 4 rows checked have an answer that is none of their options" in caplog.text
