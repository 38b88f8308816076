"""SPEC 8, by hand: which numbers, over which tokens."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import INF, NAN, fake_experience, fake_prompt, fake_rollouts, make_mask, padded

from mtrl.algorithms.credit import assign, credit_metrics
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.groups import masked_mean
from mtrl.algorithms.metrics import (
    attention_metrics,
    learnt_metrics,
    length_metrics,
    masked_rate,
    mismatch_metrics,
    reward_metrics,
    sensitivity_metrics,
    signal_metrics,
    step_metrics,
    summary,
)
from mtrl.types import Rewards, Signals


def approx(expected):
    return pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_masked_mean_and_summary():
    assert masked_mean(padded([[1, 2], [6]], fill=NAN), make_mask(2, 1)) == approx(3)
    assert masked_mean(torch.ones(1, 2), make_mask(0, width=2)) == 0
    assert masked_rate(torch.tensor([True, False, False, False])) == 0.25
    assert masked_rate(torch.zeros(0, dtype=torch.bool)) == 0
    assert summary("x", torch.tensor([1.0, NAN, 4.0])) == {"x/mean": 2.5, "x/min": 1.0, "x/max": 4.0}
    assert summary("x", torch.tensor([NAN])) == {}


def test_reward_metrics():
    # Totals 1 3 | 2 2 | 0 (a group of one): mean 8/5; groups 1 and 2 have no spread: 2 of 3.
    # Accuracy 1 0 . 1 .: mean and success 2/3. A part that applies nowhere is not reported.
    rewards = Rewards(
        total=torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0]),
        parts={
            "accuracy": torch.tensor([1.0, 0.0, NAN, 1.0, NAN]),
            "length": torch.tensor([0.0, -1.0, -0.5, 0.0, 0.0]),
            "mdi": torch.full((5,), NAN),
        },
        failed=torch.tensor([False, False, True, False, False]),
    )
    assert reward_metrics(rewards, torch.tensor([0, 0, 1, 1, 2])) == approx(
        {
            "reward/overall": 1.6,
            "reward/failed": 0.2,
            "reward/accuracy": 2 / 3,
            "reward/length": -0.3,
            "reward/zero_std_groups": 2 / 3,
            "reward/success_rate": 2 / 3,
        }
    )


def test_success_is_a_full_score():
    # 0.5 is not a success; accuracy goes before math where it applies; without both there is no rate.
    def rate(**parts):
        total = torch.zeros(2)
        rewards = Rewards(total, {name: torch.tensor(part) for name, part in parts.items()}, total.bool())
        return reward_metrics(rewards, torch.tensor([0, 0])).get("reward/success_rate")

    assert rate(math=[0.5, 1.0]) == 0.5
    assert rate(math=[0.5, 1.0], accuracy=[1.0, 1.0]) == 1.0
    assert rate(math=[0.5, 1.0], accuracy=[NAN, NAN]) == 0.5
    assert rate(format=[1.0, 1.0]) is None and rate(math=[NAN, NAN]) is None


# Visual rows of 4 and 2 tokens, a text-only row of 4. Halves are kept: 2, 1 and 2 tokens.
ROLLOUTS = fake_rollouts([4, 2, 4], group=[0, 1, 2], visual=[True, True, False])
SIGNALS = Signals(
    dependency=padded([[1, 9, 2, 4], [5, 3], [7, 8, 9, 9]], fill=99.0),
    entropy=padded([[4, 1, 3, 2], [1, 2], [1, 4, 2, 3]], fill=99.0),
)


def compute_metrics(*rules, signals=SIGNALS, rollouts=ROLLOUTS):
    experience = fake_experience(rollouts, signals, torch.ones(rollouts.mask.shape))
    experience = replace(experience, credit=assign(rules, experience, (0, 0)))
    return sensitivity_metrics(signals, rollouts.mask, rollouts.visual) | credit_metrics(rules, experience)


SENSITIVITY = {
    # Row means of S: 4 and 4; the text-only row has none.
    "actor/sensitivity_score_mean": 4.0,
    "actor/sensitivity_score_min": 4.0,
    "actor/sensitivity_score_max": 4.0,
}


def test_perception_metrics_are_of_visual_tokens():
    # Kept: 9 and 4, 5: 3 of 6 visual tokens, mean 6. Not kept: 1, 2, 3: mean 2. The weakest kept: 4 and 5, mean 4.5.
    # All in all 3 + 4 of 10 tokens pass, the text-only row whole.
    assert compute_metrics(PerceptionFilter(0.5)) == approx(
        SENSITIVITY
        | {
            "actor/perception_token_fraction": 0.5,
            "actor/low_var_kl_mean_selected": 6.0,
            "actor/low_var_kl_mean_rejected": 2.0,
            "actor/low_var_kl_threshold": 4.5,
            "actor/combined_token_fraction": 0.7,
        }
    )


def test_entropy_metrics_are_of_all_tokens():
    # Of 4, 2 and 4 tokens 2, 1 and 2: 5 of 10.
    metrics = compute_metrics(EntropyFilter(0.5), signals=Signals(entropy=SIGNALS.entropy))
    assert metrics == approx({"actor/entropy_token_fraction": 0.5, "actor/combined_token_fraction": 0.5})


def test_the_combined_fraction_is_of_the_union():
    # Row 0: S keeps 1, 3 and entropy 0, 2: all four. Row 1: 0 and 1: both. Row 2: entropy alone, 2 of 4. 8 of 10.
    metrics = compute_metrics(PerceptionFilter(0.5), EntropyFilter(0.5))
    assert metrics["actor/combined_token_fraction"] == approx(0.8)


def test_without_rejected_tokens_there_is_no_mean():
    metrics = compute_metrics(PerceptionFilter(1.0))
    assert "actor/low_var_kl_mean_rejected" not in metrics
    assert metrics["actor/low_var_kl_mean_selected"] == approx(4.0)


def test_without_images_or_switches_there_is_nothing_to_report():
    assert compute_metrics(signals=Signals()) == {}
    text_only = fake_rollouts([4, 2, 4], visual=[False])
    metrics = compute_metrics(PerceptionFilter(0.5), TrajectoryScaling(), rollouts=text_only)
    assert metrics == approx({"actor/combined_token_fraction": 1.0})


def test_scaling_metrics():
    # Scores 0, 1, 4 and a text-only row: w = 0.8, 0.92, 1.28, mean 1: not capped.
    rollouts = fake_rollouts([1, 1, 1, 1], group=[0, 1, 2, 3], visual=[True, True, True, False])
    signals = Signals(dependency=torch.tensor([[0.0], [1.0], [4.0], [50.0]]))
    assert compute_metrics(TrajectoryScaling(), signals=signals, rollouts=rollouts) == approx(
        {
            "actor/sensitivity_score_mean": 5 / 3,
            "actor/sensitivity_score_min": 0.0,
            "actor/sensitivity_score_max": 4.0,
            "actor/scaling_factor_mean": 1.0,
            "actor/scaling_factor_max": 1.28,
            "actor/scaling_capped": 0.0,
        }
    )
    # A cap of 1.2: w = 0.8, 0.9, 1.2, mean 2.9/3.
    capped = compute_metrics(TrajectoryScaling(trajectory_scaling_max=1.2), signals=signals, rollouts=rollouts)
    assert capped["actor/scaling_factor_mean"] == approx(2.9 / 3)
    assert capped["actor/scaling_factor_max"] == approx(1.2)
    assert capped["actor/scaling_capped"] == 1.0
    # The mean of these float32 numbers is taken in float64: in float32 its rounding might pass for a cap.
    factors = (
        TrajectoryScaling(trajectory_scaling_max=1.2)
        .scale(signals.dependency, rollouts.mask, rollouts.visual)[:3]
        .tolist()
    )
    assert capped["actor/scaling_factor_mean"] == pytest.approx(math.fsum(factors) / 3, rel=1e-12)


def test_signals_of_rules_are_averaged_over_the_tokens_of_responses_with_an_image():
    # Tokens 1 3 and 5 of responses with an image: mean 3; the text response has 0s. Another view: all four tokens, 9/4.
    rollouts = fake_rollouts([2, 1, 1], group=[0, 1, 2], visual=[True, True, False])
    values = padded([[1.0, 3.0], [5.0], [0.0]], fill=NAN)
    signals = Signals(image_share=values, extra={"jsd@none": values})
    assert signal_metrics(signals, rollouts.mask, rollouts.visual) == {
        "signal/image_share": 3.0, "signal/jsd@none": 2.25,
    }  # fmt: skip
    texts = fake_rollouts([2], visual=[False])
    assert signal_metrics(Signals(image_share=torch.zeros(1, 2)), texts.mask, texts.visual) == {}


def test_mismatch_metrics():
    # o - b = 0.3, -0.1, 0.1: mean of |.| = 1/6, max 0.3. KL(b || o) is the mean of b - o = -0.1.
    old = padded([[-1, -1], [-2]], fill=INF)
    behaviour = padded([[-1.3, -0.9], [-2.1]], fill=-5.0)
    mask = make_mask(2, 1)
    # Ratios e^0.3, e^-0.1, e^0.1: the square of their sum over three times the sum of their squares.
    ratios = [math.exp(gap) for gap in (0.3, -0.1, 0.1)]
    share = sum(ratios) ** 2 / (3 * sum(ratio**2 for ratio in ratios))
    found = mismatch_metrics(old, behaviour, mask, cut=False)
    assert 0.97 < share < 0.98 and found["rollout/logprob_gap_ess"] == pytest.approx(share, rel=1e-6)
    assert found == pytest.approx(
        {
            "rollout/logprob_gap_mean": 0.5 / 3,
            "rollout/logprob_gap_max": 0.3,
            "rollout/logprob_gap_kl": -0.1,
            "rollout/logprob_gap_ess": share,
        },
        rel=1e-5,
    )
    assert set(mismatch_metrics(old, behaviour, mask, cut=True)) == {
        "rollout/logprob_gap_cut_mean",
        "rollout/logprob_gap_cut_max",
        "rollout/logprob_gap_cut_kl",
        "rollout/logprob_gap_cut_ess",
    }


def test_with_a_cut_the_gap_is_measured_on_the_support():
    """An exact sampler's log-probs are higher by minus the log of the trainer's mass on the support."""
    old, support = padded([[-1, -2], [-2]]), padded([[-0.5, 0.0], [-0.25]])
    rollouts = replace(fake_rollouts([2, 1]), rollout_logprobs=old - support)
    cases = {True: Signals(old_logprobs=old, support=support), False: Signals(old_logprobs=old)}
    found = {cut: step_metrics(fake_experience(rollouts, cases[cut]), cut=True) for cut in cases}
    assert found[True]["rollout/logprob_gap_max"] == 0.0 and found[True]["rollout/logprob_gap_ess"] == 1.0
    assert found[True]["rollout/logprob_gap_cut_mean"] == found[False]["rollout/logprob_gap_cut_mean"] == approx(0.25)
    assert "rollout/logprob_gap_max" not in found[False], "it was not measured"
    learnt = learnt_metrics({"logprob_gap_mean": 1.0, "support_gap_mean": 2.0, "entropy": 3.0}, cut=True)
    assert learnt == {"rollout/logprob_gap_cut_mean": 1.0, "rollout/logprob_gap_mean": 2.0, "actor/entropy": 3.0}


def test_mismatch_metrics_of_an_empty_batch():
    metrics = mismatch_metrics(torch.ones(1, 2), torch.zeros(1, 2), make_mask(0, width=2), cut=False)
    assert list(metrics.values()) == [0, 0, 0, 1]


def test_length_metrics():
    assert length_metrics(make_mask(1, 2, 6), torch.tensor([False, False, True])) == approx(
        {
            "response_length/mean": 3.0,
            "response_length/min": 1.0,
            "response_length/max": 6.0,
            "response_length/truncated": 1 / 3,
        }
    )


def test_attention_metrics():
    # Row 0: tokens (0.4, 0.1) and (0.2, 0.7), pools of 1: means 0.3, 0.4: VGR 3/4, AEI (3/7)/(1/2) = 6/7 and 8/7.
    # Row 1: one token (0.2, 0.1), pools 2 and 4: VGR 0.1/0.025 = 4, AEI (2/3)/(1/3) = 2 and (1/3)/(2/3) = 1/2.
    # Row 2 has no vision: in no mean. The late segment is twice as much on text in every token of row 1: VGR 8.
    early = torch.tensor([[[0.4, 0.1], [0.2, 0.7]], [[0.2, 0.1], [NAN, NAN]], [[0.9, 0.0], [0.9, 0.0]]])
    mass = early[:, :, None, :].repeat(1, 1, 5, 1)
    mass[1, :, 2, 0] *= 2
    prompt_mass = early[:, 0, None].repeat(1, 5, 1)  # row 0: VGR 4, row 1: VGR 4
    metrics = attention_metrics(
        Signals(attention_mass=mass, prompt_attention_mass=prompt_mass), seen([(1, 1), (2, 4), (3, 0)], [2, 1, 2])
    )
    assert len(metrics) == 25  # three numbers, four segments, two phases; and the distance from balance
    for segment in ("early", "middle", "all"):
        assert metrics[f"attention/vgr_{segment}"] == approx((0.75 + 4) / 2)
        assert metrics[f"attention/aei_text_{segment}"] == approx((6 / 7 + 2) / 2)
        assert metrics[f"attention/aei_vision_{segment}"] == approx((8 / 7 + 1 / 2) / 2)
        assert metrics[f"attention/prompt_vgr_{segment}"] == approx(4)
    assert metrics["attention/vgr_late"] == approx((0.75 + 8) / 2)
    assert metrics["attention/imbalance_late"] == approx((-math.log(0.75) + math.log(8)) / 2)


def seen(sizes, lengths):
    """A prompt for each row, with so many tokens in its text and its vision pool."""
    rollouts = fake_rollouts(lengths, group=list(range(len(sizes))))
    prompts = tuple(fake_prompt(f"p{i}", vision > 0, text, vision) for i, (text, vision) in enumerate(sizes))
    return replace(rollouts, prompts=prompts)


def test_attention_metrics_without_any_image():
    mass = torch.full((1, 2, 5, 2), 0.25)
    assert attention_metrics(Signals(attention_mass=mass, prompt_attention_mass=mass[:, 0]), seen([(3, 0)], [2])) == {}
    assert attention_metrics(Signals(), seen([(3, 1)], [2])) == {}


def test_metrics_are_plain_finite_numbers():
    for value in compute_metrics(PerceptionFilter(0.5), EntropyFilter(0.5), TrajectoryScaling()).values():
        assert isinstance(value, float)
        assert math.isfinite(value)
