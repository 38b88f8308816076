"""Laws of the single parts, for every input: filters, factors and token weights; packing, replay, rows of records."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import INF, close, fake_rollouts, make_mask, same
from hypothesis import given
from hypothesis import strategies as st
from property_helpers import ALL_RULES, DECIDED, assign_credit, compute_weights, steps, train_batch

from mtrl.algorithms.batches import optimizer_steps
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.groups import row_mean, top_fraction
from mtrl.algorithms.packing import balance, cut_groups, fill_micro_batches, row_index
from mtrl.algorithms.replay import ReplayBuffer, ReplayEntry
from mtrl.algorithms.signals import segment, sequence_mass, visual_dependency

# ---- filters ----


@given(st.integers(0, 100), st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(0, 2**31), st.booleans())
def test_exactly_k_tokens_are_kept(percent, lengths, seed, ties):
    # k = ceil(p n) of the exact fraction, at least 1 (and no more than there are): float rounding must not show.
    mask = make_mask(*lengths, width=max([*lengths, 1]))
    score = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))
    if ties:
        score = (score * 3).floor()
    kept = top_fraction(score, mask, percent / 100)
    assert not (kept & ~mask).any()
    for row, n in enumerate(lengths):
        k = min(max(math.ceil(Fraction(percent, 100) * n), 1), n)
        assert kept[row].sum() == k
        # The first k of a stable sort by falling score.
        best = sorted(range(n), key=lambda t, row=row: (-score[row, t].item(), t))[:k]
        assert kept[row].nonzero().flatten().tolist() == sorted(best)


@given(steps(), st.sampled_from([None, 0.2, 0.5]), st.booleans())
def test_text_only_rows_are_untouched(step, entropy_top_p, weighting):
    plain = () if entropy_top_p is None else (EntropyFilter(entropy_top_p),)
    rules = (PerceptionFilter(0.2), *plain, TrajectoryScaling(), *([AttentionWeights()] if weighting else []))
    credit, expected = assign_credit(step, rules), assign_credit(step, plain)
    text_only = ~step.rollouts.visual
    for name in DECIDED:
        same(getattr(credit, name)[text_only], getattr(expected, name)[text_only])
    # And visual rows do not notice them: without the text-only rows the scales are the same.
    if step.rollouts.visual.any():
        index = step.rollouts.visual.nonzero().flatten()
        same(assign_credit(step.rows(index), rules).response_weight, credit.response_weight[index])


@given(steps(), st.floats(0.0, 1.0), st.one_of(st.none(), st.floats(1.0, 5.0)))
def test_scale_has_mean_one_unless_capped(step, low, high):
    mask = step.rollouts.mask
    dependency = visual_dependency(step.old, step.perturbed, mask)
    scored = step.rollouts.visual & mask.any(1)
    scale = TrajectoryScaling(low, high).scale(dependency, mask, step.rollouts.visual).double()
    assert (scale[~scored] == 1).all()
    if not scored.any():
        return
    assert scale[scored].min() >= low - 1e-6
    mean = scale[scored].mean().item()
    if high is None:
        assert mean == pytest.approx(1, abs=1e-5)
    else:
        assert scale.max() <= high + 1e-6
        assert mean <= 1 + 1e-5
        # The mean is less than one only where the cap is reached.
        assert mean == pytest.approx(1, abs=1e-5) or scale.max().item() == pytest.approx(high, rel=1e-6)
    # A token with more vision attention never gets a smaller weight.
    order = row_mean(dependency, mask)[scored].argsort()
    assert (scale[scored][order].diff() >= 0).all()


@given(steps(), st.sampled_from([0.0, 0.7, 2.0]))
def test_token_weights_have_mean_one_before_the_clip(step, sigma):
    weights = compute_weights(step, AttentionWeights(token_weight_clip=(0.0, INF), token_weight_smooth_sigma=sigma))
    mask = step.rollouts.mask
    filled = mask.any(1)
    close(row_mean(weights, mask)[filled], torch.ones(int(filled.sum())), rtol=1e-5)
    assert (weights[~mask] == 1).all()
    assert (weights[~step.rollouts.visual] == 1).all()


@given(steps(), st.sampled_from([(0.2, 3.0), (0.5, 2.0)]), st.sampled_from([None, 0.2, 0.6]))
def test_token_weights_stay_within_their_clip(step, clip, top_ratio):
    weights = compute_weights(step, AttentionWeights(token_weight_clip=clip, token_weight_top_ratio=top_ratio))
    assert weights.min() >= clip[0]
    assert weights.max() <= clip[1]
    if top_ratio is not None:
        n = step.rollouts.mask.sum(1)
        k = (Fraction(top_ratio).limit_denominator(10) * int(m) for m in n)
        for row, most in enumerate(map(math.ceil, k)):
            assert (weights[row] != 1).sum() <= max(most, 1)


# ---- packing ----


@st.composite
def packings(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    group = draw(st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]))
    responses = draw(st.lists(st.integers(1, 30), min_size=len(group), max_size=len(group)))
    prompts = draw(st.lists(st.integers(1, 50), min_size=len(sizes), max_size=len(sizes)))
    return torch.tensor(group), torch.tensor(responses), prompts, draw(st.integers(1, 120)), draw(st.booleans())


@given(packings(), st.integers(1, 4))
def test_packing(case, ranks):
    group, responses, prompts, budget, share = case
    pieces = cut_groups(group, responses, prompts, budget, share)

    def cost(rows):
        """What a pass over these rows of one group computes."""
        prompt = prompts[int(group[rows[0]])]
        return (prompt if share else prompt * len(rows)) + int(responses[list(rows)].sum())

    assert sorted(row for piece in pieces for row in piece.rows) == list(range(len(group)))
    for piece in pieces:
        assert len(set(group[list(piece.rows)].tolist())) == 1
        assert piece.tokens == cost(piece.rows)
        assert piece.tokens <= budget or len(piece.rows) == 1
    for g in range(len(prompts)):
        rows = (group == g).nonzero().flatten().tolist()
        if cost(rows) <= budget:
            assert [piece.rows for piece in pieces if piece.rows[0] in rows] == [tuple(rows)]

    batches = fill_micro_batches(pieces, budget)
    assert sorted(row for batch in batches for row in row_index(batch).tolist()) == list(range(len(group)))
    for batch in batches:
        assert batch
        assert sum(piece.tokens for piece in batch) <= budget or len(batch) == 1
    # First fit leaves no two micro-batches that would fit into one.
    loads = sorted(sum(piece.tokens for piece in batch) for batch in batches)
    assert len(loads) < 2 or loads[0] + loads[1] > budget

    shares = balance(pieces, ranks)
    assert len(shares) == ranks
    assert sorted(row for share_ in shares for row in row_index(share_).tolist()) == list(range(len(group)))
    rank_loads = [sum(piece.tokens for piece in share_) for share_ in shares]
    assert max(rank_loads) - min(rank_loads) <= max(piece.tokens for piece in pieces)


@given(packings(), st.integers(1, 4), st.sampled_from([(), (1, 2)]))
def test_optimizer_steps_hold_every_row_once_and_whole_groups(case, prompts_per_step, key):
    group = case[0]
    steps = optimizer_steps(group, prompts_per_step, key)
    assert sorted(torch.cat(steps).tolist()) == list(range(len(group)))
    held = [set(group[rows].tolist()) for rows in steps]
    assert all(len(groups) == prompts_per_step for groups in held[:-1])
    assert sum(map(len, held)) == int(group.max()) + 1  # no group in two steps


# ---- replay ----


@given(
    st.integers(0, 5),
    st.lists(
        st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0])), max_size=6), max_size=5
    ),
    st.integers(0, 6),
    st.integers(0, 2**31),
)
def test_replay_buffer(capacity, waves, count, seed):
    buffer: ReplayBuffer[int] = ReplayBuffer(capacity)
    for age, wave in enumerate(waves):
        before = {entry.key: entry for entry in buffer.entries}
        candidates = {key: ReplayEntry(key, score, age) for key, score in wave}
        buffer = buffer.admit(candidates.values())
        held = [entry.score for entry in buffer.entries]
        assert len({entry.key for entry in buffer.entries}) == len(held) <= capacity
        assert held == sorted(held, reverse=True)
        pool = before | candidates
        assert all(pool[entry.key] is entry for entry in buffer.entries)
        assert held == sorted((entry.score for entry in pool.values()), reverse=True)[:capacity]
    drawn = buffer.draw(count, np.random.default_rng(seed))
    assert len({entry.key for entry in drawn}) == len(drawn)
    assert len(drawn) == min(count, sum(entry.score > 0 for entry in buffer.entries))
    assert all(entry.score > 0 and entry in buffer.entries for entry in drawn)


# ---- records ----


@given(steps(), st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_rows_of_rollouts_keep_their_prompts(step, picks):
    rollouts = step.rollouts
    index = torch.tensor([pick % len(rollouts) for pick in picks])  # in any order, some twice
    part = rollouts.rows(index)
    assert len(part) == len(index)
    assert len(part.prompts) == len(set(rollouts.group[index].tolist()))
    assert part.group.tolist() == [part.prompts.index(rollouts.prompts[rollouts.group[i]]) for i in index.tolist()]
    assert set(part.group.tolist()) == set(range(len(part.prompts)))
    for name in ("tokens", "mask", "rollout_logprobs", "version", "visual", "truncated"):
        same(getattr(part, name), getattr(rollouts, name)[index])
    assert part.text == tuple(rollouts.text[i] for i in index.tolist())
    assert part.finish_reason == tuple(rollouts.finish_reason[i] for i in index.tolist())


@given(steps(), st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_rows_of_a_batch_follow_one_another(step, picks):
    batch = train_batch(step, ALL_RULES)
    index = torch.tensor([pick % len(batch) for pick in picks])
    part = batch.rows(index)
    assert len(part) == len(index)
    for name in ("old_logprobs", "advantage", "correction", "ref_logprobs"):
        same(getattr(part, name), getattr(batch, name)[index])
    for name in ("policy", "divergence", "token", "gap"):
        same(getattr(part.weights, name), getattr(batch.weights, name)[index])
    assert part.returns is None
    same(part.rollouts.tokens, batch.rollouts.tokens[index])
    assert [part.rollouts.prompts[g].task.id for g in part.rollouts.group.tolist()] == [
        batch.rollouts.prompts[g].task.id for g in batch.rollouts.group[index].tolist()
    ]


def test_the_mass_of_a_segment_survives_the_sequence_mean():
    mass = torch.rand(2, 3, 5, 2, generator=torch.Generator().manual_seed(0))
    mask = make_mask(3, 2)
    same(segment(sequence_mass(mass, mask), "late"), sequence_mass(mass[:, :, 2:3], mask)[:, 0])


def test_rows_may_be_chosen_by_a_bool():
    rollouts = fake_rollouts([2, 1, 3])
    chosen = rollouts.rows(torch.tensor([False, True, True]))
    assert chosen.text == rollouts.text[1:]
    same(chosen.version, rollouts.version[1:])
