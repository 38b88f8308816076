"""Online filtering: which groups stay, how a step samples replacements, and the count of every prompt."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import NAN, fake_experience, fake_prompt, fake_rollouts
from hypothesis import given
from hypothesis import strategies as st

from mtrl.algorithms.filtering import GroupFilter
from mtrl.training.dynamic_sampling import Filtering, PromptCounts, check_full_batch, sample_until_full
from mtrl.types import Rewards, Signals
from mtrl.utils.errors import RunError

GROUP = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])


def reward_description(total, **parts):
    tensors = {name: torch.tensor(part) for name, part in parts.items()}
    return Rewards(torch.tensor(total), tensors, torch.zeros(len(total), dtype=torch.bool))


# ------------------------------------------------------------------------------------------------------ which ones stay
def test_by_the_mean():
    # Means 0, 1, 1/2, 1/4, 3/4. The bounds themselves are outside.
    rewards = reward_description([0.0, 0, 1, 1, 0, 1, 0.25, 0.25, 0.75, 0.75])
    assert GroupFilter("mean").keeps(rewards, GROUP).tolist() == [False, False, True, True, True]
    assert GroupFilter("mean", filter_low=0.25, filter_high=0.75).keeps(rewards, GROUP).tolist() == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert GroupFilter("mean", filter_low=-1.0, filter_high=2.0).keeps(rewards, GROUP).all()


def test_by_the_spread():
    # Any difference is enough, for any mean; equal rewards of any size have no spread, for any rounding.
    rewards = reward_description([0.1, 0.1, 1, 1, 0, 1, 7, 7.001, -3, -3])
    assert GroupFilter("spread").keeps(rewards, GROUP).tolist() == [False, False, True, True, False]
    uneven = torch.tensor([0, 0, 0, 1])
    assert GroupFilter("spread").keeps(reward_description([0.1, 0.1, 0.1, 5.0]), uneven).tolist() == [False, False]


def test_by_a_part_of_the_reward():
    rewards = reward_description([0.0] * 4, accuracy=[1.0, 0.0, 1.0, 1.0], format=[1.0, 1.0, 0.0, 1.0])
    group = torch.tensor([0, 0, 1, 1])
    for by in ("mean", "spread"):
        assert GroupFilter(by, "accuracy").keeps(rewards, group).tolist() == [True, False]
        assert GroupFilter(by, "format").keeps(rewards, group).tolist() == [False, True]
        assert GroupFilter(by).keeps(rewards, group).tolist() == [False, False], "the total"


def test_overall_is_the_total_even_if_a_function_returns_that_key():
    rewards = reward_description([1.0, 0.0], overall=[0.0, 0.0])
    assert GroupFilter("spread", "overall").keeps(rewards, torch.tensor([0, 0])).tolist() == [True]


def test_missing_values_are_left_out_and_a_group_without_values_is_dropped():
    # Group 0: a mean of 1/2 and one value, so no spread. Group 1: nothing to judge by. Group 2: 0 and 1.
    rewards = reward_description([0.0] * 6, x=[0.5, NAN, NAN, NAN, 0.0, 1.0])
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    assert GroupFilter("mean", filter_key="x").keeps(rewards, group).tolist() == [True, False, True]
    assert GroupFilter("spread", "x").keeps(rewards, group).tolist() == [False, False, True]
    assert GroupFilter("mean", filter_key="y").keeps(rewards, group).tolist() == [False, False, False]


# -------------------------------------------------------------------------------------------------------------- refills
class Source:
    """Prompts p0, p1, .. of two responses each. Those named are learnt from: their responses earn 0 and 1, others 1."""

    def __init__(self, *good):
        self.good, self.next, self.rounds = good, 0, []

    def ask(self, count):
        self.rounds.append(count)
        numbers = [self.next + place for place in range(count)]
        self.next += count
        group = [place for place in range(count) for _ in range(2)]
        rollouts = fake_rollouts([1 + number % 3 for number in numbers for _ in range(2)], group=group)
        total = [1.0 if row % 2 else 1.0 - (number in self.good) for number in numbers for row in range(2)]
        named = tuple(f"p{number} {row}" for number in numbers for row in range(2))
        return fake_experience(replace(rollouts, text=named), rewards=reward_description(total, accuracy=total))


def filtering(**changes):
    return Filtering(GroupFilter("spread"), **changes)


def test_a_full_batch_samples_once():
    source = Source(0, 1, 2, 3)
    filled = sample_until_full(source.ask, 4, filtering())
    assert source.rounds == [4] and filled.counts == PromptCounts(used=4, dropped=0, refilled=0)
    assert len(filled.experience) == 8 and filled.metrics["filtering/rounds"] == 1


def test_refills_until_it_is_full():
    # 0 and 3 stay; 4 and 5 replace 1 and 2, 5 stays; 6 replaces 4.
    source = Source(0, 3, 5, 6, 7, 8)
    filled = sample_until_full(source.ask, 4, filtering())
    assert source.rounds == [4, 2, 1]
    assert filled.counts == PromptCounts(used=4, dropped=3, refilled=3) and filled.metrics["filtering/rounds"] == 3
    assert filled.experience.rollouts.text == tuple(f"p{n} {row}" for n in (0, 3, 5, 6) for row in range(2))
    assert filled.experience.rollouts.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(filled.experience.rollouts.prompts) == 4


def test_metrics_are_of_all_that_was_sampled():
    # 7 prompts: 4 with a mean of 1/2, 3 with 1. Lengths 1 2 3 1 2 3 1.
    filled = sample_until_full(Source(0, 3, 5, 6).ask, 4, filtering())
    assert filled.metrics["reward/overall"] == pytest.approx((4 * 0.5 + 3) / 7)
    assert filled.metrics["reward/zero_std_groups"] == pytest.approx(3 / 7)
    assert filled.metrics["response_length/mean"] == pytest.approx(13 / 7)


@pytest.mark.parametrize(("refills", "rounds"), [(0, [3]), (1, [3, 2]), (3, [3, 2, 2, 1]), (9, [3, 2, 2, 1])])
def test_no_more_rounds_than_allowed(refills, rounds):
    # 0 stays of 0 1 2, none of 3 4, 5 of 5 6, 7.
    source = Source(0, 5, 7)
    filled = sample_until_full(source.ask, 3, filtering(max_refills=refills))
    assert source.rounds == rounds
    counts = filled.counts
    assert counts.used == len(filled.experience.rollouts.prompts)
    assert counts.used + counts.dropped == 3 + counts.refilled == sum(rounds)


@given(places=st.integers(1, 6), refills=st.integers(0, 5), good=st.sets(st.integers(0, 40)))
def test_every_prompt_is_used_or_dropped(places, refills, good):
    source = Source(*good)
    try:
        filled = sample_until_full(source.ask, places, filtering(max_refills=refills))
    except RunError:
        assert not good & set(range(source.next)) and len(source.rounds) == 1 + refills
        return
    counts, taken = filled.counts, source.next
    kept = [number for number in range(taken) if number in good]
    assert filled.experience.rollouts.text == tuple(f"p{number} {row}" for number in kept for row in range(2))
    assert counts == PromptCounts(len(kept), taken - len(kept), taken - places)
    assert len(kept) == places or (len(kept) < places and len(source.rounds) == 1 + refills)


def test_a_short_batch_continues_or_stops():
    filled = sample_until_full(Source(1).ask, 3, filtering(max_refills=1))
    assert filled.counts == PromptCounts(used=1, dropped=4, refilled=2)
    check_full_batch(filled, 3, filtering())
    check_full_batch(filled, 3, None)
    stop = filtering(on_short_batch="stop", max_refills=1)
    with pytest.raises(RunError, match=r"after 1 refills 1 of the 3 .* Set optimization.on_short_batch=continue"):
        check_full_batch(filled, 3, stop)
    check_full_batch(sample_until_full(Source(0, 1, 2).ask, 3, stop), 3, stop)


def test_an_empty_batch_is_reported():
    with pytest.raises(RunError, match="none of 15 prompts has a spread of overall"):
        sample_until_full(Source().ask, 3, filtering())
    misnamed = Filtering(GroupFilter("mean", filter_key="acuracy"), max_refills=0)
    with pytest.raises(RunError, match=r"a mean acuracy in \(0.01, 0.99\) \(the rewards have overall, accuracy\)"):
        sample_until_full(Source(0).ask, 3, misnamed)


def test_counts_add_up():
    counts = PromptCounts(3, 1, 1) + PromptCounts(4, 2, 2)
    assert counts == PromptCounts(7, 3, 3)
    assert counts.metrics() == {
        "filtering/prompts_used_so_far": 7,
        "filtering/prompts_dropped_so_far": 3,
        "filtering/prompts_refilled_so_far": 3,
    }


def test_dropped_prompts_do_not_keep_their_pixels():
    alive = []

    def ask(count):
        answers = Source(*([] if alive else [0])).ask(count)
        pixels = [np.zeros(8) for _ in range(count)]
        alive.extend(map(weakref.ref, pixels))
        prompts = [replace(p, media=(each,)) for p, each in zip(answers.rollouts.prompts, pixels, strict=True)]
        assert sum(ref() is not None for ref in alive) <= count + 1, "those of the round, and the one that stayed"
        return replace(answers, rollouts=replace(answers.rollouts, prompts=tuple(prompts)))

    sample_until_full(ask, 3, filtering(max_refills=2))
    assert len(alive) == 7


def test_rounds_without_images_or_token_weights_leave_those_of_others():
    """A refill is small, and may hold text alone: its rows have no attention, and a function may bring no weights."""
    first, second = Source(0).ask(2), Source(0).ask(1)
    looked = Signals(attention_mass=torch.ones(4, 2, 5, 2), prompt_attention_mass=torch.ones(4, 5, 2))
    weighted = replace(first.rewards, token_weights=torch.full((4, 2), 2.0))
    text = replace(second.rollouts, prompts=(fake_prompt("text", visual=False),))
    rounds = iter([replace(first, signals=looked, rewards=weighted), replace(second, rollouts=text)])
    experience = sample_until_full(lambda count: next(rounds), 2, filtering()).experience
    assert experience.signals.attention_mass.shape[0] == 4 and experience.signals.attention_mass[:2].eq(1).any()
    assert (
        experience.signals.attention_mass[2:].eq(0).all() and experience.signals.prompt_attention_mass[2:].eq(0).all()
    )
    assert experience.rewards.token_weights[:2].tolist() == [[2, 2]] * 2
    assert experience.rewards.token_weights[2:, 0].tolist() == [1, 1]
