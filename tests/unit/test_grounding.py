"""Attention from the probes to rewards, weights and metrics: groups computed by hand, including degenerate ones."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from helpers import NAN, close, fake_experience, fake_prompt, fake_rollouts, make_mask, same

from mtrl.algorithms.advantages import grpo
from mtrl.algorithms.credit import assign
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.compose.algorithm import make_algorithm
from mtrl.compose.reward_scorer import build_scorer
from mtrl.config import ConfigError, load_config
from mtrl.rewards.samples import signal_lists
from mtrl.rewards.sandbox import InProcess
from mtrl.training.validation import add_scores
from mtrl.types import SEGMENTS, Needs, Rewards, Signals

KEY = (0, 0)  # no rule here draws random numbers
TEXT, VISION = 2, 4  # tokens in the pools of a prompt: equal density is a mass of 1/3 to 2/3


def looks(vgr_by_row, lengths=None, late_only=True):
    """Signals whose sequences have these VGRs in the late layers (NaN: a row without an image), and 1 elsewhere."""
    lengths = lengths or [1] * len(vgr_by_row)
    mass = torch.zeros(len(lengths), max(lengths), len(SEGMENTS), 2)
    for row, value in enumerate(vgr_by_row):
        for place, name in enumerate(SEGMENTS):
            ratio = 1.0 if math.isnan(value) or (late_only and name != "late") else value
            text = ratio / (2 + ratio)  # text/2 over vision/4 is the ratio, and both add up to 1
            mass[row, :, place] = torch.tensor([text, 1 - text])
    return Signals(attention_mass=mass, prompt_attention_mass=mass[:, 0])


def rows(vgr_by_row, group, answers=None, lengths=None):
    rollouts = fake_rollouts(lengths or [1] * len(group), group=group)
    blind = {g for value, g in zip(vgr_by_row, group, strict=True) if math.isnan(value)}
    prompts = [fake_prompt(f"p{g}", g not in blind, TEXT, VISION) for g in range(max(group) + 1)]
    prompts = [replace(p, task=replace(p.task, answer="A")) for p in prompts]
    text = tuple(f"<answer>{letter}</answer>" for letter in answers or "A" * len(group))
    return replace(rollouts, prompts=tuple(prompts), text=text)


def reward_description(functions, vgr_by_row, group, answers=None, **overrides):
    settings = {"worker.reward.functions": functions} | overrides
    scorer = build_scorer(load_config(None, settings), 10)
    rollouts = rows(vgr_by_row, group, answers)
    return scorer.submit(rollouts, 0).result(looks(vgr_by_row))


# --------------------------------------------------------------------------------------------------------- what is told
def test_functions_get_the_vgr_of_tokens_and_responses():
    rollouts = rows([4.0, NAN], [0, 1], lengths=[2, 1])
    told = signal_lists(rollouts, looks([4.0, NAN], [2, 1]))
    assert told[0]["vgr_late"] == pytest.approx(4) and told[0]["vgr_early"] == pytest.approx(1)
    assert told[0]["vgr"] == pytest.approx([1, 1])  # over all layers
    assert not {key for key in told[1] if key.startswith("vgr")}, "no image: not applicable"
    assert signal_lists(rollouts, None) == [{}, {}]


# -------------------------------------------------------------------------------------------------------------- rewards
def test_mdi_rewards_balance_by_the_late_layers():
    root = math.sqrt(2)
    values = [1.0, root, 2.0, 9.0, NAN]
    close(reward_description(("mdi",), values, [0, 0, 0, 0, 1]).parts["mdi"], [1, 0, -1, -1, NAN], atol=1e-5)
    wide = reward_description(("mdi",), values, [0, 0, 0, 0, 1], **{"worker.reward.mdi_balance_ratio": 4.0})
    close(wide.parts["mdi"], [1, 0.5, 0, -1, NAN], atol=1e-5)


def test_vgr_compares_within_the_real_groups():
    """0, 1, 2, 3, 4 have quartiles 1 and 3; the other group has one value, the third no spread, the last no image."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 2.0, 2.0, NAN, NAN]
    group = [0, 0, 0, 0, 0, 1, 2, 2, 3, 3]
    found = reward_description(("vgr",), values, group).parts["vgr"]
    close(found, [1, 1, 0.5, 0, 0, 0.5, 0.5, 0.5, NAN, NAN], atol=1e-5)
    mad = reward_description(("vgr",), values, group, **{"worker.reward.vgr_normalizer": "mad"}).parts["vgr"]
    deviation = 1.4826  # the median distance to the median 3 is 1
    expected = [0.5 * math.tanh((3 - v) / deviation) for v in (1, 2, 3, 4, 5)]
    close(mad, [*expected, 0, 0, 0, NAN, NAN], atol=1e-5)


@pytest.mark.parametrize(("dtype", "ranked"), [("fp32", True), ("bf16", False)])
def test_vgr_knows_the_precision_that_attention_is_computed_in(dtype, ranked):
    """Two of eight responses 3e-3 above the others: rounding of bf16, and a difference in float32."""
    values, options = [1.5] * 6 + [1.504] * 2, {"worker.actor.fsdp.mixed_precision_dtype": dtype}
    found = reward_description(("vgr", "vgr_hard_negative"), values, [0] * 8, "A" * 8, **options).parts
    close(found["vgr"], [1] * 6 + [0] * 2 if ranked else [0.5] * 8, atol=1e-2)
    close(found["vgr_hard_negative"], [0.5] * 6 + [-0.5] * 2 if ranked else [0] * 8, atol=1e-2)


@pytest.mark.parametrize(
    ("pool", "answers", "expected"),
    [
        ("correct", "AABAB", [0.5, 0, 0, -0.5, 0]),  # among 1, 2, 4: quartiles 1.5 and 3
        ("group", "AABAB", [0.5, 0.5, 0, -0.5, 0]),  # among 1..5: quartiles 2 and 4
        ("correct", "BBBBB", [0, 0, 0, 0, 0]),  # all wrong
        ("correct", "BBABB", [0, 0, 0, 0, 0]),  # only one is correct, so there is no comparison
        ("group", "BBABB", [0, 0, 0, 0, 0]),  # the middle one
    ],
)
def test_hard_negatives_need_no_accuracy_in_the_list(pool, answers, expected):
    options = {"worker.reward.vgr_hard_negative_pool": pool}
    rewards = reward_description(("vgr_hard_negative",), [1.0, 2.0, 3.0, 4.0, 5.0], [0] * 5, answers, **options)
    middle = (3 - 2) / 1.5 - 0.5  # score of 2 among 1, 2, 4
    expected = [middle if pool == "correct" and answers == "AABAB" and i == 1 else e for i, e in enumerate(expected)]
    close(rewards.parts["vgr_hard_negative"], expected, atol=1e-5)
    assert list(rewards.parts) == ["vgr_hard_negative"]


def test_the_parts_are_weighed_together_and_a_missing_one_is_left_out():
    weights = {"worker.reward.weights": (4.0, 1.0), "worker.reward.normalize": "sum_then_normalize"}
    rewards = reward_description(("accuracy", "mdi"), [1.0, 2.0, NAN], [0, 0, 1], "ABA", **weights)
    close(rewards.total, [4 + 1, 0 - 1, 4], atol=1e-5)


def test_without_attention_they_do_not_apply():
    scorer = build_scorer(load_config(None, {"worker.reward.functions": ("accuracy", "vgr")}), 10)
    rewards = scorer.submit(rows([1.0, 2.0], [0, 0]), None).result(None)
    assert rewards.parts["vgr"].isnan().all()
    close(rewards.total, [1, 1])


# -------------------------------------------------------------------------------------------------------- token weights
def weighed(values, lengths, group, **weighting):
    """Tokens of different VGR: row r, token t has the value values[r][t], in every segment."""
    rollouts = rows([1.0 if row else NAN for row in values], group, lengths=lengths)
    signals = looks([1.0] * len(lengths), lengths, late_only=False)
    for row, tokens in enumerate(values):
        for t, ratio in enumerate(tokens or []):
            signals.attention_mass[row, t] = torch.tensor([ratio / (2 + ratio), 2 / (2 + ratio)])
    return AttentionWeights(**weighting).apply(fake_experience(rollouts, signals), KEY)


def test_tokens_with_more_vision_attention_weigh_more():
    """1/VGR of 1, 2, 4 is 1, 1/2, 1/4, mean 7/12: 12/7, 6/7, 3/7. A row without an image gets ones."""
    found = weighed([[1.0, 2.0, 4.0], None], [3, 2], [0, 1])
    close(found, [[12 / 7, 6 / 7, 3 / 7], [1, 1, 1]], atol=1e-5)
    close(weighed([[1.0, 2.0, 4.0]], [3], [0], token_weight_clip=(0.5, 1.5)), [[1.5, 6 / 7, 0.5]], atol=1e-5)
    close(weighed([[1.0, 2.0, 4.0]], [3], [0], token_weight_top_ratio=0.3), [[12 / 7, 1, 1]], atol=1e-5)


def test_weights_of_a_reward_function_win():
    supplied = torch.full((1, 3), 2.0)
    rollouts, signals = rows([1.0], [0], lengths=[3]), looks([4.0], [3])
    experience = fake_experience(rollouts, signals, torch.ones(1, 3), token_weights=supplied)
    assert assign([AttentionWeights()], experience, KEY).weights is supplied
    assert assign([], experience, KEY).weights is None


@pytest.mark.parametrize("target", ["advantage", "mask"])
def test_weights_of_one_are_bitwise_plain_grpo(target):
    """Equal attention everywhere: 1/VGR over its mean is exactly 1."""
    lengths, group = [3, 2, 3, 1], [0, 0, 1, 1]
    rollouts = rows([3.0] * 4, group, lengths=lengths)
    signals = looks([3.0] * 4, lengths, late_only=False)
    mask = make_mask(*lengths)
    advantage = grpo(torch.tensor([1.0, 0.3, 0.0, 2.0]), torch.tensor(group), mask, "group")
    experience = fake_experience(rollouts, signals, advantage)
    ours, plain = assign([AttentionWeights(token_weight_target=target)], experience, KEY), assign([], experience, KEY)
    assert ours.weights is not None
    for name in ("advantage", "keep_mask", "token_weight", "response_weight"):
        same(getattr(ours, name), getattr(plain, name))


# ------------------------------------------------------------------------------------------------------ when it is read
@pytest.mark.parametrize(
    ("overrides", "every"),
    [
        ({}, 10),
        ({"optimization.compute_attention_metrics": True}, 1),
        ({"optimization.compute_attention_metrics": False}, 0),
        ({"worker.reward.functions": ("accuracy", "mdi")}, 1),
        ({"worker.reward.functions": ("vgr_hard_negative",)}, 1),
        ({"optimization.enable_token_weights": True}, 1),
    ],
)
def test_attention_is_read_where_it_is_needed(overrides, every):
    config = load_config(None, overrides)
    rewards = [function.needs for function in build_scorer(config, 10).functions.values()]
    assert make_algorithm(config, 30, rewards=rewards).attention_every == every


def test_a_function_that_reads_signals_gets_attention_at_every_step():
    function = InProcess(lambda data, signals: 1.0, {})
    rules = make_algorithm(load_config(None, {}), 30, rewards=[Needs(), function.needs])
    assert all("attention_mass" in rules.needs_at(step) for step in range(30))


def test_a_segment_without_layers_is_not_reported():
    """A model of two layers has no late third: no reward by it, and the other segments stay."""
    rollouts, signals = rows([4.0], [0]), looks([4.0])
    signals.attention_mass[:, :, SEGMENTS.index("late")] = NAN
    told = signal_lists(rollouts, signals)[0]
    assert told.keys() == {"vgr", "vgr_early", "vgr_middle", "vgr_all"}
    scorer = build_scorer(load_config(None, {"worker.reward.functions": ["mdi"]}), 10)
    assert scorer.submit(rollouts, 0).result(signals).parts["mdi"].isnan().all()


def test_now_and_then_is_every_tenth_step():
    rules = make_algorithm(load_config(None, {"optimization.disable_divergence": True}), 30)
    assert [step + 1 for step in range(30) if "attention_mass" in rules.needs_at(step)] == [10, 20, 30]
    assert rules.needs_at(0) == Needs(), "fresh rollouts, one optimizer step, no needs: no probe at all"
    assert "attention_mass" not in make_algorithm(load_config(None, {}), 30, can_read_attention=False).needs_at(9)


def test_an_impossible_reward_is_an_error():
    with pytest.raises(ConfigError, match="set compute_attention_metrics to auto"):
        overrides = {"optimization.compute_attention_metrics": False, "worker.reward.functions": ("mdi",)}
        load_config(None, overrides)


def test_validation_collects_applicable_values():
    scores = defaultdict(list)
    rewards = Rewards(torch.ones(2), {}, torch.zeros(2, dtype=torch.bool))
    add_scores(scores, rows([2.0, NAN], [0, 1]), rewards, looks([2.0, NAN]))
    assert scores["attention/vgr_late"] == pytest.approx([2.0])
    assert scores["attention/imbalance_late"] == pytest.approx([math.log(2)])
