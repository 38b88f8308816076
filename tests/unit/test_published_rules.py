"""Rules after published ideas and their controls: by hand, text-only rows, padding, keys."""

import math
from dataclasses import fields, replace

import pytest
import torch
from helpers import close, fake_experience, fake_rollouts, padded, same

from mtrl.algorithms.credit import Bonus, Filter, Weight, assign
from mtrl.algorithms.credit.attention_anchors import AttentionAnchors
from mtrl.algorithms.credit.controls import Bottom, RandomFilter
from mtrl.algorithms.credit.entropy_change import EntropyChange
from mtrl.algorithms.credit.hidden_similarity import HiddenSimilarity
from mtrl.algorithms.credit.key_tokens import KeyTokens, association
from mtrl.algorithms.credit.mass_gate import MassGate
from mtrl.algorithms.credit.perception_bonus import PerceptionBonus
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.registry import RULES, make_rule
from mtrl.algorithms.credit.rule import RunFacts
from mtrl.algorithms.credit.shuffled import shuffled, shuffled_positions, take_signals
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.credit.vision_entropy import (
    VisionEntropy,
    VisionEntropyWeights,
    over_maximum,
    vision_entropy,
)
from mtrl.algorithms.signals import SHIFTS
from mtrl.types import SEGMENTS, Rewards, Signals
from mtrl.utils.plugins import PluginError

KEY = (3, 7)
VISUAL_AND_TEXT = [True, False]


def bits(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def answer(rule, lengths, visual=None, key=KEY, rewards=None, **signals):
    rollouts = fake_rollouts(lengths, group=range(len(lengths)) if visual else None, visual=visual)
    experience = fake_experience(rollouts, signals=Signals(**{n: padded(x) for n, x in signals.items()}))
    return rule.apply(experience, key)


# --------------------------------------------------------------------------------------------------- visual dependency
def test_mass_gate_moves_the_weight_of_weak_tokens_to_strong_ones():
    # Mean S is 2: 1 and 0 are gated; 3 and 4 share the weight of four tokens, 12/7 and 16/7.
    close(answer(MassGate(), [4], dependency=[[1.0, 3, 4, 0]]), [[0, 12 / 7, 16 / 7, 0]])
    close(answer(MassGate(strength=0.5), [4], dependency=[[1.0, 3, 4, 0]]), [[0.5, 19 / 14, 23 / 14, 0.5]])
    # Half the mean: 1 passes too. Sum 8, four tokens: each counts for S/2.
    close(answer(MassGate(threshold=0.5), [4], dependency=[[1.0, 3, 4, 0]]), [[0.5, 1.5, 2, 0]])


def test_mass_gate_does_not_cover_rows_without_image_or_dependency():
    found = answer(MassGate(), [2, 2, 2], [True, False, True], dependency=[[0.0, 2], [0, 2], [0, 1e-9]])
    close(found, [[0, 2], [1, 1], [1, 1]])


def test_vision_entropy_is_the_product_of_both_over_their_maxima():
    # S/max 1/4 1 1/2 0, H/max 1 1/2 1 1: products 1/4 1/2 1/2 0. Two of four: the later two of the first three.
    signals = {"dependency": [[1.0, 4, 2, 0]], "entropy": [[2.0, 1, 2, 2]]}
    same(answer(VisionEntropy(top_p=0.5), [4], **signals), bits([0, 1, 1, 0]))
    # Mean 5/16: weights 4/5, 8/5, 8/5, 0, the last one lifted to the clip.
    close(answer(VisionEntropyWeights(), [4], **signals), [[0.8, 1.6, 1.6, 0.2]])
    close(answer(VisionEntropyWeights(clip=(0, 1.5)), [4], **signals), [[0.8, 1.5, 1.5, 0]])


def test_vision_entropy_judges_visual_rows_alone():
    signals = {"dependency": [[1.0, 4], [1, 4]], "entropy": [[1.0, 1], [1, 1]]}
    close(answer(VisionEntropyWeights(), [2, 2], VISUAL_AND_TEXT, **signals)[1], [1, 1])
    flat = {"dependency": [[0.0, 0]], "entropy": [[1.0, 1]]}
    close(answer(VisionEntropyWeights(), [2], **flat), [[1, 1]])
    rollouts = fake_rollouts([2, 2], group=range(2), visual=VISUAL_AND_TEXT)
    experience = fake_experience(
        rollouts, Signals(**{name: padded(x) for name, x in signals.items()}), advantage=torch.ones(2, 2)
    )
    same(assign([VisionEntropy(top_p=0.5)], experience, KEY).keep_mask, bits([0, 1], [1, 1]))


def test_perception_bonus_rewards_tokens_that_the_image_made_likely():
    # x = log 1/2, 0, log 2: 1 - exp(x) = 1/2, 0, -1.
    change = [[math.log(0.5), 0.0, math.log(2.0)]]
    close(
        answer(PerceptionBonus(gamma=0.1), [3], old_logprobs=[[0.0] * 3], perturbed_logprobs=change), [[0.05, 0, -0.1]]
    )


def test_perception_bonus_is_zero_where_the_dependency_is_held_at_its_limit():
    # k3 of x = 3 is 16.1 and of x = -12 it is 11: both above the limit of 10, where S has no slope.
    close(answer(PerceptionBonus(gamma=1.0), [2], old_logprobs=[[0.0, 0]], perturbed_logprobs=[[3.0, -12]]), [[0, 0]])
    found = answer(
        PerceptionBonus(gamma=1.0),
        [1, 1],
        VISUAL_AND_TEXT,
        old_logprobs=[[0.0], [0]],
        perturbed_logprobs=[[-1.0], [-1]],
    )
    close(found, [[1 - math.exp(-1)], [0]])


def test_perception_bonus_is_the_gradient_of_papos_loss():
    # d/dl of gamma * k3(x) at the old policy, x = perturbed - l: gamma * (1 - exp(x)), which an advantage brings too.
    for x in (-1.0, 0.3):
        policy = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
        difference = x - policy
        (0.2 * (difference.exp() - difference - 1)).backward()
        term = answer(PerceptionBonus(gamma=0.2), [1], old_logprobs=[[0.0]], perturbed_logprobs=[[x]])
        assert float(term) == pytest.approx(float(policy.grad), abs=1e-7)


def test_perception_bonus_takes_the_difference_of_both_views():
    found = answer(PerceptionBonus(gamma=2.0), [1], old_logprobs=[[-1.0]], perturbed_logprobs=[[-1.5]])
    close(found, [[2 * (1 - math.exp(-0.5))]])
    for known in ("old_logprobs", "perturbed_logprobs"):
        with pytest.raises(AssertionError, match="did not measure"):
            answer(PerceptionBonus(), [1], **{known: [[-1.0]]})


@pytest.mark.parametrize("noisy", ["dependency", "entropy"])
def test_vision_entropy_is_weighted_if_there_is_any(noisy):
    """A token must have both S and H above 1e-6. Below that both are rounding, whatever the rest of the row has."""
    for much, weighed in ((1.2e-6, True), (1e-6, False), (0.8e-6, False)):
        values = {"dependency": [1.0, 0], "entropy": [1.0, 0]} | {noisy: [much, 1]}
        signals = Signals(**{name: torch.tensor([x], dtype=torch.float64) for name, x in values.items()})
        experience = fake_experience(fake_rollouts([2]), signals)
        assert vision_entropy(experience).tolist() == [[much, 0]]
        assert (VisionEntropyWeights().apply(experience, KEY) != 1).any() == weighed


def test_rounding_gets_no_weights():
    """S of 1e-13 is a log-prob that differs in its last bit. Ranked, it gave weights from 0.2 to 3."""
    noise, some = [[1e-13, 4e-13, 0, 2e-14]], [[1.0, 0.5, 2, 1]]
    for rule in (VisionEntropyWeights(), MassGate()):
        same(answer(rule, [4], dependency=noise, entropy=some), torch.ones(1, 4))
    same(answer(VisionEntropyWeights(), [4], dependency=some, entropy=noise), torch.ones(1, 4))
    rows = answer(TrajectoryScaling(), [2, 2], dependency=[[1e-13, 0], [0, 4e-13]])
    same(rows, torch.ones(2))
    # Noise beside tokens that depend on the image takes nothing from them: products 1, 1/2, ~0, ~0 over a mean of 3/8.
    found = answer(VisionEntropyWeights(), [4], dependency=[[0.2, 0.1, 1e-13, 1e-9]], entropy=[[1.0, 1, 1, 1]])
    close(found, [[8 / 3, 4 / 3, 0.2, 0.2]])


def test_vision_entropy_needs_both_signals():
    found = over_maximum(torch.tensor([[0.0, 0, 0], [1, 4, 9]]), bits([1, 1, 1], [1, 1, 0]))
    assert found.tolist() == [[0, 0, 0], [0.25, 1, 0]], "values off the mask are 0 and no maximum"
    for known in ("dependency", "entropy"):
        with pytest.raises(AssertionError, match="did not measure"):
            answer(VisionEntropy(), [1], **{known: [[1.0]]})


def test_vision_entropy_reports_the_kept_share_of_tokens_with_an_image():
    rule = VisionEntropy(top_p=0.5)
    signals = Signals(dependency=torch.ones(2, 4), entropy=torch.rand(2, 4))
    seen = fake_experience(fake_rollouts([4, 2], group=range(2), visual=VISUAL_AND_TEXT), signals)
    assert rule.metrics(seen) == {"actor/vision_entropy_token_fraction": 0.5}
    longer = fake_experience(fake_rollouts([1, 4], group=range(2), visual=VISUAL_AND_TEXT), signals)
    assert rule.metrics(longer) == {"actor/vision_entropy_token_fraction": 1.0}
    assert rule.metrics(fake_experience(fake_rollouts([4, 2], visual=[False]), signals)) == {}
    assert rule.metrics(fake_experience(seen.rollouts, Signals())) == {}


# ----------------------------------------------------------------------------------------------------- attention, ids
def test_attention_anchors_are_the_tokens_with_most_vision_attention():
    mass = torch.zeros(2, 4, len(SEGMENTS), 2)
    mass[:, :, SEGMENTS.index("weight"), 1] = torch.tensor([0.1, 0.4, 0.2, 0.3])
    rollouts = fake_rollouts([4, 4], group=range(2), visual=VISUAL_AND_TEXT)
    found = AttentionAnchors(top_p=0.25, boost=3.0).apply(fake_experience(rollouts, Signals(attention_mass=mass)), KEY)
    close(found, [[2 / 3, 2, 2 / 3, 2 / 3], [1, 1, 1, 1]])  # 1 3 1 1 over their mean 3/2; without an image: ones
    assert AttentionAnchors().apply(fake_experience(rollouts), KEY) is None
    single = fake_experience(fake_rollouts([1]), Signals(attention_mass=mass[:1, :1]))
    close(AttentionAnchors(boost=0.0).apply(single, KEY), [[0.0]])  # the mean vanishes


def test_hidden_similarity_stretches_the_cosines_of_a_response():
    # 0.1 0.5 0.3 are at 0, 1 and 1/2 of their range, with mean 1/2: weights 0 2 1, the first raised to the clip.
    close(answer(HiddenSimilarity(), [3], similarity=[[0.1, 0.5, 0.3]]), [[0.2, 2, 1]])
    close(answer(HiddenSimilarity(strength=0.5), [3], similarity=[[-0.4, 0.0, -0.2]]), [[0.5, 1.5, 1]])
    # A row without an image, and one with equal cosines; values off the mask do not count.
    found = answer(HiddenSimilarity(clip=(0, 9)), [2, 2, 3], [True, False, True],
                   similarity=[[0.2, 0.4, 9], [0.2, 0.4, 0], [0.3, 0.3, 0.3]])  # fmt: skip
    close(found, [[0, 2, 1], [1, 1, 1], [1, 1, 1]])
    # There are a lower and a higher value off the mask; those of the second row are all equal.
    found = answer(HiddenSimilarity(), [2, 2, 3], similarity=[[0.2, 0.4, -9], [0.3, 0.3, 9], [0.3, 0.3, 0.3]])
    close(found, [[0.2, 2, 1], [1, 1, 1], [1, 1, 1]])


@pytest.mark.parametrize(("rule", "signal"), [(HiddenSimilarity(), "similarity"), (MassGate(), "dependency")])
def test_tiny_differences_are_not_stretched(rule, signal):
    """Two values that differ by 1e-6, or have a gated mean of 1e-6: only above it they are weighted."""
    for much, weighed in ((1.2e-6, True), (1e-6, False), (0.8e-6, False)):
        top = much if signal == "similarity" else 2 * much  # one of two tokens passes the gate: the mean is half of it
        signals = Signals(**{signal: torch.tensor([[0.0, top]], dtype=torch.float64)})
        assert (rule.apply(fake_experience(fake_rollouts([2]), signals), KEY) != 1).any() == weighed


def test_key_tokens_are_ids_that_go_with_reward():
    # Two good, two bad. 5: both good ones (phi 1). 6: one of each (0). 7: all (0). 8: one bad one (-1/sqrt 3).
    tokens = torch.tensor([[5, 6, 7], [5, 7, 0], [6, 7, 0], [8, 7, 7]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    found = association(tokens, mask, torch.tensor([True, True, False, False]))
    close(found[mask], [1, 0, 0, 1, 0, 0, 0, -1 / math.sqrt(3), 0, 0])


def test_key_tokens_count_only_sampled_tokens():
    # The one good response of four contains 1, and so does a bad one; only the good one contains 0, all contain 5.
    # Tokens off the mask do not count, for any id. 1: a b c d = 1 1 0 2, phi = 2 / sqrt(12); 0: 1 0 0 3, phi = 1.
    tokens = torch.tensor([[1, 0, 5], [1, 5, 0], [5, 1, 1], [5, 0, 1]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    found = association(tokens, mask, torch.tensor([True, False, False, False]))
    close(found[mask], [2 / math.sqrt(12), 1, 0, 2 / math.sqrt(12), 0, 0, 0])


def test_key_tokens_of_three_groups_and_of_a_reward_at_the_mean():
    # Group 0: the middle reward is the mean and no good one. Group 1: equal rewards. Group 2: the last is good.
    rollouts = replace(
        fake_rollouts([1, 2, 1, 1, 1, 1, 1], group=[0, 0, 0, 1, 1, 2, 2]),
        tokens=torch.tensor([[5, 9], [6, 6], [6, 9], [5, 9], [6, 9], [7, 9], [8, 9]]),
    )
    rewards = Rewards(torch.tensor([1.0, 0.5, 0, 1, 1, 0, 1]), {}, torch.zeros(7, dtype=torch.bool))
    found = KeyTokens(strength=1.0).apply(fake_experience(rollouts, rewards=rewards), KEY)
    close(found, [[1, 0], [-1, -1], [-1, 0], [0, 0], [0, 0], [-1, 0], [1, 0]])


def test_key_tokens_compare_within_a_group():
    rollouts = replace(
        fake_rollouts([1, 1, 1, 1], group=[0, 1, 0, 1]), tokens=torch.tensor([[5], [5], [6], [6]])
    )  # in group 0 the first is good, in group 1 both are equal
    rewards = Rewards(torch.tensor([1.0, 1.0, 0.0, 1.0]), {}, torch.zeros(4, dtype=torch.bool))
    found = KeyTokens(strength=0.5).apply(fake_experience(rollouts, rewards=rewards), KEY)
    close(found, [[0.5], [0], [-0.5], [0]])


# ----------------------------------------------------------------------------------------------------------- controls
def test_random_filter_keeps_as_many_and_draws_by_the_key():
    lengths = [10, 7, 1]
    kept = answer(RandomFilter(top_p=0.3), lengths)
    assert kept.sum(1).tolist() == [3, 3, 1]
    same(answer(RandomFilter(top_p=0.3), lengths), kept)
    assert not torch.equal(answer(RandomFilter(top_p=0.3), lengths, key=(3, 8)), kept)
    # The draws of a row do not depend on other rows.
    same(answer(RandomFilter(top_p=0.3), [10, 2, 1])[0], kept[0])
    often = torch.stack([answer(RandomFilter(top_p=0.2), [5], key=(0, step))[0] for step in range(400)])
    assert often.double().mean(0).tolist() == pytest.approx([0.2] * 5, abs=0.07)


def test_bottom_keeps_the_least_dependent_tokens():
    same(answer(Bottom(top_p=0.5), [4], dependency=[[1.0, 3, 4, 0]]), bits([1, 0, 0, 1]))


def test_shuffled_rules_have_the_same_kind_and_needs():
    for rule, kind in ((PerceptionFilter(), Filter), (EntropyChange(), Weight), (PerceptionBonus(), Bonus)):
        assert isinstance(shuffled(rule), kind)
        assert shuffled(rule).needs == rule.needs
    assert shuffled(make_rule({"name": "attention_weights", "target": "mask"})).target == "mask"


def test_a_shuffled_rule_knows_the_tokenizer():
    inner = make_rule("oracle").bind(RunFacts(1, len))
    assert shuffled(make_rule("oracle")).bind(RunFacts(1, len)).rule.decode == inner.decode == len


def test_shuffled_tokens_keep_the_values_and_change_their_positions():
    change = [[1.0, 2, 3, 4, 5, 6], [1, 2, 0, 0, 0, 0]]
    plain, take_signals = (
        answer(rule, [6, 2], entropy_change=change) for rule in (EntropyChange(), shuffled(EntropyChange()))
    )
    assert sorted(take_signals[0].tolist()) == sorted(plain[0].tolist())
    assert take_signals[0].tolist() != plain[0].tolist()
    assert sorted(take_signals[1, :2].tolist()) == sorted(plain[1, :2].tolist())


def test_shuffled_rows_get_the_signals_of_another_response():
    # Two rows: each gets the other's. The second has two tokens, so that the first repeats them.
    rule = shuffled(PerceptionFilter(top_p_perception_tokens=0.5), across="rows")
    found = answer(rule, [4, 2], dependency=[[1.0, 9, 3, 4], [7, 5, 0, 0]])
    same(found, bits([1, 0, 1, 0], [0, 1, 0, 0]))
    # The factors of responses are exchanged: the same values, none at its own row.
    scaling = TrajectoryScaling()
    plain, take_signals = (
        answer(r, [1] * 5, dependency=[[1.0], [2], [3], [4], [5]]) for r in (scaling, shuffled(scaling, "rows"))
    )
    assert sorted(plain.tolist()) == sorted(take_signals.tolist())
    assert (plain != take_signals).all()


def test_which_row_is_taken_follows_from_the_key():
    """The rows that recorded results were made with: another drawing would be another control."""
    mask = torch.ones(7, 1, dtype=torch.bool)
    rows = [shuffled_positions(mask, key, "rows")[0][:, 0].tolist() for key in ((3, 7), (3, 8))]
    assert rows == [[4, 0, 6, 5, 3, 2, 1], [4, 5, 3, 1, 6, 0, 2]]


def test_shuffled_by_name():
    rule = make_rule({"name": "shuffled", "rule": {"name": "perception_filter", "top_p": 0.4}, "across": "rows"})
    assert rule == shuffled(PerceptionFilter(0.4), "rows")
    assert make_rule({"name": "shuffled", "rule": "bottom"}) == shuffled(Bottom())
    with pytest.raises(PluginError, match="rule"):
        make_rule("shuffled")
    with pytest.raises(PluginError, match="there is no credit rule nonsense"):
        make_rule({"name": "shuffled", "rule": "nonsense"})


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"shuffled"}))
def test_text_only_rows_get_plain_credit(name):
    """For rules that read the image; rules by entropy or ids also cover text rows."""
    rule = make_rule(name).bind(RunFacts(10))
    if name in ("entropy_filter", "key_tokens"):
        return
    rollouts = fake_rollouts([3, 2], group=range(2), visual=[False, False])
    drawn = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    known = {"dependency": drawn, "entropy": drawn, "entropy_change": drawn, "old_logprobs": drawn,
             "perturbed_logprobs": -drawn, "similarity": drawn, "token_similarity": drawn, "layer_similarity": drawn,
             **dict.fromkeys(SHIFTS, drawn)}  # fmt: skip
    views = {name: drawn for name in rule.needs.names if "@" in name}
    signals = Signals(attention_mass=torch.rand(2, 3, len(SEGMENTS), 2), **known, extra=views)
    experience = fake_experience(rollouts, signals, advantage=torch.full((2, 3), 2.0))
    credit = assign([rule], experience, KEY)
    close(credit.advantage, padded([[2, 2, 2], [2, 2]]))
    same(credit.keep_mask, rollouts.mask)


# ---------------------------------------------------------------------------------------------------------- all of them
DEFAULTS = {
    "mass_gate": {"threshold": 1.0, "strength": 1.0},
    "vision_entropy": {"top_p": 0.2},
    "vision_entropy_weights": {"clip": (0.2, 3.0)},
    "hidden_similarity": {"strength": 1.0, "clip": (0.2, 3.0)},
    "attention_anchors": {"top_p": 0.15, "boost": 3.0},
    "key_tokens": {"strength": 0.5},
    "perception_bonus": {"gamma": 0.01},
    "random_filter": {"top_p": 0.2},
    "bottom": {"top_p": 0.2},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_the_rules(name):
    assert {f.name: getattr(make_rule(name), f.name) for f in fields(make_rule(name))} == DEFAULTS[name]


@pytest.mark.parametrize("name", DEFAULTS)
def test_results_are_bool_or_float32_for_signals_of_any_precision(name):
    """For any dtype of a signal, thirds are computed in float64 and rounded once, at the end. A row without tokens
    stays finite."""
    rollouts = fake_rollouts([31, 0], group=range(2), visual=[True, True])
    drawn = torch.rand(2, 31, generator=torch.Generator().manual_seed(1)).sqrt()  # all of their bits are used
    rewards = Rewards(torch.tensor([1.0, 0.0]), {}, torch.zeros(2, dtype=torch.bool))
    rule, found = make_rule({"name": name} | ({"strength": 0.3} if "strength" in DEFAULTS[name] else {})), []
    for values in (drawn, drawn.double()):
        known = dict.fromkeys(("dependency", "entropy", "old_logprobs", "similarity"), values) | {
            "perturbed_logprobs": 0 * values
        }
        signals = Signals(attention_mass=values[:, :, None, None].expand(2, 31, len(SEGMENTS), 2), **known)
        found.append(rule.apply(fake_experience(rollouts, signals, rewards=rewards), KEY))
    assert found[0].dtype == found[1].dtype == (torch.bool if isinstance(rule, Filter) else torch.float32)
    assert found[0].double().isfinite().all()
    if name != "perception_bonus":  # the probe returns old and perturbed log-probs in float32
        same(found[0], found[1])


def test_anchors_are_weighted_with_float32_precision():
    for tokens in range(2, 30):
        mass = torch.rand(1, tokens, len(SEGMENTS), 2)
        found = AttentionAnchors(top_p=0.3, boost=1.7).apply(
            fake_experience(fake_rollouts([tokens]), Signals(attention_mass=mass)), KEY
        )
        anchors = math.ceil(0.3 * tokens - 1e-6)
        mean = (tokens + 0.7 * anchors) / tokens
        assert {*found[0].tolist()} <= {*torch.tensor([1 / mean, 1.7 / mean], dtype=torch.float64).float().tolist()}


def test_signals_of_a_prompt_stay_with_it():
    """Shuffled rules move token signals; attention of the prompt and maps are not per token."""
    signals = Signals(
        dependency=torch.tensor([[1.0, 2, 3]]), prompt_attention_mass=torch.rand(1, 2, 2), attention_maps=(None,)
    )
    row, column = torch.zeros(1, 3, dtype=torch.long), torch.tensor([[2, 0, 1]])
    found = take_signals(signals, row, column)
    assert (
        found.prompt_attention_mass is signals.prompt_attention_mass and found.attention_maps is signals.attention_maps
    )
    close(found.dependency, [[3.0, 1, 2]])


def test_draws_do_not_change_between_versions():
    """A resumed run and a repeated study must draw the same numbers."""
    kept = answer(RandomFilter(top_p=0.3), [10, 4])
    assert [row.nonzero().flatten().tolist() for row in kept] == [[7, 8, 9], [1, 2]]
    take_signals = answer(shuffled(MassGate()), [6], dependency=[[1.0, 2, 3, 4, 5, 6]])  # as they are: the last three
    assert take_signals[0].nonzero().flatten().tolist() == [0, 3, 4]
