"""Rows of records: selected and concatenated. The batch of a step may come from several calls."""

from dataclasses import fields, replace

import torch
from helpers import NAN, close, fake_experience, fake_rollouts, padded, same
from hypothesis import given
from hypothesis import strategies as st
from property_helpers import ALL_RULES, assign_credit, make_experience, steps
from torch import Tensor

from mtrl.algorithms.credit import assign
from mtrl.types import AttentionMap, Rewards, Rollouts, Signals
from mtrl.utils.record_rows import as_index, join_rows, take_rows


def reward_description(total, **parts):
    return Rewards(torch.tensor(total), {k: torch.tensor(v) for k, v in parts.items()}, torch.tensor(total) < 0)


def ids(rollouts):
    """The task of each row."""
    return [rollouts.prompts[g].task.id for g in rollouts.group.tolist()]


# -------------------------------------------------------------------------------------------------------------- picking
def test_attention_maps_of_several_passes_are_in_order():
    """Responses without an image have none, for results of ranks and of passes."""
    maps = [AttentionMap(torch.full((2, 3), level, dtype=torch.uint8), torch.ones(2)) for level in (7, 8)]
    joined = join_rows([Signals(attention_maps=(maps[0], None)), Signals(attention_maps=(maps[1],))])
    assert take_rows(joined, torch.tensor([2, 1, 0])).attention_maps == (maps[1], None, maps[0])
    assert join_rows([Signals(attention_maps=(None,)), Signals()]).attention_maps is None
    close(maps[0].shares, torch.full((2, 3), (7 / 255) ** 2))


def test_rows_of_rewards_take_everything_along():
    rewards = replace(
        reward_description([1.0, -2.0, 3.0], accuracy=[1.0, 0.0, NAN], length=[0.1, 0.2, 0.3]),
        baseline=torch.tensor([5.0, 6.0, 7.0]),
        token_weights=padded([[1, 2], [3, 4], [5, 6]]),
    )
    part = take_rows(rewards, torch.tensor([2, 0]))
    assert part.total.tolist() == [3.0, 1.0] and list(part.parts) == ["accuracy", "length"]
    close(part.parts["accuracy"], [NAN, 1.0])
    close(part.parts["length"], [0.3, 0.1])
    assert part.failed.tolist() == [False, False] and part.baseline.tolist() == [7.0, 5.0]
    close(part.token_weights, [[5, 6], [1, 2]])
    assert take_rows(rewards, torch.tensor([1])).failed.tolist() == [True]


def test_rows_by_number_or_by_a_bool_for_each():
    assert as_index(torch.tensor([False, True, True])).tolist() == [1, 2]
    assert as_index(torch.tensor([2, 0])).tolist() == [2, 0]
    rewards = reward_description([1.0, 2.0, 3.0])
    same(take_rows(rewards, torch.tensor([True, False, True])).total, torch.tensor([1.0, 3.0]))


def test_rows_of_an_experience_follow_one_another():
    rollouts = fake_rollouts([2, 1, 2], group=[0, 1, 1])
    credit = credit_of_ones(rollouts)
    experience = replace(
        fake_experience(rollouts, Signals(old_logprobs=numbered(rollouts)), 2 * numbered(rollouts), credit=credit),
        returns=3 * numbered(rollouts),
        rewards=reward_description([1.0, 2.0, 3.0], accuracy=[1.0, 0.0, NAN]),
    )
    part = experience.rows(torch.tensor([2, 1]))
    assert len(part) == 2 and ids(part.rollouts) == ["p1", "p1"] and len(part.rollouts.prompts) == 1
    assert part.rewards.total.tolist() == [3.0, 2.0]
    close(part.signals.old_logprobs, [[20, 21], [10, 11]])
    close(part.advantage, [[40, 42], [20, 22]])
    close(part.returns, [[60, 63], [30, 33]])
    same(part.credit.keep_mask, rollouts.mask[[2, 1]])
    assert part.signals.entropy is None and part.credit.weights is None


def numbered(rollouts):
    """[N, T]: row i has 10 i + t."""
    rows, width = rollouts.mask.shape
    return 10.0 * torch.arange(rows)[:, None] + torch.arange(width)


def credit_of_ones(rollouts):
    return assign((), fake_experience(rollouts, advantage=torch.ones(rollouts.mask.shape)), (0, 0))


# -------------------------------------------------------------------------------------------------------------- joining
def test_narrower_rows_are_padded():
    narrow, wide = fake_rollouts([1, 2]), fake_rollouts([3])
    joined = Rollouts.join([narrow, wide])
    assert joined.mask.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert joined.tokens.tolist() == [[0, 0, 0], [100, 101, 0], [0, 1, 2]]
    assert joined.text == ("row 0", "row 1", "row 0") and joined.finish_reason == ("stop",) * 3
    assert joined.version.tolist() == [0, 1, 0] and joined.rollout_logprobs.shape == (3, 3)
    assert Rollouts.join([wide, narrow]).mask.tolist() == [[True] * 3, [True, False, False], [True, True, False]]


def test_prompts_and_groups_are_numbered_on():
    first = fake_rollouts([1, 1, 1], group=[1, 0, 1], visual=[True, False])
    second = replace(fake_rollouts([1], visual=[False]), prompts=fake_rollouts([1, 1], group=[0, 1]).prompts[1:])
    third = fake_rollouts([1, 1], group=[0, 1])
    joined = Rollouts.join([first, second, third])
    assert joined.group.tolist() == [1, 0, 1, 2, 3, 4]
    assert joined.prompts == (*first.prompts, *second.prompts, *third.prompts)
    assert joined.visual.tolist() == [False, True, False, True, True, True]


def test_one_part_is_itself():
    rollouts = fake_rollouts([2, 1], group=[0, 1])
    joined = Rollouts.join([rollouts])
    for name in ("group", "tokens", "mask", "rollout_logprobs", "version"):
        same(getattr(joined, name), getattr(rollouts, name))
    assert joined.prompts == rollouts.prompts and joined.text == rollouts.text


def test_signals_of_one_part_alone_are_dropped():
    one = Signals(old_logprobs=torch.ones(1, 2), entropy=torch.ones(1, 2), attention_mass=torch.ones(1, 2, 5, 2))
    other = Signals(old_logprobs=torch.zeros(2, 3), dependency=torch.ones(2, 3), attention_mass=torch.ones(2, 3, 5, 2))
    joined = join_rows([one, other])
    close(joined.old_logprobs, [[1, 1, 0], [0, 0, 0], [0, 0, 0]])
    assert joined.entropy is None and joined.dependency is None
    assert (
        joined.attention_mass.shape == (3, 3, 5, 2)
        and joined.attention_mass[0, 2].sum() == 0
        and joined.attention_mass[1:].sum() == 60
    )


def test_prompt_mass_has_no_tokens_to_pad():
    mass = torch.arange(20.0).reshape(2, 5, 2)
    joined = join_rows([Signals(prompt_attention_mass=mass[:1]), Signals(prompt_attention_mass=mass[1:])])
    same(joined.prompt_attention_mass, mass)


def test_reward_parts_that_one_part_lacks_do_not_apply_there():
    one = reward_description([1.0], accuracy=[1.0], length=[-1.0])
    other = reward_description([2.0, -3.0], length=[0.0, 0.5], x=[7.0, 8.0])
    joined = join_rows([one, other])
    assert joined.total.tolist() == [1.0, 2.0, -3.0] and joined.failed.tolist() == [False, False, True]
    assert list(joined.parts) == ["accuracy", "length", "x"]
    close(joined.parts["accuracy"], [1, NAN, NAN])
    close(joined.parts["length"], [-1, 0, 0.5])
    close(joined.parts["x"], [NAN, 7, 8])
    assert joined.baseline is None and joined.token_weights is None


def test_rewards_without_parts_have_rows_too():
    joined = join_rows([reward_description([1.0, 2.0]), reward_description([3.0], accuracy=[1.0])])
    close(joined.parts["accuracy"], [NAN, NAN, 1])


def test_a_signal_missing_in_one_part_is_missing_in_the_whole():
    def experience(**more):
        return replace(fake_experience(fake_rollouts([1])), **more)

    full = experience(advantage=torch.ones(1, 1), returns=torch.ones(1, 1), credit=credit_of_ones(fake_rollouts([1])))
    joined = join_rows([full, experience(advantage=torch.ones(1, 1))])
    close(joined.advantage, [[1], [1]])
    assert joined.returns is None and joined.credit is None
    assert join_rows([full, full]).credit.keep_mask.tolist() == [[True], [True]]


# ------------------------------------------------------------------------------------------- the whole, from its pieces
def full_experience(step):
    """Everything that an experience may hold."""
    experience = make_experience(step)
    parts = {"accuracy": step.rewards > 1, "x": torch.linspace(-1, 1, len(step.rewards))}
    rewards = Rewards(
        step.rewards,
        {name: part.float() for name, part in parts.items()},
        step.rewards == 0,
        baseline=step.rewards / 3,
        token_weights=step.entropy,
    )
    signals = replace(experience.signals, prompt_attention_mass=experience.signals.attention_mass[:, 0])
    credit = assign_credit(step, ALL_RULES)
    return replace(experience, rewards=rewards, signals=signals, returns=step.reference, credit=credit)


def of_tokens(name, value):
    return isinstance(value, Tensor) and value.ndim > 1 and name != "prompt_attention_mass"


def narrowed(experience):
    """As wide as its longest response, as if it had been sampled alone."""
    width = int(experience.rollouts.mask.sum(1).max())

    def cut(record):
        values = {f.name: getattr(record, f.name) for f in fields(record)}
        return replace(record, **{name: x[:, :width] for name, x in values.items() if of_tokens(name, x)})

    nested = {name: cut(getattr(experience, name)) for name in ("rollouts", "rewards", "signals", "credit")}
    return replace(cut(experience), **nested)


def assert_same_rows(actual, expected, mask):
    """Equal on the mask, and of the same shape."""
    for f in fields(expected):
        value, other = getattr(actual, f.name), getattr(expected, f.name)
        if f.name in ("prompts", "group"):
            continue
        if f.name in ("rollouts", "rewards", "signals", "credit"):
            assert_same_rows(value, other, mask)
        elif f.name == "parts":
            assert list(value) == list(other)
            for name in other:
                same(value[name], other[name])
        elif isinstance(other, Tensor):
            assert value.shape == other.shape, f.name
            where = mask if of_tokens(f.name, other) else ...
            same(value[where], other[where])
        else:
            assert value == other, f.name


@given(steps(empty_rows=False), st.randoms(use_true_random=False), st.booleans())
def test_whole_groups_joined_are_the_rows_in_that_order(step, random, narrow):
    whole = full_experience(step)
    groups = len(whole.rollouts.prompts)
    order = random.sample(range(groups), groups)
    cuts = sorted(random.sample(range(1, groups), random.randint(0, groups - 1)))
    pieces, rows = [], []
    for begin, end in zip([0, *cuts], [*cuts, groups], strict=True):
        index = [i for i, g in enumerate(whole.rollouts.group.tolist()) if g in order[begin:end]]
        random.shuffle(index)
        rows += index
        piece = whole.rows(torch.tensor(index))
        pieces.append(narrowed(piece) if narrow else piece)
    joined, expected = join_rows(pieces), whole.rows(torch.tensor(rows))
    assert len(joined) == len(whole)
    same(joined.rollouts.mask, expected.rollouts.mask)
    assert_same_rows(joined, expected, expected.rollouts.mask)
    assert ids(joined.rollouts) == [f"p{whole.rollouts.group[i]}" for i in rows]
    assert len(joined.rollouts.prompts) == groups, "no group was cut in two"
    same(joined.rollouts.visual, expected.rollouts.visual)
