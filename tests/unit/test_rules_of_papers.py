"""Rules that carry the name of a paper, against formulas written down again in numpy and exact fractions: by hand, and
on hostile cases (ties, constants, extreme log-probs, empty rows, groups of one, texts)."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import close, fake_experience, fake_rollouts, padded, random_cases, same

from mtrl.algorithms.credit import assign
from mtrl.algorithms.credit.dyco import Dyco
from mtrl.algorithms.credit.ktae import Ktae
from mtrl.algorithms.credit.pepo import Pepo
from mtrl.algorithms.credit.pgpo import Pgpo
from mtrl.algorithms.credit.registry import make_rule
from mtrl.algorithms.credit.rule import RunFacts, apply_rule
from mtrl.algorithms.credit.vepo import Vepo
from mtrl.algorithms.credit.vgpo import Vgpo
from mtrl.algorithms.signals import SHIFTS
from mtrl.compose.algorithm import make_algorithm
from mtrl.config import load_config
from mtrl.types import Needs, Rewards, Signals

KEY = (3, 7)


def make_experience(lengths, visual=None, rewards=None, tokens=None, group=None, **signals):
    extra = {name.replace("_at_", "@"): values for name, values in signals.items() if "_at_" in name}
    extra = {name.replace("noised2", "noised(2)"): values for name, values in extra.items()}
    known = {name: values for name, values in signals.items() if "_at_" not in name}
    rollouts = fake_rollouts(lengths, group=group or range(len(lengths)), visual=visual or [True] * len(lengths))
    if tokens is not None:
        rollouts = replace(rollouts, tokens=tokens)
    count = len(lengths)
    scores = Rewards(torch.tensor(rewards or [0.0] * count), {}, torch.zeros(count, dtype=torch.bool))
    return fake_experience(rollouts, Signals(**known, extra=extra), rewards=scores)


def draw_rows(dice, values):
    """Lengths, which rows have an image, and `values` tensors: among them constants, ties and extremes."""
    lengths = dice.integers(0, 9, size=dice.integers(1, 6)).tolist()
    lengths[0] = max(lengths[0], 1)
    visual = (dice.random(len(lengths)) < 0.8).tolist()
    kinds = {
        "smooth": lambda size: dice.gamma(0.5, 1.0, size),
        "constant": lambda size: np.full(size, dice.choice([0.0, 1e-9, 0.7])),
        "ties": lambda size: dice.integers(0, 3, size).astype(float),
        "tiny": lambda size: 1e-7 * dice.random(size),
        "extreme": lambda size: dice.choice([0.0, 1e-30, 3.0, 60.0], size),
    }
    shape = (len(lengths), max(lengths))
    rows = [np.stack([kinds[dice.choice([*kinds])](shape[1]) for _ in lengths]) for _ in range(values)]
    return lengths, visual, rows


def min_max(values, added=0.0, least=0.0):
    return (values - values.min()) / max(values.max() - values.min() + added, least)


# ---------------------------------------------------------------------------------------------------------------- PGPO
def pgpo_by_definition(x, tau=0.4, beta=2.0, eps=1e-8):
    x = np.clip(x, -20, 20)
    level = min_max(np.log1p(np.expm1(x) - x), added=eps)
    weights = [i / (tau + eps) if i < tau else 1 + beta * (i - tau) / (1 - tau + eps) for i in level]
    return np.array(weights) * len(x) / sum(weights) if sum(weights) > 0 else np.ones(len(x))


def test_pgpo_by_hand():
    # k3 of x = 0 and -log 2 and -2 log 2: 0, 1/2 - 1 + log 2 = .1931, 1/4 - 1 + 2 log 2 = .6363; u = 0, .1766, .4924;
    # I = 0, .3586, 1: below .4 it is .3586 / .4 = .8966, at 1 it is 1 + 2 = 3. Of three tokens: 0, .6903, 2.3097.
    half = math.log(2)
    experience = make_experience([3], old_logprobs=padded([[-1.0, -1, -1]]),
                                 logprobs_at_none=padded([[-1.0, -1 - half, -1 - 2 * half]]))  # fmt: skip
    close(Pgpo().apply(experience, KEY), [[0, 0.69030, 2.30970]], atol=1e-4)
    assert Pgpo().apply(experience, KEY).sum() == pytest.approx(3)
    assert Pgpo.needs == Needs("old_logprobs", "logprobs@none")


def test_pgpo_hardly_tells_tokens_apart_that_are_nearly_equal():
    # u = 0, 0.5e-8, 1e-8, and eps doubles the range: I = 0, .25, .5, w = 0, .625, 1.3333.
    x = torch.tensor([[0.0, 1e-8**0.5, 2e-8**0.5]], dtype=torch.float64)
    found = Pgpo().apply(make_experience([3], old_logprobs=torch.zeros(1, 3), logprobs_at_none=x), KEY)
    close(found, [[0, 3 * 0.625 / 1.95833, 3 * 1.33333 / 1.95833]], atol=1e-3)


@random_cases
def test_pgpo_by_definition(dice):
    lengths, visual, (old, change) = draw_rows(dice, 2)
    old, other = -old, -old - change * dice.choice([-1, 1], change.shape)
    experience = make_experience(lengths, visual, old_logprobs=torch.tensor(old).float(),
                                 logprobs_at_none=torch.tensor(other).float())  # fmt: skip
    found = apply_rule(Pgpo(), experience, KEY)
    x = (torch.tensor(other).float() - torch.tensor(old).float()).double().numpy()
    for row, length in enumerate(lengths):
        expected = pgpo_by_definition(x[row, :length]) if visual[row] and length else np.ones(length)
        np.testing.assert_allclose(found[row, :length], expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------- VEPO
def vepo_by_definition(jsd, change, entropy, top_p, a=0.7):
    j, d, h = (np.clip(min_max(each, least=1e-8), 0, 1) for each in (jsd, change, entropy))
    score = (1 - (1 - j) ** a * (1 - d) ** (1 - a)) * h
    count = max(1, math.ceil(Fraction(str(top_p)) * len(score)))
    kept = np.zeros(len(score))
    kept[sorted(range(len(score)), key=lambda t: (-score[t], t))[:count]] = 1
    return kept


def test_vepo_by_hand():
    # j, d, h = (0, .5, 1), (1, 0, 0), (1, .5, 0): scores 1 * 1, (1 - .5^.7) * .5, 0. One of three counts, or two.
    signals = {"jsd_at_noised2": padded([[0.0, 0.1, 0.2]]), "entropy_at_noised2": padded([[3.0, 1, 0.5]]),
               "entropy": padded([[1.0, 0.75, 0.5]])}  # fmt: skip
    signals["entropy_at_noised2"][0, 1] = 0.75
    experience = make_experience([3], **signals)
    same(Vepo().apply(experience, KEY), padded([[1.0, 0, 0]]))
    same(Vepo(top_p=0.5).apply(experience, KEY), padded([[1.0, 1, 0]]))
    assert Vepo(noise=6.9).needs == Needs("entropy", "jsd@noised(6.9)", "entropy@noised(6.9)")


@pytest.mark.parametrize(("jsd", "change", "first"), [(1e-8, 0.7, 1), (0.8e-8, 0.8, 2)])
def test_vepo_stretches_no_range_below_its_least(jsd, change, first):
    # h = 0, .5, 1, 0. j = 1 gives .5 to the second token, j = .8 gives (1 - .2^.7) / 2 = .34; the change gives the
    # third 1 - .3^.3 = .30 or 1 - .2^.3 = .38.
    experience = make_experience([4], entropy=padded([[0.0, 0.5, 1, 0]]), jsd_at_noised2=padded([[0.0, jsd, 0, 0]]),
                                 entropy_at_noised2=padded([[0.0, 0.5, 1 + change, 1]]))  # fmt: skip
    assert Vepo(top_p=0.25).apply(experience, KEY).argmax() == first


def test_vepo_divides_by_the_tokens_that_count():
    experience = make_experience([4, 2], visual=[True, False], entropy=torch.rand(2, 4),
                                 jsd_at_noised2=torch.rand(2, 4), entropy_at_noised2=torch.rand(2, 4))  # fmt: skip
    credit = assign([Vepo()], replace(experience, advantage=torch.full((2, 4), 2.0)), KEY)
    assert credit.token_weight.sum(1).tolist() == [1, 2], "one of four tokens, and both of the text"
    close(credit.advantage[experience.rollouts.mask], [2.0] * 6)


@random_cases
def test_vepo_by_definition(dice):
    lengths, visual, (jsd, noised, entropy) = draw_rows(dice, 3)
    jsd, noised, entropy = (each.astype(np.float32) for each in (np.minimum(jsd, 0.69), noised, entropy))
    top_p, a = float(dice.choice([0.05, 0.2, 0.3, 1.0])), float(dice.choice([0.3, 0.7]))
    experience = make_experience(lengths, visual, entropy=torch.tensor(entropy), jsd_at_noised2=torch.tensor(jsd),
                                 entropy_at_noised2=torch.tensor(noised))  # fmt: skip
    found = apply_rule(Vepo(top_p=top_p, a=a), experience, KEY)
    change = np.abs(noised - entropy)
    for row, length in enumerate(lengths):
        part = (row, slice(length))
        if visual[row] and length:
            views = (each[part].astype(float) for each in (jsd, change, entropy))
            np.testing.assert_array_equal(found[part], vepo_by_definition(*views, top_p, a))
        else:
            assert (found[part] == 1).all()


# ---------------------------------------------------------------------------------------------------------------- VGPO
def vgpo_by_definition(responses, beta=0.3, gamma=0.5, kappa=0.2, eps=1e-8):
    """The factors of each response of one group, from the cosines of its tokens."""
    factors, scores = [], []
    for cosines in responses:
        level, last = [(c + 1) / 2 for c in cosines], len(cosines)
        late = [t for t in range(1, last + 1) if t > (1 - gamma) * last]
        best = sorted((level[t - 1] for t in late), reverse=True)
        least = best[max(1, math.floor(Fraction(str(kappa)) * len(late))) - 1] if late else math.inf
        weights = [r * (1 + beta * t / last) if t in late and r >= least else r for t, r in enumerate(level, 1)]
        scaled = min_max(np.array(weights), added=eps)
        factors.append(1 + scaled - scaled.mean())
        scores.append(sum(weights))
    of_responses = min_max(np.array(scores), added=eps)
    return [each * (1 + score - of_responses.mean()) for each, score in zip(factors, of_responses, strict=True)]


def test_vgpo_by_hand():
    # r = .5, .75, 1, .75; of the last two the third is chosen: 1 (1 + .3 * 3/4) = 1.225. Range .725:
    # 0, .3448, 1, .3448, mean .4224. Alone in its group, so its factor is 1.
    experience = make_experience([4], token_similarity=padded([[0.0, 0.5, 1.0, 0.5]]))
    close(Vgpo().apply(experience, KEY), [[0.57759, 0.92241, 1.57759, 0.92241]], atol=1e-4)
    # Two responses of one token each, r = 1 and .5, raised by .3: scores 1.3, .65, so factors 1.5 and .5.
    experience = make_experience([1, 1], [True], token_similarity=padded([[1.0], [0.0]]), group=[0, 0])
    close(Vgpo().apply(experience, KEY), [[1.5], [0.5]], atol=1e-6)


@random_cases
def test_vgpo_by_definition(dice):
    lengths, _, (values,) = draw_rows(dice, 1)
    cosine = np.clip(values, 0, 2).astype(np.float32) - 1
    groups = np.sort(dice.integers(0, 2, len(lengths)))
    groups -= groups.min()
    visual = (dice.random(groups.max() + 1) < 0.8).tolist()
    kappa, gamma = float(dice.choice([0.2, 0.4, 1.0])), float(dice.choice([0.25, 0.5]))
    experience = make_experience(lengths, visual, token_similarity=torch.tensor(cosine), group=groups.tolist())
    found = apply_rule(Vgpo(kappa=kappa, gamma=gamma), experience, KEY)
    for group in set(groups.tolist()):
        rows = [row for row, length in enumerate(lengths) if groups[row] == group and length]
        if not visual[group]:
            assert all((found[row, : lengths[row]] == 1).all() for row in rows)
        elif rows:
            responses = [cosine[row, : lengths[row]].astype(float) for row in rows]
            for row, expected in zip(rows, vgpo_by_definition(responses, gamma=gamma, kappa=kappa), strict=True):
                np.testing.assert_allclose(found[row, : lengths[row]], expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------- PEPO
def pepo_by_definition(similarity, entropy, alpha=0.05, temperature=1.8, share=1.0):
    level = min_max(similarity, least=1e-6) + min_max(entropy, least=1e-6)
    score = similarity * (1 + alpha * np.tanh(level - level.mean())) / temperature
    likely = np.exp(score - score.max())
    return 1 - share + share * len(score) * likely / likely.sum()


PEPO_BY_HAND = {"layer_similarity": padded([[0.0, 0.2, 0.4]]), "entropy": padded([[1.0, 3.0, 2.0]])}


def test_pepo_by_hand():
    # m = 0 + 0, 1/2 + 1, 1 + 1/2, mean 1: tanh(.5) = .46212 raises the last two alike, by 1 + .05 * .46212 = 1.02311;
    # scores 0, .11368, .22736; their exponentials 1, 1.12039, 1.25528, sum 3.37567.
    experience = make_experience([3], **PEPO_BY_HAND)
    rule = Pepo(schedule=False)
    close(rule.apply(experience, KEY), [[0.88871, 0.99571, 1.11558]], atol=2e-5)
    # With alpha 1 and temperature 1: scores 0, .29242, .58485; exponentials 1, 1.33967, 1.79472, sum 4.13439.
    close(Pepo(1.0, 1.0, False).apply(experience, KEY), [[0.72562, 0.97209, 1.30228]], atol=2e-5)
    # The entropy decides between equal similarities: m = 0, 1, mean 1/2; scores .9 (1 -+ tanh(.5)), 1.8 tanh(.5) apart.
    equal = make_experience([2], layer_similarity=padded([[0.9, 0.9]]), entropy=padded([[0.0, 1.0]]))
    first = 2 / (1 + math.exp(1.8 * math.tanh(0.5)))
    close(Pepo(1.0, 1.0, False).apply(equal, KEY), [[first, 2 - first]], atol=1e-6)


@pytest.mark.parametrize("missing", PEPO_BY_HAND)
def test_pepo_reads_both_signals(missing):
    signals = {name: values for name, values in PEPO_BY_HAND.items() if name != missing}
    with pytest.raises(AssertionError, match="did not measure a signal"):
        Pepo(schedule=False).apply(make_experience([3], **signals), KEY)


def test_pepo_blends_its_weights_in_over_the_run():
    experience, rule = make_experience([3], **PEPO_BY_HAND), make_rule("pepo").bind(RunFacts(8))
    full = Pepo(schedule=False).apply(experience, KEY)
    same(rule.apply(experience, (3, 0)), torch.ones(1, 3))
    for step, share in ((2, 1 / 4), (6, 3 / 4), (8, 1.0), (9, 1.0)):
        close(rule.apply(experience, (3, step)), 1 - share + share * full, atol=1e-6)
    with pytest.raises(AssertionError, match="bind was not called"):
        Pepo().apply(experience, KEY)
    bound = make_rule({"name": "shuffled", "rule": "pepo", "across": "rows"}).bind(RunFacts(8))
    close(bound.apply(experience, (3, 4)), (1 + full) / 2, atol=1e-6)


def test_a_run_tells_its_rules_how_long_it_is():
    config = load_config(None, {"optimization.credit": ["pepo", "vgpo", {"name": "shuffled", "rule": "pepo"}]})
    *_, pepo, vgpo, shuffled = make_algorithm(config, 12).credit
    assert (pepo.total_steps, shuffled.rule.total_steps, vgpo) == (12, 12, Vgpo())


@random_cases
def test_pepo_by_definition(dice):
    lengths, visual, (values, entropy) = draw_rows(dice, 2)
    similarity, entropy = np.clip(values, 0, 2).astype(np.float32) - 1, entropy.astype(np.float32)
    arguments = {"alpha": float(dice.choice([0.0, 0.05, 3.0])), "temperature": float(dice.choice([0.01, 1.0, 1.8]))}
    total, step = int(dice.integers(1, 9)), int(dice.integers(0, 9))
    experience = make_experience(lengths, visual, layer_similarity=torch.tensor(similarity),
                                 entropy=torch.tensor(entropy))  # fmt: skip
    found = apply_rule(Pepo(**arguments).bind(RunFacts(total)), experience, (1, step))
    share = min(1, Fraction(step, total))
    for row, length in enumerate(lengths):
        part = (row, slice(length))
        if visual[row] and length:
            views = (each[part].astype(float) for each in (similarity, entropy))
            expected = pepo_by_definition(*views, **arguments, share=float(share))
            np.testing.assert_allclose(found[part], expected, rtol=1e-5, atol=1e-6)
            assert float(found[part].double().mean()) == pytest.approx(1, abs=1e-6)
        else:
            assert (found[part] == 1).all()


# ------------------------------------------------------------------------------------------------------------- DyCo-RL
DYCO_BY_HAND = {
    "image_share": padded([[0.9, 0.1, 0.5, 0.3, 0.3]]),
    "text_share": padded([[0.0, 0.2, 0.1, 0.4, 0.1]]),
    "image_shift": padded([[9.0, 0.5, 0.4, 0.1, 0.2]]),
    "text_shift": padded([[0.0, 0.2, 0.3, 0.4, 0.24]]),
}


def dyco_by_definition(advantage, shares, shifts, tau, alpha):
    """The new advantages; shares and shifts are [2, T], image and text."""
    roles = [None] + [0 if v - x > tau else 1 if v - x < -tau else None for v, x in shifts[:, 1:].T]
    scaled = [min_max(each) if np.ptp(each) else np.zeros_like(each) for each in shares]
    likely = {t: math.exp(scaled[role][t]) for t, role in enumerate(roles) if role is not None}
    weights = {t: len(likely) * each / sum(likely.values()) for t, each in likely.items()}
    return np.array([a * (1 + alpha * np.sign(a) * weights.get(t, 0.0)) for t, a in enumerate(advantage)])


def with_advantage(experience, value):
    return replace(experience, advantage=torch.full(experience.rollouts.mask.shape, value))


def test_dyco_by_hand():
    # Tokens 2 and 3 are visual (.3 and .1 above), 4 is of text (.3 below), 1 is the first, 5 is within tau. Shares of
    # the image from .1 to .9: s = 0, .5; of the text from 0 to .4: s = 1. e^s = 1, 1.64872, 2.71828, their sum 5.36700:
    # w = .55897, .92159, 1.51944.
    experience = make_experience([5], **DYCO_BY_HAND)
    up, down = (Dyco().apply(with_advantage(experience, sign), KEY) for sign in (2.0, -0.1))
    close(up, [[1, 1.11179, 1.18432, 1.30389, 1]], atol=2e-5)
    close(down, [[1, 0.88821, 0.81568, 0.69611, 1]], atol=2e-5)
    same(Dyco().apply(with_advantage(experience, 0.0), KEY), torch.ones(1, 5))
    # With tau .15 token 3 is neutral: e^s = 1, 2.71828.
    close(Dyco(tau=0.15, alpha=0.1).apply(with_advantage(experience, 1.0), KEY)[0, [1, 3]], [1.05379, 1.14621], 2e-5)
    with pytest.raises(ValueError, match=r"alpha is 0\.4; it must be between 0 and 1/e"):
        Dyco(alpha=0.4)
    with pytest.raises(ValueError, match=r"alpha is -0\.1"):
        Dyco(alpha=-0.1)
    with pytest.raises(ValueError, match="tau is -1"):
        Dyco(tau=-1)


def test_dyco_leaves_a_step_without_images_unweighted():
    assert Dyco().apply(make_experience([3], visual=[False]), KEY) is None


@random_cases
def test_dyco_by_definition(dice):
    lengths, visual, values = draw_rows(dice, 4)
    signals = dict(zip(SHIFTS, (torch.tensor(each).float() for each in values), strict=True))
    experience = make_experience(lengths, visual, **signals)
    advantage = torch.tensor(dice.choice([-1.5, 0.0, 1e-9, 2.0], size=experience.rollouts.mask.shape)).float()
    tau, alpha = float(dice.choice([0.0, 0.05, 2.0])), float(dice.choice([0.0, 0.2, 0.36]))
    factor = apply_rule(Dyco(tau, alpha), replace(experience, advantage=advantage), KEY)
    for row, length in enumerate(lengths):
        part = (row, slice(length))
        if visual[row] and length:
            shares, shifts = np.split(np.stack([signals[name][part].numpy() for name in SHIFTS]), 2)
            scores, kept = shares.astype(float), advantage[part].double().numpy()
            expected = dyco_by_definition(kept, scores, shifts, np.float32(tau), alpha)
            np.testing.assert_allclose(factor[part] * advantage[part], expected, rtol=1e-5, atol=1e-7)
        else:
            assert (factor[part] == 1).all()


# ---------------------------------------------------------------------------------------------------------------- KTAE
def fisher_by_definition(a, b, c, d):
    def likely(k):
        return Fraction(math.comb(a + c, k) * math.comb(b + d, a + b - k), math.comb(a + b + c + d, a + b))

    p = sum(likely(k) for k in range(a + b + 1) if k <= a + c and a + b - k <= b + d and likely(k) <= likely(a))
    return 0.0 if p == 1 else math.exp(-2 * float(p))


def bits_of(*counts):
    shares = [count / sum(counts) for count in counts if count]
    return -sum(share * math.log2(share) for share in shares)


def ktae_by_definition(right, wrong, alpha=1.0, beta=1.0):
    """The bonus by id, from lists of responses."""
    found = {}
    length = {True: sum(map(len, right)), False: sum(map(len, wrong))}
    for token in {token for response in right + wrong for token in response}:
        a, b = (sum(token in response for response in each) for each in (right, wrong))
        c, d = len(right) - a, len(wrong) - b
        n = a + b + c + d
        gain = bits_of(len(right), len(wrong)) - (a + b) / n * bits_of(a, b)
        gain -= (c + d) / n * bits_of(c, d) if c + d else 0
        h = math.asin(math.sqrt(a / len(right))) - math.asin(math.sqrt(b / len(wrong)))
        tf = {}
        for side, responses in ((True, right), (False, wrong)):
            f = sum(response.count(token) for response in responses) / length[side]
            tf[side] = f * 3 / (f + 2 * (0.5 + 0.5 * length[side] / (sum(length.values()) / 2)))
        x = h + tf[True] / (tf[False] + 1e-5) - tf[False] / (tf[True] + 1e-5)
        k = (alpha * fisher_by_definition(a, b, c, d) + beta * gain) * x / (alpha + beta)
        found[token] = 2 * (1 / (1 + math.exp(-max(-700, min(700, k)))) - 0.5)
    return found


def test_ktae_by_hand():
    # The id 7 is in both right responses and in neither wrong one: p = 1/6 + 1/6, F = exp(-2/3), IG = 1, h = pi/2.
    tokens = torch.tensor([[7, 1], [7, 2], [1, 3], [4, 2]])
    found = Ktae().apply(make_experience([2] * 4, [True], [1.0, 1, 0, -1], tokens, group=[0] * 4), KEY)
    f = 2 / 4
    tf = f * 3 / (f + 2)
    k = (math.exp(-2 / 3) + 1) * (math.pi / 2 + tf / 1e-5) / 2
    assert found[0, 0] == pytest.approx(2 / (1 + math.exp(-min(k, 700))) - 1)
    # 1 and 2 are in one response of each kind: no association at all.
    close(found[:2, 1], [0, 0])
    assert found[2, 1] < 0 and found[3, 0] < 0
    close(Ktae(strength=0.5).apply(make_experience([2] * 4, [True], [1.0, 1, 0, -1], tokens, group=[0] * 4), KEY),
          found / 2)  # fmt: skip


@pytest.mark.parametrize("rewards", [[1.0, 2, 3], [0.0, -1, 0]])
def test_ktae_compares_right_with_wrong(rewards):
    tokens = torch.tensor([[7, 1], [7, 2], [3, 4]])
    found = Ktae().apply(make_experience([2] * 3, [False], rewards, tokens, group=[0] * 3), KEY)
    assert not found.any(), "all are right, or all are wrong"


@random_cases
def test_ktae_by_definition(dice):
    lengths = dice.integers(0, 9, size=dice.integers(1, 12)).tolist()
    lengths[0] = max(lengths[0], 1)
    groups = np.sort(dice.integers(0, 2, len(lengths)))
    groups -= groups.min()
    tokens = dice.integers(1, dice.choice([2, 4, 30]), (len(lengths), max(lengths)))
    rewards = dice.choice([-1.0, 0.0, 0.1, 1.0], len(lengths))
    alpha, beta = (float(dice.choice([0.0, 1.0, 3.0])), 1.0)
    experience = make_experience(lengths, [True] * (groups.max() + 1), rewards.tolist(), torch.tensor(tokens),
                                 groups.tolist())  # fmt: skip
    found = apply_rule(Ktae(alpha=alpha, beta=beta), experience, KEY)
    responses = [tokens[row, :length].tolist() for row, length in enumerate(lengths)]
    for group in set(groups.tolist()):
        rows = [row for row in range(len(lengths)) if groups[row] == group]
        sides = [[responses[row] for row in rows if (rewards[row] > 0) == right] for right in (True, False)]
        by_id = ktae_by_definition(*sides, alpha, beta) if all(map(any, sides)) else {}
        for row in rows:
            assert not found[row, lengths[row] :].any()
            expected = [by_id.get(token, 0.0) for token in responses[row]]
            np.testing.assert_allclose(found[row, : lengths[row]], expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- all of them
@pytest.mark.parametrize("name, arguments", [
    ("pgpo", {"tau": 0.4, "beta": 2.0}), ("vepo", {"top_p": 0.2, "a": 0.7, "noise": 2.0}),
    ("vgpo", {"beta": 0.3, "gamma": 0.5, "kappa": 0.2}),
    ("pepo", {"alpha": 0.05, "temperature": 1.8, "schedule": True}),
    ("dyco", {"tau": 0.05, "alpha": 0.2}),
    ("ktae", {"alpha": 1.0, "beta": 1.0, "strength": 1.0}),
])  # fmt: skip
def test_they_have_names_and_published_defaults(name, arguments):
    assert vars(make_rule(name)) == arguments


def test_results_are_float32():
    values = torch.rand(1, 3, dtype=torch.float64)
    signals = {"old_logprobs": -values, "logprobs_at_none": -2 * values, "entropy": values, "token_similarity": values,
               "layer_similarity": values, "jsd_at_noised2": values, "entropy_at_noised2": values}  # fmt: skip
    experience = with_advantage(make_experience([3], **signals, **dict.fromkeys(SHIFTS, values)), 1.0)
    for name in ("pgpo", "vepo", "vgpo", "pepo", "dyco", "ktae"):
        assert make_rule(name).bind(RunFacts(10)).apply(experience, KEY).dtype == torch.float32


def test_their_signals_can_be_shuffled():
    rule = make_rule({"name": "shuffled", "rule": "pgpo"})
    experience = make_experience([6, 6], old_logprobs=torch.zeros(2, 6), logprobs_at_none=-torch.rand(2, 6))
    plain, found = Pgpo().apply(experience, KEY), rule.apply(experience, KEY)
    assert not torch.equal(found, plain)
    close(found.sort(1).values, plain.sort(1).values)
