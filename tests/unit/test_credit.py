"""SPEC 1.3 (token filtering), 1.4 (trajectory scaling), 2.1 (token weights), 2.2 (their order), by hand."""

import math

import pytest
import torch
from helpers import INF, NAN, close, fake_experience, fake_rollouts, make_mask, padded, same

from mtrl.algorithms.credit import assign, combine_filters
from mtrl.algorithms.credit.attention_weights import AttentionWeights, gaussian_smooth
from mtrl.algorithms.credit.entropy_change import EntropyChange
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.groups import top_fraction
from mtrl.types import Needs, Signals

VISUAL, TEXT_ONLY = True, False
KEY = (0, 0)  # no rule here draws random numbers


def bits(rows):
    return torch.tensor(rows, dtype=torch.bool)


# ---- how many tokens, and which ----


@pytest.mark.parametrize(
    ("p", "n", "k"),
    [
        (0.3, 50, 15),  # 15.000001 in float32
        (0.6, 25, 15),  # 15.000001 in float32
        (0.2, 5, 1),
        (0.1, 30, 3),
        (0.07, 100, 7),  # 7.000000000000001 in float64
        (0.28, 25, 7),  # 7.000000000000001 in float64
        (0.29, 100, 29),  # 28.999999999999996 in float64
        (0.2, 6, 2),  # ceil(1.2)
        (0.4, 7, 3),  # ceil(2.8)
        (0.2, 11, 3),  # ceil(2.2)
        (0.5, 3, 2),  # ceil(1.5)
        (0.2, 1, 1),
        (0.4, 1, 1),
        (0.001, 3, 1),
        (0.0, 4, 1),  # at least one
        (1.0, 7, 7),
    ],
)
def test_exactly_k_tokens_are_kept(p, n, k):
    score = torch.arange(n, dtype=torch.float32)[None]  # rising: the last k have the highest scores
    kept = top_fraction(score, make_mask(n), p)[0]
    assert kept.tolist() == [False] * (n - k) + [True] * k


def test_highest_scores_are_kept_and_ties_go_to_the_earlier_token():
    # n = 6, p = 0.5: k = 3. Scores 1 5 3 5 3 3: both fives, then the first of the threes.
    score = torch.tensor([[1.0, 5.0, 3.0, 5.0, 3.0, 3.0]])
    same(top_fraction(score, make_mask(6), 0.5), bits([[0, 1, 1, 1, 0, 0]]))
    # All equal: the first ones.
    same(top_fraction(torch.zeros(1, 5), make_mask(5), 0.4), bits([[1, 1, 0, 0, 0]]))


def test_padding_is_never_kept():
    # Row lengths 2, 4, 0 and p = 0.5: k = 1, 2, 0. High scores in the padding count for nothing.
    score = padded([[1, 2], [4, 1, 3, 2], []], fill=9.0)
    same(top_fraction(score, make_mask(2, 4, 0), 0.5), bits([[0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]))


def test_a_missing_signal_is_named():
    with pytest.raises(AssertionError, match="signal"):
        top_fraction(None, make_mask(2), 0.5)
    with pytest.raises(AssertionError, match="needs S"):
        TrajectoryScaling().scale(None, make_mask(2), torch.tensor([True]))
    with pytest.raises(AssertionError, match="signal"):
        EntropyChange().apply(fake_experience(ROLLOUTS), KEY)


# Three rows: two with an image (4 and 2 tokens), one without (3 tokens). p = 0.25 keeps 1, 1 and 1.
MASK = make_mask(4, 2, 3)
ROLLOUTS = fake_rollouts([4, 2, 3], group=[0, 1, 2], visual=[VISUAL, VISUAL, TEXT_ONLY])
SIGNALS = Signals(
    dependency=padded([[1, 9, 2, 3], [5, 4], [7, 8, 9]]),
    entropy=padded([[1, 2, 3, 4], [1, 2], [3, 1, 2]]),
)


def selected(*rules):
    return combine_filters(rules, fake_experience(ROLLOUTS, SIGNALS), KEY)


def test_no_filter_keeps_every_valid_token():
    same(selected(), MASK)


def test_perception_filter_leaves_text_only_rows_whole():
    same(selected(PerceptionFilter(0.25)), bits([[0, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]))


def test_entropy_filter_judges_every_row():
    same(selected(EntropyFilter(0.25)), bits([[0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0]]))


def test_both_filters_are_a_union_and_entropy_alone_decides_without_an_image():
    both = selected(PerceptionFilter(0.25), EntropyFilter(0.25))
    same(both, bits([[0, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0]]))
    same(selected(EntropyFilter(0.25), PerceptionFilter(0.25)), both)


def test_each_filter_has_its_own_p():
    # Row 0, n = 4: perception 0.5 keeps 2 (scores 9, 3), entropy 0.25 keeps 1 (the last).
    same(selected(PerceptionFilter(0.5), EntropyFilter(0.25))[0], bits([0, 1, 0, 1]))
    same(selected(PerceptionFilter(0.25), EntropyFilter(0.5))[0], bits([0, 1, 1, 1]))


# ---- trajectory advantage shaping ----


def apply_scaling(scores, scaling=None, visual=None):
    """One-token responses: the score of a response is its only S."""
    dependency = torch.tensor(scores, dtype=torch.float32)[:, None]
    visual = torch.ones(len(scores), dtype=torch.bool) if visual is None else torch.tensor(visual)
    return (scaling or TrajectoryScaling()).scale(dependency, make_mask(*[1] * len(scores)), visual)


def test_scale_by_hand():
    # s = 0, 1, 4: u = 0, 1/4, 1; mean u = 5/12; beta_max = 0.8 + 0.2 * 12/5 = 1.28.
    # w = 0.8, 0.8 + 0.48/4 = 0.92, 1.28; their mean is 3/3 = 1.
    close(apply_scaling([0, 1, 4]), [0.8, 0.92, 1.28])
    # The same from 0.9: beta_max = 0.9 + 0.1 * 12/5 = 1.14, w = 0.9, 0.96, 1.14.
    close(apply_scaling([0, 1, 4], TrajectoryScaling(trajectory_scaling_min=0.9)), [0.9, 0.96, 1.14])
    # u does not change with a shift or a factor of s.
    close(apply_scaling([2, 2.5, 4]), [0.8, 0.92, 1.28])
    assert apply_scaling([0, 1, 4]).dtype == torch.float32


def test_the_score_of_a_response_is_its_mean_over_valid_tokens():
    # s = (0 + 0)/2 = 0, (1 + 2 + 0)/3 = 1, 4/1 = 4: as above. Sums would give 0, 3, 4; the padding holds 9.
    dependency = padded([[0, 0], [1, 2, 0], [4]], fill=9.0)
    scale = TrajectoryScaling().scale(dependency, make_mask(2, 3, 1), torch.ones(3, dtype=torch.bool))
    close(scale, [0.8, 0.92, 1.28])


def test_the_cap_binds():
    # u = 0 nine times and 1: mean 1/10, beta_max = 0.8 + 0.2 * 10 = 2.8, capped at 2. w = 0.8 (x 9) and 2: mean 0.92.
    scores = [0] * 9 + [1]
    close(apply_scaling(scores), [0.8] * 9 + [2.0])
    close(apply_scaling(scores, TrajectoryScaling(trajectory_scaling_max=1.5)), [0.8] * 9 + [1.5])


def test_the_cap_moves_everyone_in_between():
    # u = 0 x 8, 1/2, 1: mean 0.15, uncapped 0.8 + 0.2/0.15 = 2.13 -> 2; the middle one gets 0.8 + 1.2/2 = 1.4.
    close(apply_scaling([0] * 8 + [1, 2]), [0.8] * 8 + [1.4, 2.0])


def test_no_cap():
    # As above, uncapped: 2.8, and the mean is (9 * 0.8 + 2.8)/10 = 1. One of 2048 gets 0.8 + 0.2 * 2048 = 410.4.
    close(apply_scaling([0] * 9 + [1], TrajectoryScaling(trajectory_scaling_max=None)), [0.8] * 9 + [2.8])
    close(apply_scaling([0] * 2047 + [1], TrajectoryScaling(trajectory_scaling_max=None))[-1], 410.4)


def test_a_flat_range_scales_nothing():
    close(apply_scaling([3, 3, 3]), [1, 1, 1])
    close(apply_scaling([0, 9e-7]), [1, 1])
    close(apply_scaling([5]), [1])
    # A range just above 1e-6 is a range: u = 0, 1, mean 1/2, beta_max = 0.8 + 0.2 * 2 = 1.2.
    close(apply_scaling([0, 1.1e-6]), [0.8, 1.2])


def test_text_only_rows_are_left_out_of_minimum_maximum_and_mean():
    # Rows 0, 1, 4 as above; text-only rows of 100, -100 and 2 change nothing and keep 1.
    visual = [VISUAL, TEXT_ONLY, VISUAL, TEXT_ONLY, VISUAL, TEXT_ONLY]
    close(apply_scaling([0, 100, 1, -100, 4, 2], visual=visual), [0.8, 1, 0.92, 1, 1.28, 1])
    close(apply_scaling([0, 1, 4], visual=[TEXT_ONLY] * 3), [1, 1, 1])


def test_a_fully_masked_row_is_no_minimum():
    # s = 1 and 3 (u = 0, 1: w = 0.8, 1.2); the empty row's 0 would be the minimum if it counted.
    dependency = torch.tensor([[1.0], [3.0], [0.0]])
    scale = TrajectoryScaling().scale(dependency, make_mask(1, 1, 0), torch.ones(3, dtype=torch.bool))
    close(scale, [0.8, 1.2, 1])


# ---- token weights ----


def apply_weights(vision, rule=None, text=0.2, sizes=(1, 1), mask=None):
    """v from the vision mass of each token and a constant text mass."""
    vision = padded(vision)
    mass = torch.stack([torch.full_like(vision, text), vision], dim=-1)
    mask = make_mask(*[vision.shape[1]] * len(vision)) if mask is None else mask
    return (rule or AttentionWeights()).weights(mass, torch.tensor([sizes] * len(vision)), mask)


def test_weights_are_one_over_vgr_with_mean_one():
    # 1/VGR = A_O/A_T = 1, 2, 3 (pools of equal size); mean 2: v = 1/2, 1, 3/2. (VGR itself would fall.)
    close(apply_weights([[0.2, 0.4, 0.6]]), [[0.5, 1.0, 1.5]])
    # Pool sizes are a common factor of the response, gone in the mean: 1/VGR = (A_O/8) / (A_T/2).
    close(apply_weights([[0.2, 0.4, 0.6]], sizes=(2, 8)), [[0.5, 1.0, 1.5]])
    assert apply_weights([[0.2, 0.4, 0.6]]).dtype == torch.float32


def test_weights_follow_both_masses():
    # A_O/A_T = (0.1/0.1, 0.1/0.2, 0.1/0.4) = 1, 1/2, 1/4; mean 7/12: v = 12/7, 6/7, 3/7.
    mass = torch.tensor([[[0.1, 0.1], [0.2, 0.1], [0.4, 0.1]]])
    close(AttentionWeights().weights(mass, torch.tensor([[3, 5]]), make_mask(3)), [[12 / 7, 6 / 7, 3 / 7]])


def test_each_response_has_its_own_mean_and_its_padding_is_one():
    # Row 0: ratios 1, 2, 3. Row 1, two tokens: ratios 1, 3; mean 2: 1/2, 3/2. Row 2, one token: 1. Row 3: none.
    mask = make_mask(3, 2, 1, 0)
    vision = [[0.2, 0.4, 0.6], [0.2, 0.6, 99.0], [0.7, NAN, INF], [0.5, 0.1, 0.2]]
    close(apply_weights(vision, mask=mask), [[0.5, 1, 1.5], [0.5, 1.5, 1], [1, 1, 1], [1, 1, 1]])


def test_weights_are_clipped_after_the_mean():
    close(apply_weights([[0.2, 0.4, 0.6]], AttentionWeights(token_weight_clip=(0.8, 1.2))), [[0.8, 1.0, 1.2]])
    # Default (0.2, 3): ratios 0.05 (x 7) and 9.65 have mean 10/8 = 1.25: 0.04 -> 0.2 and 7.72 -> 3.
    close(apply_weights([[0.01] * 7 + [1.93]]), [[0.2] * 7 + [3.0]])


def test_tokens_outside_the_top_ratio_get_one():
    # Ratios 1 .. 5, mean 3: v = 1/3 .. 5/3. r = 0.4 keeps ceil(2) = 2 of them.
    vision = [[0.2, 0.4, 0.6, 0.8, 1.0]]
    close(apply_weights(vision, AttentionWeights(token_weight_top_ratio=0.4)), [[1, 1, 1, 4 / 3, 5 / 3]])
    # r = 0.2 keeps the last. The clip must not make a tie of it with its neighbour.
    close(
        apply_weights(vision, AttentionWeights(token_weight_top_ratio=0.2, token_weight_clip=(0.2, 1.2))),
        [[1, 1, 1, 1, 1.2]],
    )
    # r = 1 keeps all.
    close(apply_weights(vision, AttentionWeights(token_weight_top_ratio=1.0)), [[1 / 3, 2 / 3, 1, 4 / 3, 5 / 3]])


def test_the_top_ratio_counts_valid_tokens():
    # Two valid tokens of five: ratios 1, 3, mean 2; r = 0.5 keeps one of two.
    close(
        apply_weights([[0.2, 0.6, 9, 9, 9]], AttentionWeights(token_weight_top_ratio=0.5), mask=make_mask(2, width=5)),
        [[1, 1.5, 1, 1, 1]],
    )


def test_without_vision_or_text_all_weights_are_one():
    close(apply_weights([[0.2, 0.4, 0.6]], sizes=(4, 0)), [[1, 1, 1]])
    close(apply_weights([[0.2, 0.4, 0.6]], sizes=(0, 4)), [[1, 1, 1]])


# With sigma² = 1/(2 ln 2) the Gaussian is 2^-(k²): 1, 1/2, 1/16, 1/512, and 3 sigma = 2.55, so its radius is 3.
# Its sum is 1 + 2 * (256 + 32 + 1)/512 = 545/256. Multiples of 1/1090 = 1/512 / (545/256): 512, 256, 32, 1.
HALVING_SIGMA = 1 / math.sqrt(2 * math.log(2))


def test_smoothing_by_hand():
    impulse = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 0], dtype=torch.float64)
    close(gaussian_smooth(impulse, HALVING_SIGMA), torch.tensor([0, 1, 32, 256, 512, 256, 32, 1, 0]) / 1090)


def test_smoothing_replicates_the_edges():
    # x = 1 0 0 0 0, seen as .. 1 1 1 [1 0 0 0 0] 0 0 0 ..: token 0 gets 512 + 256 + 32 + 1 = 801, token 1 the three
    # beyond and at the edge, 256 + 32 + 1 = 289, token 2 32 + 1 = 33, token 3 1, token 4 nothing.
    step = torch.tensor([1, 0, 0, 0, 0], dtype=torch.float64)
    expected = torch.tensor([801, 289, 33, 1, 0]) / 1090
    close(gaussian_smooth(step, HALVING_SIGMA), expected)
    close(gaussian_smooth(step.flip(0), HALVING_SIGMA), expected.flip(0))


def test_smoothing_at_sigma_one_has_radius_three():
    # Weights e^(-k²/2), k = -3 .. 3; the fourth neighbour gets nothing.
    total = 1 + 2 * (math.exp(-0.5) + math.exp(-2) + math.exp(-4.5))
    impulse = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.float64).roll(4)
    close(gaussian_smooth(impulse, 1.0)[:5], [0, *(math.exp(-0.5 * k * k) / total for k in (3, 2, 1, 0))])


def test_smoothing_keeps_constants_single_tokens_and_sigma_zero():
    constant = torch.full((4,), 0.7, dtype=torch.float64)
    close(gaussian_smooth(constant, 2.0), constant)
    close(gaussian_smooth(constant[:1], 2.0), [0.7])
    rising = torch.tensor([1.0, 5.0, 2.0])
    same(gaussian_smooth(rising, 0.0), rising)


def test_weights_are_smoothed_before_their_mean_within_the_valid_tokens():
    # Ratios 1 0 (floored) in a response of two tokens: smoothed 801/1090 and 289/1090, mean 1/2: v = 801/545, 289/545.
    # Smoothing across the padding (99) would show.
    rule = AttentionWeights(token_weight_smooth_sigma=HALVING_SIGMA)
    close(apply_weights([[0.2, 0.0, 99]], rule, mask=make_mask(2, width=3)), [[801 / 545, 289 / 545, 1]], rtol=1e-5)


# ---- weights by the change of entropy ----


def changed(change, rule=None, lengths=(3,), visual=None):
    """(experience, v): each response has its own prompt."""
    rollouts = fake_rollouts(lengths, group=range(len(lengths)), visual=visual)
    change = change if isinstance(change, torch.Tensor) else padded(change, fill=NAN)
    experience = fake_experience(rollouts, Signals(entropy_change=change))
    return experience, (rule or EntropyChange()).apply(experience, KEY)


def test_tokens_whose_entropy_changes_more_weigh_more():
    # |c| = 1, 3, 2, mean 2: v = 1/2, 3/2, 1. In half strength halfway to 1. One token: its own mean.
    change, lengths = [[1, -3, 2], [0.5]], (3, 1)
    close(changed(change, lengths=lengths)[1], [[0.5, 1.5, 1], [1, 1, 1]])
    close(changed(change, EntropyChange(strength=0.5), lengths)[1], [[0.75, 1.25, 1], [1, 1, 1]])
    close(changed(change, EntropyChange(strength=0.0), lengths)[1], [[1, 1, 1], [1, 1, 1]])
    close(changed(change, EntropyChange(clip=(0.8, 1.2)), lengths)[1], [[0.8, 1.2, 1], [1, 1, 1]])


def test_changes_of_entropy_are_clipped():
    # |c| = 0 seven times and 8, mean 1: 0 -> 0.2 and 8 -> 3.
    close(changed([[0] * 7 + [-8]], lengths=(8,))[1], [[0.2] * 7 + [3]])


def test_rows_without_an_image_or_without_a_change_get_ones():
    found = changed([[1, 3], [1, 3], [0, 0], []], lengths=(2, 2, 2, 0), visual=[VISUAL, TEXT_ONLY, VISUAL, VISUAL])[1]
    close(found, [[0.5, 1.5], [1, 1], [1, 1], [1, 1]])
    assert found.dtype == torch.float32


@pytest.mark.parametrize(("mean", "weights"), [(0.8e-6, [1, 1]), (1e-6, [1, 1]), (1.2e-6, [0.5, 1.5])])
def test_a_mean_change_of_entropy_up_to_the_limit_is_rounding(mean, weights):
    change = torch.tensor([[0.5, -1.5]], dtype=torch.float64) * mean
    close(changed(change, lengths=(2,))[1], [weights])


def test_weights_by_the_change_of_entropy_are_rounded_once():
    change = torch.rand(1, 50, generator=torch.Generator().manual_seed(0)) - 0.5
    sizes = [abs(c) for c in change[0].tolist()]
    mean = math.fsum(sizes) / len(sizes)
    expected = torch.tensor([[1 - 0.3 + 0.3 * size / mean for size in sizes]])
    same(changed(change, EntropyChange(strength=0.3), lengths=(50,))[1], expected)


def test_metrics_of_the_change_of_entropy():
    # Over the visual tokens 1, -3, 2 and 4: mean 1, mean size 5/2. The text-only row counts for nothing.
    visual = [VISUAL, VISUAL, TEXT_ONLY]
    experience, _ = changed([[1, -3, 2], [4], [7]], lengths=(3, 1, 1), visual=visual)
    expected = {"actor/entropy_change_mean": 1.0, "actor/entropy_change_size": 2.5}
    assert EntropyChange().metrics(experience) == pytest.approx(expected)
    blind, _ = changed([[1]], lengths=(1,), visual=[TEXT_ONLY])
    assert EntropyChange().metrics(blind) == {}


# ---- all together ----


def test_plain_credit_is_the_advantage():
    advantage = padded([[2, 2, 2], [-1]], fill=7.0)
    credit = assign((), fake_experience(fake_rollouts([3, 1]), advantage=advantage), KEY)
    same(credit.advantage, padded([[2, 2, 2], [-1]]))
    same(credit.keep_mask, make_mask(3, 1))
    same(credit.token_weight, make_mask(3, 1).float())
    same(credit.response_weight, torch.ones(2))
    assert credit.weights is None


ADVANTAGE = padded([[2, 2, 2, 2], [-1, -1], [3, 3, 3]], fill=INF)
WEIGHTS = padded([[1, 2, 0.5, 0.5], [0.5, 1.5], [1, 1, 1]], fill=NAN)
# Scores 15/4 and 9/2: u = 0, 1, beta_max = 0.8 + 0.2 * 2 = 1.2; the text-only row keeps 1.


def credit_by(*rules, weights=WEIGHTS):
    return assign(rules, fake_experience(ROLLOUTS, SIGNALS, ADVANTAGE, token_weights=weights), KEY)


def test_credit_multiplies_scale_and_token_weights_for_both_signs():
    # Row 0: 2 * 0.8 * v. Row 1: -1 * 1.2 * v. Row 2: 3.
    credit = credit_by(PerceptionFilter(0.25), TrajectoryScaling(), AttentionWeights())
    close(credit.response_weight, [0.8, 1.2, 1.0])
    close(credit.advantage, padded([[1.6, 3.2, 0.8, 0.8], [-0.6, -1.8], [3, 3, 3]]))
    same(credit.keep_mask, bits([[0, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]))
    same(credit.token_weight, MASK.float())


def test_the_mask_target_moves_the_weights_from_the_advantage_to_the_measure():
    credit = credit_by(TrajectoryScaling(), AttentionWeights(token_weight_target="mask"))
    close(credit.advantage, padded([[1.6] * 4, [-1.2] * 2, [3] * 3]))
    close(credit.token_weight, padded([[1, 2, 0.5, 0.5], [0.5, 1.5], [1, 1, 1]]))
    same(credit.keep_mask, MASK)


def test_token_weights_wait_for_their_switch():
    credit = credit_by()
    close(credit.advantage, padded([[2] * 4, [-1] * 2, [3] * 3]))
    same(credit.token_weight, MASK.float())


def test_scaling_needs_no_filter_and_a_filter_no_scaling():
    scaled = credit_by(TrajectoryScaling(), weights=None)
    close(scaled.advantage, padded([[1.6] * 4, [-1.2] * 2, [3] * 3]))
    same(scaled.keep_mask, MASK)
    filtered = credit_by(PerceptionFilter(0.25), weights=None)
    same(filtered.response_weight, torch.ones(3))
    close(filtered.advantage, padded([[2] * 4, [-1] * 2, [3] * 3]))


def test_each_rule_declares_the_signals_it_reads():
    assert PerceptionFilter().needs == TrajectoryScaling().needs == Needs("dependency")
    assert EntropyFilter().needs == Needs("entropy")
    assert EntropyChange().needs == Needs("entropy_change")
    assert AttentionWeights().needs == Needs("attention_mass")
    assert AttentionWeights(compute_attention_metrics=False).needs == Needs(), "a reward function brings the weights"
