"""The three kinds of credit rules: how several are combined, and the errors for wrong results of a rule."""

from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import pytest
import torch
from helpers import INF, NAN, close, fake_experience, fake_rollouts, make_mask, padded, same

from mtrl.algorithms.credit import Bonus, Filter, Weight, assign, credit_metrics
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.credit.entropy_change import EntropyChange
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.types import Signals
from mtrl.utils.errors import RunError

KEY = (3, 7)  # seed and step
ADVANTAGE = padded([[1, 1, 1], [-2, -2]], fill=INF)  # two responses of 3 and 2 tokens
MASK = make_mask(3, 2)


@dataclass(frozen=True, eq=False)
class Keeps(Filter):
    """Returns the given result and covers the given rows."""

    answer: Any
    judges: Any = None

    def apply(self, experience, key):
        return self.answer

    def applies_to(self, experience):
        return super().applies_to(experience) if self.judges is None else torch.tensor(self.judges)


@dataclass(frozen=True, eq=False)
class Weighs(Weight):
    answer: Any

    def apply(self, experience, key):
        return self.answer


@dataclass(frozen=True, eq=False)
class Counts(Weighs):
    target = "mask"


@dataclass(frozen=True, eq=False)
class Adds(Bonus):
    answer: Any

    def apply(self, experience, key):
        return self.answer


def make_experience(lengths=(3, 2), advantage=ADVANTAGE, **more):
    return fake_experience(fake_rollouts(lengths), advantage=advantage, **more)


def credit_by(*rules):
    return assign(rules, make_experience(), KEY)


def bits(*rows):
    return torch.tensor(rows, dtype=torch.bool)


# ------------------------------------------------------------------------------------------------------ how they add up
TERM = padded([[1, 0, 2], [0.5, 5]])
BY_RESPONSE, BY_TOKEN = torch.tensor([2.0, 3.0]), padded([[1, 0, 0.5], [2, 1]])


def test_terms_are_added_before_the_advantage_is_scaled():
    # (1 + 1, 1 + 0, 1 + 2) * 2 * (1, 0, 1/2) and (-2 + 1/2, -2 + 5) * 3 * (2, 1), in any order of the rules.
    for rules in permutations([Adds(TERM), Weighs(BY_RESPONSE), Weighs(BY_TOKEN)]):
        close(credit_by(*rules).advantage, padded([[4, 0, 3], [-9, 9]]))
    close(credit_by(Adds(TERM), Adds(TERM)).advantage, padded([[3, 1, 5], [-1, 8]]))
    same(credit_by(Adds(TERM)).token_weight, MASK.float())


def test_weights_of_a_kind_multiply():
    credit = credit_by(Weighs(BY_RESPONSE), Weighs(BY_TOKEN), Weighs(torch.tensor([0.5, 2.0])), Weighs(2 * BY_TOKEN))
    close(credit.response_weight, [1, 6])
    close(credit.weights, padded([[2, 0, 0.5], [8, 2]]))
    close(credit.advantage, padded([[2, 0, 0.5], [-96, -24]]))
    same(credit.token_weight, MASK.float())


def test_a_weight_of_responses_is_no_weight_of_tokens():
    credit = credit_by(Weighs(BY_RESPONSE))
    assert credit.weights is None
    close(credit.response_weight, [2, 3])
    close(credit_by(Weighs(BY_TOKEN)).response_weight, [1, 1])


def test_the_target_mask_changes_token_weights():
    # 1 * 2 * (1, 0, 1/2) and 1 * 3 * (2, 1); the advantage stays.
    credit = credit_by(Counts(BY_RESPONSE), Counts(BY_TOKEN))
    close(credit.token_weight, padded([[2, 0, 1], [6, 3]]))
    close(credit.advantage, padded([[1, 1, 1], [-2, -2]]))
    close(credit.response_weight, [2, 3])
    close(credit.weights, BY_TOKEN)
    both = credit_by(Weighs(BY_RESPONSE), Counts(BY_TOKEN))
    close(both.advantage, padded([[2, 2, 2], [-6, -6]]))
    close(both.token_weight, BY_TOKEN)


def test_a_weight_may_return_none():
    credit, plain = credit_by(Weighs(None), Counts(None)), credit_by()
    for name in ("advantage", "keep_mask", "token_weight", "response_weight"):
        same(getattr(credit, name), getattr(plain, name))
    assert credit.weights is None


def test_several_filters_keep_what_any_of_them_keeps():
    first, second = Keeps(bits([1, 0, 0], [0, 0, 0])), Keeps(bits([0, 0, 1], [0, 1, 0]))
    same(credit_by(first).keep_mask, bits([1, 0, 0], [0, 0, 0]))
    same(credit_by(first, second).keep_mask, bits([1, 0, 1], [0, 1, 0]))


def test_a_filter_does_not_affect_rows_it_does_not_cover():
    of_none, of_first, of_second = [False, False], [True, False], [False, True]
    one = bits([0, 1, 0], [1, 0, 0])
    same(credit_by(Keeps(one, of_none)).keep_mask, MASK)
    same(credit_by(Keeps(one, of_first)).keep_mask, bits([0, 1, 0], [1, 1, 0]))
    other = Keeps(bits([1, 1, 1], [0, 1, 0]), of_second)
    same(credit_by(Keeps(one, of_first), other).keep_mask, bits([0, 1, 0], [0, 1, 0]))
    nothing = Keeps(torch.zeros(2, 3, dtype=torch.bool), of_first)
    same(credit_by(nothing).keep_mask, bits([0, 0, 0], [1, 1, 0]))


def test_rules_see_the_experience_and_the_key():
    seen = []

    class Looks(Weight):
        def apply(self, experience, key):
            seen.append((experience, key))

    experience = make_experience()
    assign([Looks()], experience, KEY)
    assert seen == [(experience, KEY)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16])
def test_numbers_of_every_kind_are_taken(dtype):
    weights = torch.tensor([2, 3]).to(dtype)
    credit = credit_by(Weighs(weights), Weighs(weights[:, None].expand(2, 3)), Adds(torch.ones(2, 3, dtype=dtype)))
    close(credit.advantage, padded([[8, 8, 8], [-9, -9]]))
    for value in (credit.advantage, credit.token_weight, credit.response_weight, credit.weights):
        assert value.dtype == torch.float32


# --------------------------------------------------------------------------------------------------------- off the mask
@pytest.mark.parametrize("junk", [NAN, INF, -INF, -1.0, 1e30])
@pytest.mark.parametrize("weight", [Weighs, Counts])
def test_values_off_the_mask_do_not_matter(junk, weight):
    clean = credit_by(Keeps(MASK), weight(BY_TOKEN), Adds(TERM))
    everywhere = torch.ones(2, 3, dtype=torch.bool)
    filled = [weight(BY_TOKEN.where(MASK, junk)), Adds(TERM.where(MASK, junk))]
    credit = credit_by(Keeps(everywhere), *filled)
    for name in ("advantage", "keep_mask", "token_weight", "response_weight"):
        same(getattr(credit, name), getattr(clean, name))


@pytest.mark.parametrize("junk", [NAN, INF, -1.0])
@pytest.mark.parametrize("weight", [Weighs, Counts])
def test_the_weight_of_a_response_without_tokens_does_not_matter(junk, weight):
    experience = make_experience([2, 0], torch.ones(2, 2))
    credit = assign([weight(torch.tensor([2.0, junk]))], experience, KEY)
    same(credit.advantage[1], torch.zeros(2))
    same(credit.token_weight[1], torch.zeros(2))


# -------------------------------------------------------------------------------------------------------- wrong answers
def get_error(rule, lengths=(3, 2), advantage=ADVANTAGE):
    with pytest.raises(RunError) as stopped:
        assign([rule], make_experience(lengths, advantage), KEY)
    return str(stopped.value)


NUMBERS = "it must return a tensor of [2, 3], a number each"
WEIGHTS = "it must return a tensor of [2, 3] or [2], a number each"
BOOLS = "it must return a tensor of [2, 3], a bool each"
FINITE = "values that are not finite (NaN or infinity); guard its division"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Adds(None), f"credit rule Adds returned NoneType; {NUMBERS}"),
        (Adds(1.0), f"credit rule Adds returned float; {NUMBERS}"),
        (Adds(torch.ones(2)), f"credit rule Adds returned torch.float32 of [2]; {NUMBERS}"),
        (Adds(torch.ones(3, 2)), f"credit rule Adds returned torch.float32 of [3, 2]; {NUMBERS}"),
        (Adds(MASK), f"credit rule Adds returned torch.bool of [2, 3]; {NUMBERS}"),
        (Weighs([1, 1]), f"credit rule Weighs returned list; {WEIGHTS}"),
        (Weighs(torch.ones(3)), f"credit rule Weighs returned torch.float32 of [3]; {WEIGHTS}"),
        (Weighs(torch.ones(2, 1)), f"credit rule Weighs returned torch.float32 of [2, 1]; {WEIGHTS}"),
        (Weighs(torch.ones(2, 3, 1)), f"credit rule Weighs returned torch.float32 of [2, 3, 1]; {WEIGHTS}"),
        (Weighs(torch.tensor(1.0)), f"credit rule Weighs returned torch.float32 of []; {WEIGHTS}"),
        (Counts(MASK), f"credit rule Counts returned torch.bool of [2, 3]; {WEIGHTS}"),
        (Keeps(None), f"credit rule Keeps returned NoneType; {BOOLS}"),
        (Keeps(MASK.float()), f"credit rule Keeps returned torch.float32 of [2, 3]; {BOOLS}"),
        (Keeps(MASK[:, 0]), f"credit rule Keeps returned torch.bool of [2]; {BOOLS}"),
        (Adds(padded([[1, NAN, 1], [1, 1]])), f"credit rule Adds returned 1 of 5 {FINITE}"),
        (Adds(padded([[1, 1, INF], [-INF, 1]])), f"credit rule Adds returned 2 of 5 {FINITE}"),
        (Weighs(padded([[1, 1, 1], [NAN, INF]])), f"credit rule Weighs returned 2 of 5 {FINITE}"),
        (Counts(torch.tensor([1.0, NAN])), f"credit rule Counts returned 1 of 2 {FINITE}"),
        (
            Weighs(padded([[1, 0, 1], [-0.5, -0.25]])),
            "credit rule Weighs returned the weight -0.5; a weight is at least 0, a Bonus may be negative",
        ),
        (
            Counts(torch.tensor([1, -3])),
            "credit rule Counts returned the weight -3; a weight is at least 0, a Bonus may be negative",
        ),
    ],
)
def test_a_wrong_result_stops_the_run_with_one_line(rule, message):
    assert get_error(rule) == message


def test_a_weight_of_zero_and_a_negative_term_are_fine():
    close(credit_by(Weighs(torch.zeros(2))).advantage, padded([[0, 0, 0], [0, 0]]))
    close(credit_by(Adds(-torch.ones(2, 3))).advantage, padded([[0, 0, 0], [-3, -3]]))


@pytest.mark.parametrize("judges", [[True], [True, True, True], [1, 1], [[True, True]]])
def test_a_filter_speaks_for_each_row(judges):
    message = "credit rule Keeps: applies_to must return a bool for each of 2 responses"
    assert get_error(Keeps(MASK, judges)) == message


def test_an_unknown_target_is_reported_with_the_known_ones():
    class Odd(Weighs):
        target = "loss"

    message = "credit rule Odd has the target 'loss'; it must be advantage or mask"
    assert get_error(Odd(torch.ones(2))) == message


def test_the_first_line_of_a_long_message_is_reported():
    class Fails(Bonus):
        def apply(self, experience, key):
            raise ValueError("first\nsecond")

    assert get_error(Fails()).startswith("credit rule Fails failed: ValueError: first (")


def test_the_line_where_a_rule_raised_is_reported():
    def divide(rollouts):
        return 1 / (len(rollouts) - 2)

    class Fails(Bonus):
        def apply(self, experience, key):
            return divide(experience.rollouts)

    with pytest.raises(RunError) as stopped:
        assign([Fails()], make_experience(), KEY)
    line = divide.__code__.co_firstlineno + 1
    assert str(stopped.value) == f"credit rule Fails failed: ZeroDivisionError: division by zero ({__file__}:{line})"
    assert isinstance(stopped.value.__cause__, ZeroDivisionError)


# -------------------------------------------------------------------------------------------------------------- metrics
@dataclass(frozen=True)
class Reports(Weight):
    name: str = "mine"

    def apply(self, experience, key):
        return torch.full((len(experience),), 2.0)

    def metrics(self, experience):
        return {f"credit/{self.name}": float(experience.credit.response_weight.sum())}


def compute_metrics(*rules, signals=None):
    experience = make_experience(signals=signals)
    return credit_metrics(rules, replace(experience, credit=assign(rules, experience, KEY)))


def test_metrics_of_rules_are_combined():
    # Two rules double the scale of two responses: 4 + 4. The filter keeps 1 + 1 of 3 + 2 tokens and reports nothing.
    kept = Keeps(bits([0, 1, 0], [1, 0, 1]))
    assert compute_metrics(Reports("a"), kept, Reports("b")) == {
        "credit/a": 8.0,
        "credit/b": 8.0,
        "actor/combined_token_fraction": 0.4,
    }
    assert compute_metrics(Reports()) == {"credit/mine": 4.0}, "without a filter there is no share"
    assert compute_metrics() == {}


def test_a_rule_whose_signal_is_missing_reports_nothing():
    experience = replace(make_experience(), credit=credit_by())
    for rule in (PerceptionFilter(), EntropyFilter(), TrajectoryScaling(), AttentionWeights(), EntropyChange()):
        assert rule.metrics(experience) == {}


def test_the_defaults_of_the_rules():
    """Those of the configuration keys."""
    assert PerceptionFilter() == PerceptionFilter(top_p_perception_tokens=0.2)
    assert EntropyFilter() == EntropyFilter(top_p_entropy_tokens=0.2)
    assert TrajectoryScaling() == TrajectoryScaling(trajectory_scaling_min=0.8, trajectory_scaling_max=2.0)
    assert AttentionWeights() == AttentionWeights("advantage", (0.2, 3.0), 0.0, None, "auto")
    assert EntropyChange() == EntropyChange(strength=1.0, clip=(0.2, 3.0))


@pytest.mark.parametrize(("below", "capped"), [(1.2e-6, 1.0), (0.8e-6, 0.0)])
def test_a_mean_below_one_by_rounding_is_not_a_cap(below, capped):
    # w = 0.8 and the cap; their mean is 1 - below.
    signals = Signals(dependency=torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
    metrics = compute_metrics(TrajectoryScaling(trajectory_scaling_max=1.2 - 2 * below), signals=signals)
    assert metrics["actor/scaling_capped"] == capped
    assert metrics["actor/scaling_factor_mean"] == pytest.approx(1 - below, abs=1e-7)
