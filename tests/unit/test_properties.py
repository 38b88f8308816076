"""Laws that hold for every batch: rows in any order, any padding, any split, nothing outside the mask.

A `Step` is a random rollout batch with every stream a step has. `train_batch` takes it through all of algorithms/:
advantages, S, filters, scaling, token weights, correction, term weights.
"""

import math
from dataclasses import dataclass, fields, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import INF, NAN, close, fake_rollouts, mask_of, same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mtrl.algorithms import advantages
from mtrl.algorithms.credit import (
    CreditRule,
    Scaling,
    TokenWeighting,
    assign,
    attention_weights,
    top_fraction,
    trajectory_scale,
)
from mtrl.algorithms.groups import row_mean
from mtrl.algorithms.losses import Loss, PolicyLoss, mismatch_correction, term_weights, total_loss
from mtrl.algorithms.packing import balance, cut_groups, fill_micro_batches, optimizer_steps, row_index
from mtrl.algorithms.replay import ReplayBuffer, ReplayEntry
from mtrl.algorithms.rewards import combine, vgr_hard_negative_reward, vgr_reward
from mtrl.algorithms.signals import pool_sizes, segment, sequence_mass, vgr, visual_dependency
from mtrl.types import Credit, Rollouts, Signals, TrainBatch, take_rows

MAX_LENGTH = 12


@dataclass(frozen=True)
class Step:
    rollouts: Rollouts
    rewards: Tensor  # [N]
    old: Tensor  # [N, T], and so are all that follow
    perturbed: Tensor
    entropy: Tensor
    reference: Tensor
    behaviour: Tensor
    logp: Tensor
    mass: Tensor  # [N, T, 2]

    def rows(self, index: Tensor) -> "Step":
        return take_rows(self, index)

    def widened(self, extra: int, fill: float) -> "Step":
        """More padding, and `fill` wherever nothing is valid."""
        mask = torch.nn.functional.pad(self.rollouts.mask, (0, extra))

        def widen(x: Tensor) -> Tensor:
            if x.ndim == 1:
                return x
            tail = x.new_full((len(x), extra, *x.shape[2:]), 0)
            return torch.cat([x, tail], 1).where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), fill)

        streams = {f.name: widen(getattr(self, f.name)) for f in fields(self) if f.name != "rollouts"}
        rollouts = replace(self.rollouts, mask=mask, tokens=torch.nn.functional.pad(self.rollouts.tokens, (0, extra)))
        return Step(rollouts, **streams)


@st.composite
def steps(draw, min_rows=1, empty_rows=True):
    """Uneven groups in mixed order, some without an image, some rows of one token, some rows of none."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) >= min_rows))
    visual = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    group = draw(st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]))
    shortest = 0 if empty_rows else 1
    lengths = draw(st.lists(st.integers(shortest, 9), min_size=len(group), max_size=len(group)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rollouts = fake_rollouts(lengths, group, visual, width=max([*lengths, 1]))

    def stream(*shape, low=0.0, high=1.0):
        return low + (high - low) * torch.rand(*rollouts.mask.shape, *shape, generator=random)

    old = stream(low=-3)
    return Step(
        rollouts,
        rewards=torch.randint(0, 4, (len(group),), generator=random) / 2,  # ties and flat groups do occur
        old=old,
        perturbed=old + stream(low=-2, high=1),
        entropy=stream(high=2),
        reference=old + stream(low=-1),
        behaviour=old + stream(low=-1),
        logp=old + stream(low=-1),
        mass=stream(2, low=0.01),
    )


FULL_RULE = CreditRule(0.4, 0.2, Scaling(), TokenWeighting(smooth_sigma=1.0))
MASK_RULE = replace(FULL_RULE, weighting=TokenWeighting(target="mask"))
RULES = st.sampled_from([CreditRule(), CreditRule(perception_top_p=0.4), FULL_RULE, MASK_RULE])
LOSSES = st.sampled_from(
    [
        Loss(PolicyLoss(kind, level), penalty, 0.1, 0.06)
        for kind in ("ppo", "cispo", "sapo")
        for level in ("token", "sequence")
        for penalty in ("kl", "abs", "mse", "low_var_kl")
    ]
)
LOSS_TYPES = st.sampled_from(["grpo", "dapo", "bnpo", "dr_grpo"])
DENOMINATORS = st.sampled_from(["all", "selected"])


def signals_of(step: Step) -> Signals:
    dependency = visual_dependency(step.old, step.perturbed, step.rollouts.mask)
    return Signals(old=step.old, dependency=dependency, entropy=step.entropy)


def weights_of(step: Step, rule: TokenWeighting) -> Tensor:
    sizes = pool_sizes(step.rollouts.prompts)[step.rollouts.group]
    return attention_weights(step.mass, sizes, step.rollouts.mask, rule)


DECIDED = ("advantage", "select", "measure", "scale")  # what credit decides; its weights are there to be looked at


def credit_of(step: Step, rule: CreditRule) -> Credit:
    rollouts = step.rollouts
    advantage = advantages.grpo(step.rewards, rollouts.group, rollouts.mask)
    weights = weights_of(step, rule.weighting) if rule.weighting else None
    return assign(rule, advantage, rollouts.mask, rollouts.visual, signals_of(step), weights)


def train_batch(step: Step, rule: CreditRule, loss_type="dapo", denominator="all", silenced=None) -> TrainBatch:
    mask = step.rollouts.mask
    credit = credit_of(step, rule)
    weights = term_weights(credit.measure, credit.select, loss_type, MAX_LENGTH, denominator, silenced)
    correction = mismatch_correction(step.old, step.behaviour, mask, 2.0, "sequence")
    return TrainBatch(step.rollouts, step.old, credit.advantage, correction, weights, step.reference)


def loss_of(logp: Tensor, batch: TrainBatch, loss: Loss) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logp = logp.detach().clone().requires_grad_()
    total, metrics = total_loss(logp, batch, loss)
    (grad,) = torch.autograd.grad(total, logp)
    return total.detach(), grad, metrics


def assert_records_close(actual, expected, **tolerance) -> None:
    for f in fields(expected):
        torch.testing.assert_close(getattr(actual, f.name), getattr(expected, f.name), **tolerance, msg=f.name)


# ---- rows in any order ----


@given(steps(), RULES, st.randoms(use_true_random=False))
def test_permuting_rollouts_permutes_credit(step, rule, random):
    order = torch.tensor(random.sample(range(len(step.rollouts)), len(step.rollouts)))
    credit = credit_of(step, rule)
    # Sums in another order: float64 inside, so at most a last bit of float32.
    assert_records_close(credit_of(permuted(step, order), rule), take_rows(credit, order), rtol=3e-7, atol=1e-9)


@given(steps(), RULES, LOSS_TYPES, DENOMINATORS, LOSSES, st.randoms(use_true_random=False))
def test_permuting_rollouts_permutes_weights_and_keeps_the_loss(step, rule, loss_type, denominator, loss, random):
    order = torch.tensor(random.sample(range(len(step.rollouts)), len(step.rollouts)))
    batch = train_batch(step, rule, loss_type, denominator)
    other = train_batch(permuted(step, order), rule, loss_type, denominator)
    assert_records_close(other.weights, take_rows(batch.weights, order), rtol=3e-7, atol=1e-9)
    total, grad, _ = loss_of(step.logp.double(), batch, loss)
    other_total, other_grad, _ = loss_of(step.logp.double()[order], other, loss)
    close(other_total, total, rtol=1e-6, atol=1e-7)
    close(other_grad, grad[order], rtol=1e-6, atol=1e-7)


def permuted(step: Step, order: Tensor) -> Step:
    """Rows in another order with all prompts kept, so that group numbers stay."""
    shuffled = step.rows(order)
    return replace(
        shuffled, rollouts=replace(shuffled.rollouts, prompts=step.rollouts.prompts, group=step.rollouts.group[order])
    )


@given(steps(), st.randoms(use_true_random=False))
def test_permuting_rollouts_permutes_every_estimator_and_reward(step, random):
    rollouts, order = step.rollouts, torch.tensor(random.sample(range(len(step.rollouts)), len(step.rollouts)))
    shuffled = permuted(step, order)

    def everything(step: Step) -> list[Tensor]:
        group, mask, r = step.rollouts.group, step.rollouts.mask, step.rewards
        baseline = torch.linspace(0, 1, len(rollouts.prompts))
        placed = advantages.token_rewards(r, mask, step.entropy)
        ratio = vgr(sequence_mass(step.mass[:, :, None], mask)[:, 0], pool_sizes(step.rollouts.prompts)[group])
        return [
            *(advantages.grpo(r, group, mask, scale) for scale in ("group", "batch", "none")),
            advantages.rloo(r, group, mask),
            advantages.remax(r, group, mask, baseline),
            advantages.reinforce_plus_plus(placed, mask, 0.9),
            *advantages.gae(placed, step.old, mask, 0.9, 0.8),
            combine({"a": r, "b": ratio}, [1, 2], group, "normalize_then_sum"),
            *(vgr_reward(ratio, group, normalizer) for normalizer in ("iqr", "mad")),
            *(vgr_hard_negative_reward(ratio, (r > 0).float(), group, "iqr", pool) for pool in ("correct", "group")),
        ]

    for actual, expected in zip(everything(shuffled), everything(step), strict=True):
        torch.testing.assert_close(actual, expected[order], rtol=1e-6, atol=1e-6, equal_nan=True)


@given(steps(min_rows=2))
def test_rloo_is_the_centred_reward_stretched(step):
    # r_i - (n m - r_i)/(n - 1) = n/(n - 1) * (r_i - m), for groups of two and more; sums to 0 in the group.
    group, mask = step.rollouts.group, mask_of(*[1] * len(step.rewards))
    n = torch.bincount(group)[group].double()
    centred = advantages.grpo(step.rewards, group, mask, "none")[:, 0].double()
    close(advantages.rloo(step.rewards, group, mask)[:, 0], (n / (n - 1).clamp(min=1)) * centred, atol=1e-6)


# ---- any padding, and nothing outside the mask ----


@given(steps(), RULES, LOSS_TYPES, st.integers(0, 3), st.sampled_from([0.0, 1e30, -1e30, INF, -INF, NAN]))
def test_credit_and_weights_ignore_padding(step, rule, loss_type, extra, fill):
    wide = step.widened(extra, fill)
    width = step.rollouts.mask.shape[1]
    expected, actual = train_batch(step, rule, loss_type), train_batch(wide, rule, loss_type)
    for name in ("advantage", "correction"):
        same(getattr(actual, name)[:, :width], getattr(expected, name))
    for f in fields(expected.weights):
        wide_weights = getattr(actual.weights, f.name)
        torch.testing.assert_close(wide_weights[:, :width], getattr(expected.weights, f.name), rtol=2e-7, atol=0)
        assert (wide_weights[~wide.rollouts.mask] == 0).all()
    credit = credit_of(wide, rule)
    assert (credit.advantage[~wide.rollouts.mask] == 0).all()
    assert (credit.measure[~wide.rollouts.mask] == 0).all()
    assert not credit.select[~wide.rollouts.mask].any()


@given(steps(), LOSSES, st.integers(0, 3), st.sampled_from([0.0, 1e30, -1e30, INF, -INF, NAN]))
def test_the_loss_ignores_padding(step, loss, extra, fill):
    wide = step.widened(extra, fill)
    width = step.rollouts.mask.shape[1]
    total, grad, metrics = loss_of(step.logp, train_batch(step, FULL_RULE), loss)
    other_total, other_grad, other_metrics = loss_of(wide.logp, train_batch(wide, FULL_RULE), loss)
    close(other_total, total, rtol=1e-5, atol=1e-6)  # float32 sums of another length
    close(other_grad[:, :width], grad, rtol=1e-6)
    assert (other_grad[~wide.rollouts.mask] == 0).all()
    for name, value in metrics.items():
        close(other_metrics[name], value, rtol=1e-5, atol=1e-6)


@given(steps(), st.integers(0, 3), st.sampled_from([0.0, 1e30, INF, NAN]))
def test_estimators_ignore_padding(step, extra, fill):
    wide = step.widened(extra, fill)
    width = step.rollouts.mask.shape[1]

    def everything(step: Step) -> list[Tensor]:
        mask = step.rollouts.mask
        placed = advantages.token_rewards(step.rewards, mask, step.entropy)
        return [
            placed,
            advantages.reinforce_plus_plus(placed, mask, 0.9),
            *advantages.gae(placed, step.old, mask, 0.9, 0.8),
        ]

    for actual, expected in zip(everything(wide), everything(step), strict=True):
        torch.testing.assert_close(actual[:, :width], expected, rtol=1e-6, atol=1e-6)
        assert (actual[~wide.rollouts.mask] == 0).all()
    mask = step.rollouts.mask
    charged = advantages.charge(step.rewards, wide.entropy, wide.rollouts.mask)
    same(charged, advantages.charge(step.rewards, step.entropy, mask))
    masses = [sequence_mass(s.mass[:, :, None], s.rollouts.mask) for s in (wide, step)]
    same(*masses)


# ---- any split ----


@given(steps(min_rows=2), RULES, LOSS_TYPES, DENOMINATORS, LOSSES, st.booleans(), st.randoms(use_true_random=False))
def test_micro_batches_only_add(step, rule, loss_type, denominator, loss, truncate, random):
    """Any partition of the rows: losses and metrics add up, gradients are those of the whole; to 1e-12 in float64."""
    rows = len(step.rollouts)
    silenced = torch.arange(rows) % 2 == 0 if truncate else None
    batch = train_batch(step, rule, loss_type, denominator, silenced)
    logp = step.logp.double()
    total, grad, metrics = loss_of(logp, batch, loss)

    order = random.sample(range(rows), rows)
    cuts = sorted(random.sample(range(1, rows), random.randint(0, rows - 1)))
    parts = [torch.tensor(order[a:b]) for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    added = torch.zeros((), dtype=torch.float64)
    added_metrics = dict.fromkeys(metrics, 0.0)
    for index in parts:
        part_total, part_grad, part_metrics = loss_of(logp[index], batch.rows(index), loss)
        added += part_total
        close(part_grad, grad[index], rtol=1e-12, atol=1e-15)
        for name, value in part_metrics.items():
            added_metrics[name] += value.item()
    close(added, total, rtol=1e-12, atol=1e-12)
    for name, value in metrics.items():
        assert added_metrics[name] == pytest.approx(value.item(), rel=1e-6, abs=1e-6)  # some are counted in float32


# ---- weights of one are plain GRPO ----


@given(steps(), LOSSES, LOSS_TYPES, st.sampled_from(["advantage", "mask"]))
def test_weights_and_scales_of_one_equal_plain_grpo_to_the_bit(step, loss, loss_type, target):
    # No image changed anything (S = 0, so a flat range), every token weight is 1, all tokens are kept.
    step = replace(step, perturbed=step.old, mass=torch.full_like(step.mass, 0.25))
    rule = CreditRule(1.0, 1.0, Scaling(), TokenWeighting(target, smooth_sigma=0.0))
    shaped, plain = credit_of(step, rule), credit_of(step, CreditRule())
    for name in DECIDED:
        same(getattr(shaped, name), getattr(plain, name))
    results = [loss_of(step.logp, train_batch(step, r, loss_type), loss) for r in (rule, CreditRule())]
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])


@given(steps(min_rows=2, empty_rows=False), LOSS_TYPES)
def test_plain_grpo_equals_a_loop_in_python(step, loss_type):
    rollouts = step.rollouts
    group, lengths = rollouts.group.tolist(), rollouts.mask.sum(1).tolist()
    row_losses = []
    for i, n in enumerate(lengths):
        mates = [step.rewards[j].item() for j in range(len(group)) if group[j] == group[i]]
        mean = sum(mates) / len(mates)
        std = math.sqrt(sum((r - mean) ** 2 for r in mates) / max(len(mates) - 1, 1))
        advantage = (step.rewards[i].item() - mean) / (std + 1e-6) if std > 0 else 0.0
        losses = []
        for t in range(n):
            rho = math.exp(step.logp[i, t].item() - step.old[i, t].item())
            gain = min(rho * advantage, min(max(rho, 0.8), 1.3) * advantage)
            losses.append(-max(gain, 3 * advantage) if advantage < 0 else -gain)
        row_losses.append(losses)
    rows = len(lengths)
    expected = {
        "grpo": sum(sum(losses) / len(losses) for losses in row_losses) / rows,
        "dapo": sum(map(sum, row_losses)) / sum(lengths),
        "bnpo": sum(map(sum, row_losses)) / sum(lengths),
        "dr_grpo": sum(map(sum, row_losses)) / (rows * MAX_LENGTH),
    }[loss_type]
    batch = train_batch(step, CreditRule(), loss_type)
    batch = replace(batch, correction=torch.ones_like(batch.correction))
    total, _ = total_loss(step.logp.double(), batch, Loss())
    assert total.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


# ---- filters ----


@given(st.integers(0, 100), st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(0, 2**31), st.booleans())
def test_exactly_k_tokens_are_kept(percent, lengths, seed, ties):
    # k = ceil(p n) of the exact fraction, at least 1 (and no more than there are): float rounding must not show.
    mask = mask_of(*lengths, width=max([*lengths, 1]))
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
    rule = CreditRule(0.2, entropy_top_p, Scaling(), TokenWeighting() if weighting else None)
    plain = CreditRule(entropy_top_p=entropy_top_p)
    credit, expected = credit_of(step, rule), credit_of(step, plain)
    text_only = ~step.rollouts.visual
    for name in DECIDED:
        same(getattr(credit, name)[text_only], getattr(expected, name)[text_only])
    # And visual rows do not notice them: without the text-only rows the scales are the same.
    if step.rollouts.visual.any():
        index = step.rollouts.visual.nonzero().flatten()
        same(credit_of(step.rows(index), rule).scale, credit.scale[index])


@given(steps(), st.floats(0.0, 1.0), st.one_of(st.none(), st.floats(1.0, 5.0)))
def test_scale_has_mean_one_unless_capped(step, low, high):
    mask = step.rollouts.mask
    dependency = visual_dependency(step.old, step.perturbed, mask)
    scored = step.rollouts.visual & mask.any(1)
    scale = trajectory_scale(dependency, mask, step.rollouts.visual, Scaling(low, high)).double()
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
    # Who looks more gets no less.
    order = row_mean(dependency, mask)[scored].argsort()
    assert (scale[scored][order].diff() >= 0).all()


@given(steps(), st.sampled_from([0.0, 0.7, 2.0]))
def test_token_weights_have_mean_one_before_the_clip(step, sigma):
    weights = weights_of(step, TokenWeighting(clip=(0.0, INF), smooth_sigma=sigma))
    mask = step.rollouts.mask
    filled = mask.any(1)
    close(row_mean(weights, mask)[filled], torch.ones(int(filled.sum())), rtol=1e-5)
    assert (weights[~mask] == 1).all()
    assert (weights[~step.rollouts.visual] == 1).all()


@given(steps(), st.sampled_from([(0.2, 3.0), (0.5, 2.0)]), st.sampled_from([None, 0.2, 0.6]))
def test_token_weights_stay_within_their_clip(step, clip, top_ratio):
    weights = weights_of(step, TokenWeighting(clip=clip, top_ratio=top_ratio))
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


@given(packings(), st.integers(1, 4))
def test_optimizer_steps_hold_every_row_once_and_whole_groups(case, prompts_per_step):
    group = case[0]
    steps = optimizer_steps(group, prompts_per_step)
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
    for name in ("tokens", "mask", "behaviour", "version", "visual", "truncated"):
        same(getattr(part, name), getattr(rollouts, name)[index])
    assert part.text == tuple(rollouts.text[i] for i in index.tolist())
    assert part.finish == tuple(rollouts.finish[i] for i in index.tolist())


@given(steps(), st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_rows_of_a_batch_follow_one_another(step, picks):
    batch = train_batch(step, FULL_RULE)
    index = torch.tensor([pick % len(batch) for pick in picks])
    part = batch.rows(index)
    assert len(part) == len(index)
    for name in ("old", "advantage", "correction", "reference"):
        same(getattr(part, name), getattr(batch, name)[index])
    for f in fields(batch.weights):
        same(getattr(part.weights, f.name), getattr(batch.weights, f.name)[index])
    assert part.returns is None
    same(part.rollouts.tokens, batch.rollouts.tokens[index])
    assert [part.rollouts.prompts[g].task.id for g in part.rollouts.group.tolist()] == [
        batch.rollouts.prompts[g].task.id for g in batch.rollouts.group[index].tolist()
    ]


def test_the_mass_of_a_segment_survives_the_sequence_mean():
    mass = torch.rand(2, 3, 5, 2, generator=torch.Generator().manual_seed(0))
    mask = mask_of(3, 2)
    same(segment(sequence_mass(mass, mask), "late"), sequence_mass(mass[:, :, 2:3], mask)[:, 0])


def test_rows_may_be_chosen_by_a_bool():
    rollouts = fake_rollouts([2, 1, 3])
    chosen = rollouts.rows(torch.tensor([False, True, True]))
    assert chosen.text == rollouts.text[1:]
    same(chosen.version, rollouts.version[1:])
