"""The numbers that the loop computes, by hand: divergence, advantages, the batches of an update, a validation."""

import math
from collections import defaultdict

import pytest
import torch
from helpers import NAN, close, fake_prompt, fake_rollouts, same
from loop_helpers import (
    REFERENCE,
    FakeActor,
    FakeGenerator,
    FakeReference,
    FakeScorer,
    loop,
    make_validation,
    spec,
)

from mtrl.algorithms.advantages import Grpo, ReinforcePlusPlus, Rloo
from mtrl.algorithms.batches import assemble
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.divergence import Divergence
from mtrl.algorithms.losses import Loss
from mtrl.training import loop as training_loop
from mtrl.training.validation import add_scores, by_column
from mtrl.types import Credit, Experience, Rewards, Sampling, Signals, ValidationSample


def get_advantages(made):
    """[N]: the advantage of each row's first token in the batches of the last update, in the order of the prompts."""
    batches = sorted(made.components.actor.updates[-1][0], key=lambda batch: batch.rollouts.text)
    return torch.cat([batch.advantage[:, 0] for batch in batches])


# ---------------------------------------------------------------------------------------------------------- divergence
# Rewards 1, 0 | 2, 0 of rows of 1, 2 | 3, 4 tokens.
D = -0.2  # o - REFERENCE of every token
PER_TOKEN = {"kl": D, "abs": 0.2, "mse": 0.02, "low_var_kl": math.exp(-D) + D - 1, "full": 0.3}


@pytest.mark.parametrize("penalty", PER_TOKEN)
def test_divergence_in_the_reward(penalty):
    brought = {"divergence": torch.full((4, 4), 0.3)} if penalty == "full" else {"ref_logprobs": REFERENCE}
    made = loop(reference=FakeReference(None, **brought), divergence=Divergence(penalty, 0.5))
    row = made.step(0)
    each = PER_TOKEN[penalty]
    paid = [1 - 0.5 * each, 0 - 0.5 * 2 * each, 2 - 0.5 * 3 * each, 0 - 0.5 * 4 * each]
    first, second = sum(paid[:2]) / 2, sum(paid[2:]) / 2
    close(get_advantages(made), [paid[0] - first, paid[1] - first, paid[2] - second, paid[3] - second], atol=1e-6)
    assert row["actor/reference_kl"] == pytest.approx(each * 2.5, rel=1e-5) and row["actor/kl_coef"] == 0.5
    assert row["reward/overall"] == 0.75, "the reward is reported without the penalty"
    assert made.components.actor.updates[-1][1].divergence_coef == 0.0, "and the loss does not charge it again"


def test_divergence_token_by_token_for_reinforce_plus_plus():
    made = loop(
        reference=FakeReference(None, ref_logprobs=REFERENCE),
        divergence=Divergence("kl", 0.5),
        estimator=ReinforcePlusPlus(),
    )
    made.step(0)
    # A token gets -0.5 * -0.2 = 0.1, the last one also its reward; returns are sums from there on.
    returns = [[1.1], [0.2, 0.1], [2.3, 2.2, 2.1], [0.4, 0.3, 0.2, 0.1]]
    flat = torch.tensor([x for row in returns for x in row], dtype=torch.float64)
    white = (flat - flat.mean()) / flat.std()
    batch = made.components.actor.updates[-1][0][0]
    close(batch.advantage[batch.rollouts.mask], white, rtol=1e-5)


def test_divergence_as_a_loss():
    made = loop(
        reference=FakeReference(None, ref_logprobs=REFERENCE),
        divergence=Divergence("low_var_kl", 0.5, use_divergence_loss=True),
    )
    made.step(0)
    (batch,), loss = made.components.actor.updates[-1]
    assert loss.divergence == "low_var_kl" and loss.divergence_coef == 0.5
    same(batch.ref_logprobs, REFERENCE.where(batch.rollouts.mask, 0.0))
    close(get_advantages(made), [0.5, -0.5, 1, -1])


@pytest.mark.parametrize("adaptive", [False, True])
def test_full_divergence_as_a_loss(adaptive):
    """The update computes it from the vocabulary. Only a controller needs it before."""
    rule = Divergence(
        "full",
        0.5,
        use_divergence_loss=True,
        divergence_type="adaptive" if adaptive else "fixed",
        divergence_target=0.1,
        divergence_horizon=10.0,
    )
    brought = {"divergence": torch.full((4, 4), 0.2)} if adaptive else {}
    reference = FakeReference(None, **brought) if adaptive else None
    made = loop(reference=reference, divergence=rule)
    made.step(0)
    loss = made.components.actor.updates[-1][1]
    assert loss.full_divergence and loss.divergence_coef == 0.5 and bool(rule.needs) is adaptive
    close(get_advantages(made), [0.5, -0.5, 1, -1])
    row = made.adapt(Experience(six_rows()[0], None, Signals(**{k: torch.full((6, 4), 0.2) for k in brought})))
    assert ("actor/reference_kl" in row) is adaptive and "actor/kl_coef" in row
    assert (made.divergence.divergence_coef > 0.5) is adaptive


def test_the_adaptive_coefficient():
    # |d| = 0.2 a token, 2.5 tokens a response: KL 0.5 of a target of 0.25: e = min(1, 0.2); 4 responses, horizon 10.
    made = loop(
        reference=FakeReference(None, ref_logprobs=REFERENCE),
        divergence=Divergence("abs", 0.5, divergence_type="adaptive", divergence_target=0.25, divergence_horizon=10.0),
        total_steps=3,
    )
    made.run()
    coefs = [made.components.tracker.rows[step]["actor/kl_coef"] for step in (1, 2, 3)]
    assert coefs == pytest.approx([0.5, 0.5 * 1.08, 0.5 * 1.08**2])
    penalised = 0.5 * 1.08**2 * 0.2
    close(get_advantages(made)[:2], [(1 + penalised) / 2, -(1 + penalised) / 2])


def test_a_fixed_coefficient_stays():
    made = loop(reference=FakeReference(None, ref_logprobs=REFERENCE), divergence=Divergence("abs", 0.5), total_steps=2)
    made.run()
    assert made.divergence.divergence_coef == 0.5


# ----------------------------------------------------------------------------------------------- advantages and credit
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.5, -0.5, 1, -1]),
        ({"estimator": Grpo("group")}, [1 / math.sqrt(2), -1 / math.sqrt(2), 1 / math.sqrt(2), -1 / math.sqrt(2)]),
        ({"estimator": Rloo()}, [1, -1, 2, -2]),
    ],
)
def test_estimators(changes, expected):
    made = loop(**changes)
    made.step(0)
    close(get_advantages(made), expected, rtol=1e-5)


def test_credit_is_decided_before_the_split():
    """The trajectory factor uses all visual rows of the step, although each group is a separate optimizer step."""
    dependency = torch.tensor([[9.0] * 4, [9.0] * 4, [1.0] * 4, [3.0] * 4])  # rows 0 and 1 have no image
    actor = FakeActor(None, dependency=dependency)
    made = loop(actor=actor, credit=(TrajectoryScaling(0.8, 2.0),), global_batch_size=1)
    made.step(0)
    # u = 0 and 1, mean 1/2: beta_max = 0.8 + 0.2 / 0.5 = 1.2.
    close(get_advantages(made), [0.5, -0.5, 0.8, -1.2])
    assert len(actor.updates[-1][0]) == 2


@pytest.mark.parametrize(
    ("changes", "trained"),
    [
        ({}, [1, 2, 3, 4]),  # tokens of each response
        ({"mask_truncated_responses": True}, [1, 2, 3, 0]),  # the last one is cut off
        ({"critic_warmup": 1}, [0, 0, 0, 0]),  # the actor does not learn yet
    ],
)
def test_the_tokens_that_the_actor_learns_from(changes, trained):
    made, seen = loop(**changes), []
    made.components.tracker.rollouts = lambda step, experience: seen.append(experience.credit.trained)
    made.step(0)
    assert seen[0].sum(1).tolist() == trained
    if made.components.actor.updates:
        ((batch,), _) = made.components.actor.updates[0]
        same(seen[0], (batch.weights.policy != 0) & (batch.advantage != 0))


# ------------------------------------------------------------------------------------------------------------- batches
def make_batches(rules, rollouts, signals, select=None, key=(0, 0)):
    """Batches of a step whose rows have their index as advantage."""
    mask = rollouts.mask
    rows = torch.arange(len(mask), dtype=torch.float32)[:, None]
    select = mask if select is None else select
    credit = Credit(rows.expand(mask.shape).where(mask, 0.0), select, mask.float(), torch.ones(len(mask)))
    rewards = Rewards(torch.zeros(len(mask)), {}, torch.zeros(len(mask), dtype=torch.bool))
    return assemble(rules.batches, rules.loss, Experience(rollouts, rewards, signals, credit=credit), key)


def six_rows():
    """Three groups of two, lengths 1, 2 | 3, 4 | 1, 2; the fourth row is cut off."""
    prompts = [fake_prompt(f"p{i}") for i in range(3)]
    generator = FakeGenerator([])
    with generator.resident():
        rollouts = generator.generate(prompts, Sampling(n=2))
    return rollouts, Signals(old_logprobs=torch.full((6, 4), -0.5), ref_logprobs=torch.full((6, 4), -3.0))


def test_whole_groups_with_separate_denominators():
    rollouts, signals = six_rows()
    rules = spec(global_batch_size=2, ppo_epochs=2)
    batches = next(
        made for seed in range(99)  # the first whose first pass keeps the last group for its second step
        if (made := list(make_batches(rules, rollouts, signals, key=(seed, 0))))[1].rollouts.text[0] == "p2 response 0"
    )  # fmt: skip
    assert [len(batch) for batch in batches] == [4, 2, 4, 2]
    assert [len(batch.rollouts.prompts) for batch in batches] == [2, 1, 2, 1]
    first, second = batches[:2]
    assert second.rollouts.text == ("p2 response 0", "p2 response 1") and second.rollouts.group.tolist() == [0, 0]
    same(first.weights.policy, first.rollouts.mask / 10)  # 1 + 2 + 3 + 4 tokens
    same(second.weights.policy, second.rollouts.mask / 3)
    close(second.advantage, [[4, 0, 0, 0], [5, 5, 0, 0]])
    same(second.ref_logprobs, torch.full((2, 4), -3.0))
    for batch in batches:
        assert float(batch.weights.token.sum()) == pytest.approx(1)


def test_each_pass_of_each_step_shuffles_its_groups():
    """Shuffled by (seed, step, pass); if all groups are one optimizer step, there is nothing to shuffle."""
    rollouts, signals = six_rows()

    def order(key, per_update=1):
        made = make_batches(spec(global_batch_size=per_update, ppo_epochs=2), rollouts, signals, key=key)
        return ["".join(text[1] for text in batch.rollouts.text[::2]) for batch in made]

    assert all(set(order((seed, 0))[:3]) == set(order((seed, 0))[3:]) == {"0", "1", "2"} for seed in range(9))
    assert any(order((seed, 0))[:3] != order((seed, 0))[3:] for seed in range(9))
    assert len({tuple(order((0, step))) for step in range(20)}) > 10 and order((0, 5)) == order((0, 5))
    assert len({tuple(order((seed, 0))) for seed in range(20)}) > 10
    assert {tuple(order((seed, 0), per_update=3)) for seed in range(9)} == {("012", "012")}


def test_the_loop_keys_the_order_by_seed_and_step(monkeypatch):
    keys = []
    real = training_loop.assemble
    monkeypatch.setattr(training_loop, "assemble", lambda *given: keys.append(given[-1]) or real(*given))
    loop(seed=9, total_steps=2).run()
    assert keys == [(9, 0), (9, 1)]


@pytest.mark.parametrize(
    ("changes", "row", "expected"),
    [
        ({"loss_type": "grpo"}, 1, [1 / 12, 1 / 12, 0, 0]),  # six responses, two tokens
        ({"loss_type": "dr_grpo"}, 1, [1 / 48, 1 / 48, 0, 0]),  # max_response_length is 8
        ({"loss_type": "dapo"}, 1, [1 / 13, 1 / 13, 0, 0]),
        ({"mask_truncated_responses": True}, 3, [0, 0, 0, 0]),
        ({"mask_truncated_responses": True}, 1, [1 / 9, 1 / 9, 0, 0]),  # without the four tokens of row 3
    ],
)
def test_weights_by_hand(changes, row, expected):
    rollouts, signals = six_rows()
    (batch,) = make_batches(spec(global_batch_size=3, **changes), rollouts, signals)
    close(batch.weights.policy[row], expected)


@pytest.mark.parametrize(("denominator", "kept"), [("all", 1 / 13), ("selected", 1 / 6)])
def test_filtered_tokens(denominator, kept):
    rollouts, signals = six_rows()
    first_tokens = rollouts.mask & (torch.arange(4) == 0)
    rules = spec(global_batch_size=3, loss_token_denominator=denominator)
    (batch,) = make_batches(rules, rollouts, signals, first_tokens)
    close(batch.weights.policy, first_tokens * kept)
    close(batch.weights.divergence, rollouts.mask / 13)


def test_the_correction_is_capped_and_follows_its_rows():
    rollouts, signals = six_rows()  # o = -0.5, b = -1: exp(0.5) = 1.65; row 5 was sampled at b = -3.5
    rollouts.rollout_logprobs[5] = -3.5
    rules = spec(global_batch_size=1, loss=Loss(tis_clip=2.0))
    batches = sorted(make_batches(rules, rollouts, signals), key=lambda batch: batch.rollouts.text)
    close(batches[0].correction, [[math.exp(0.5), 1, 1, 1], [math.exp(0.5)] * 2 + [1, 1]])
    close(batches[2].correction[1], [2, 2, 1, 1])
    close(next(make_batches(spec(), rollouts, signals)).correction, torch.ones(4, 4))


# ---------------------------------------------------------------------------------------------------------- validation
def test_a_function_called_score_is_not_the_total():
    scores = defaultdict(list)
    rewards = Rewards(torch.tensor([3.0]), {"score": torch.tensor([1.0])}, torch.tensor([False]))
    add_scores(scores, fake_rollouts([2]), rewards, Signals())
    assert scores["reward_score"] == [3.0] and scores["reward/score"] == [1.0]


def test_avg_and_pass_by_hand():
    """Three prompts, two responses each, in batches of two and one; one response of the third has no truth."""
    accuracy = {
        "v0 response 0": 1.0, "v0 response 1": 0.0, "v1 response 0": 0.0, "v1 response 1": 0.0,
        "v2 response 0": NAN, "v2 response 1": 1.0,
    }  # fmt: skip
    result = make_validation(prompts=3).run(FakeGenerator([]), FakeScorer([], accuracy=accuracy), 0)
    assert result.metrics["val/avg@2"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert result.metrics["val/pass@2"] == pytest.approx(2 / 3)
    assert result.metrics["val/reward_score"] == pytest.approx(2 / 6)
    assert result.metrics["val/reward/accuracy"] == pytest.approx(2 / 5)
    assert result.metrics["val/response_length"] == pytest.approx((1 + 2 + 3 + 4 + 1 + 2) / 6)
    assert result.metrics["val/truncated"] == pytest.approx(1 / 6)
    parts = ({"accuracy": 1.0}, {"accuracy": 0.0}, {})
    assert result.samples == tuple(
        ValidationSample(f"v{i}", "fake", f"v{i} response 0", None, part.get("accuracy", 0.0), part)
        for i, part in enumerate(parts)
    )


def test_partial_credit_is_not_a_pass():
    result = make_validation(prompts=1).run(
        FakeGenerator([]), FakeScorer([], accuracy={"v0 response 0": 0.9, "v0 response 1": 0.0}), 0
    )
    assert result.metrics["val/pass@2"] == 0.0


def test_without_a_truth_there_is_no_accuracy():
    accuracy = {"v0 response 0": NAN, "v0 response 1": NAN}
    result = make_validation(prompts=1).run(FakeGenerator([]), FakeScorer([], accuracy=accuracy), 0)
    assert not any("@" in name for name in result.metrics) and "val/reward/accuracy" not in result.metrics
    assert result.metrics["val/reward_score"] == 0.0 and result.by == {}


def test_by_column():
    rows = [
        ({"kind": "a", "level": 1, "id": "x" * 41, "share": 0.5, "rare": 1, "same": "s"}, 1.0),
        ({"kind": "a", "level": 2, "id": "y", "share": 0.5, "same": "s"}, 0.0),
        ({"kind": "b", "level": 2, "id": "z", "share": 0.5, "same": "s"}, 0.5),
    ]
    assert by_column(rows) == {"kind": {"a": 0.5, "b": 0.5}, "level": {"1": 1.0, "2": 0.25}}
    assert by_column([({"n": i}, 1.0) for i in range(20)])["n"]["7"] == 1.0
    assert by_column([({"n": i}, 1.0) for i in range(21)]) == {}, "too many values for a category"
    assert by_column([]) == {}
