"""The loop among fakes: who is called when, with what; and the arithmetic of divergence, batches and validation."""

import math
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import NAN, close, fake_prompt, fake_rollouts, mask_of, same

from mtrl.algorithms.credit import CreditRule, Scaling
from mtrl.algorithms.losses import Loss
from mtrl.config import load_config
from mtrl.training.build import Run
from mtrl.training.evaluate import Validation, by_column, collect
from mtrl.training.interrupt import Interrupt
from mtrl.training.loop import Divergence, House, Loop, Recipe, assemble
from mtrl.training.resume import Start
from mtrl.types import Credit, Needs, Rewards, Rollouts, Sample, Sampling, Signals, Weights

PROMPTS, RESPONSES = 2, 2  # in a step


class FakeSource:
    """Prompts p0, p1, ..: the first without an image."""

    def __init__(self, journal):
        self.journal, self.next = journal, 0

    def take(self, count):
        self.journal.append(("take", count))
        names = range(self.next, self.next + count)
        self.next += count
        return [fake_prompt(f"p{i}", visual=i > 0) for i in names]

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]


class FakeGenerator:
    """Rows of 1, 2, 3, 4 tokens; refuses a version it does not hold."""

    def __init__(self, journal):
        self.journal, self.version = journal, 0

    def generate(self, prompts, sampling):
        self.journal.append(("generate", sampling.step, sampling.version))
        assert sampling.version == self.version
        rows = len(prompts) * sampling.n
        mask = mask_of(*(1 + row % 4 for row in range(rows)), width=4)
        return Rollouts(
            prompts=tuple(prompts),
            group=torch.arange(len(prompts)).repeat_interleave(sampling.n),
            tokens=torch.arange(4).expand(rows, 4).where(mask, 0),
            mask=mask,
            behaviour=torch.full((rows, 4), -1.0).where(mask, 0.0),
            text=tuple(f"{prompts[row // sampling.n].task.id} response {row % sampling.n}" for row in range(rows)),
            finish=tuple("length" if row % 4 == 3 else "stop" for row in range(rows)),
            version=torch.full((rows,), self.version),
        )

    def load(self, weights):
        self.journal.append(("load", weights.version))
        self.version = weights.version


class FakeScorer:
    """Gives the rewards it was made with, again and again; `parts` by the text of the response."""

    def __init__(self, journal, total=(1.0, 0.0, 2.0, 0.0), accuracy=None):
        self.journal, self.total, self.accuracy = journal, total, accuracy

    def submit(self, rollouts, step):
        self.journal.append(("submit", step))
        values = list(self.total)
        if self.accuracy is not None:
            values = [self.accuracy[text] for text in rollouts.text]
        scores = torch.tensor(values[: len(rollouts)])
        rewards = Rewards(scores.nan_to_num(0.0), {"accuracy": scores}, torch.zeros(len(rollouts), dtype=torch.bool))
        return FakePending(self.journal, rewards)


class FakePending:
    def __init__(self, journal, rewards):
        self.journal, self.rewards = journal, rewards

    def result(self, signals=None):
        self.journal.append(("result",))
        return self.rewards


class FakeActor:
    """Brings the signals it was made with and keeps the batches it gets."""

    def __init__(self, journal, **signals):
        self.journal, self.version, self.updates = journal, 0, []
        self.signals = {"old": torch.full((4, 4), -1.0)} | signals

    def probe(self, rollouts, needs, step):
        self.journal.append(("probe", step))
        return Signals(**{name: value.where(rollouts.mask, 0.0) for name, value in self.signals.items()})

    def update(self, batches, loss):
        batches = list(batches)
        self.journal.append(("update", len(batches)))
        self.updates.append((batches, loss))
        self.version += 7  # versions are the actor's affair
        return {"pg_loss": 0.5, "grad_norm": 2.0}

    def publish(self):
        self.journal.append(("publish", self.version))
        return Weights(self.version, iter(()))

    def snapshot(self):
        return f"snapshot of version {self.version}"

    def restore(self, directory):
        self.version = 7 * int(directory.name)


class FakeReference:
    def __init__(self, journal, **signals):
        self.journal, self.signals = journal, signals

    def probe(self, rollouts, needs, step):
        assert needs.reference
        self.journal.append(("reference", step))
        return Signals(**{name: value.where(rollouts.mask, 0.0) for name, value in self.signals.items()})


class FakeTracker:
    def __init__(self, journal):
        self.journal, self.rows, self.closed = journal, {}, 0

    def metrics(self, step, values):
        self.journal.append(("metrics", step))
        self.rows[step] = values

    def rollouts(self, step, rollouts, rewards, credit, signals):
        self.journal.append(("rollouts", step))

    def validation(self, step, values, by, samples):
        self.journal.append(("validation", step))

    def close(self):
        self.closed += 1


class FakeStore:
    def __init__(self, journal):
        self.journal, self.saved, self.best = journal, {}, -1.0

    def is_best(self, score):
        return score is not None and score > self.best

    def save(self, step, snapshot, state, score):
        self.journal.append(("save", step))
        self.saved[step] = (snapshot, state, score)
        self.best = self.best if score is None else max(self.best, score)

    def close(self):
        self.journal.append(("all saved",))


def recipe(**changes):
    settings = {
        "total_steps": 1,
        "prompts_per_step": PROMPTS,
        "prompts_per_update": PROMPTS,
        "passes": 1,
        "sampling": Sampling(n=RESPONSES, max_new_tokens=4),
        "needs": Needs(old=True),
        "attention_every": 0,
        "estimator": "grpo",
        "scale_rewards": "none",
        "gamma": 1.0,
        "credit": CreditRule(),
        "divergence": None,
        "loss": Loss(),
        "loss_type": "dapo",
        "loss_token_denominator": "all",
        "max_response_length": 8,
        "mask_truncated": False,
        "validate_every": -1,
        "validate_first": False,
        "save_every": -1,
    }
    return Recipe(**settings | changes)


def loop(actor=None, reference=None, validation=None, scorer=None, **changes):
    journal = []
    actor = actor or FakeActor(journal)
    actor.journal = journal
    probers = [actor]
    if reference is not None:
        reference.journal = journal
        probers.append(reference)
        changes.setdefault("needs", Needs(old=True, reference=True))
    house = House(
        source=FakeSource(journal),
        generator=FakeGenerator(journal),
        scorer=scorer or FakeScorer(journal),
        probers=probers,
        actor=actor,
        tracker=FakeTracker(journal),
        store=FakeStore(journal),
        validation=validation,
    )
    house.scorer.journal = journal
    return Loop(house, recipe(**changes))


def advantages_of(made):
    """[N] of the first token of every row, over the batches of the last update."""
    batches, _ = made.house.actor.updates[-1]
    return torch.cat([batch.advantage[:, 0] for batch in batches])


# ------------------------------------------------------------------------------------------------------ order of calls
def test_a_step_in_order():
    made = loop(reference=FakeReference(None, reference=torch.zeros(4, 4)), divergence=Divergence("kl", 0.1))
    made.step(0)
    assert made.house.actor.journal == [
        ("take", PROMPTS),
        ("generate", 0, 0),
        ("submit", 0),  # user code starts before the probes, and is waited for after them
        ("probe", 0),
        ("reference", 0),
        ("result",),
        ("update", 1),
        ("publish", 7),
        ("load", 7),
        ("rollouts", 1),
    ]


def test_steps_are_keyed_and_versions_handed_over():
    made = loop(total_steps=3)
    made.run()
    journal = made.house.actor.journal
    assert [entry for entry in journal if entry[0] == "generate"] == [
        ("generate", 0, 0), ("generate", 1, 7), ("generate", 2, 14),
    ]  # fmt: skip
    for name in ("submit", "probe"):
        assert [entry[1] for entry in journal if entry[0] == name] == [0, 1, 2]
    for name in ("metrics", "rollouts"):  # logs count what has been done
        assert [entry[1] for entry in journal if entry[0] == name] == [1, 2, 3]
    assert [entry for entry in journal if entry[0] == "save"] == [("save", 3)]


def validation_of(prompts=2, batch=2, **sampling):
    names = [f"v{i}" for i in range(prompts)]
    batches = [[fake_prompt(name) for name in names[i : i + batch]] for i in range(0, prompts, batch)]
    return Validation(lambda: batches, Sampling(**{"n": 2, "max_new_tokens": 4} | sampling))


@pytest.mark.parametrize(
    ("changes", "validated", "saved"),
    [
        ({}, [5], [5]),
        ({"validate_first": True}, [0, 5], [5]),
        ({"validate_every": 2, "save_every": 3}, [2, 4, 5], [3, 5]),
        ({"validate_every": 5, "save_every": 1}, [5], [1, 2, 3, 4, 5]),
        ({"validate_every": 0}, [5], [5]),
        ({"validate_first": True, "validate_every": 1}, [0, 1, 2, 3, 4, 5], [5]),
    ],
)
def test_when_to_validate_and_to_save(changes, validated, saved):
    made = loop(validation=validation_of(), total_steps=5, **changes)
    made.run()
    journal = made.house.actor.journal
    assert [entry[1] for entry in journal if entry[0] == "validation"] == validated
    assert [entry[1] for entry in journal if entry[0] == "save"] == saved
    assert journal[-1] == ("save", 5) and journal[-2] == ("validation", 5), "the last model is judged, then kept"


def test_validation_samples_the_newest_weights_at_its_own_step():
    made = loop(validation=validation_of(), total_steps=2, validate_every=1)
    made.run()
    journal = made.house.actor.journal
    during = [journal[i - 3 : i] for i, entry in enumerate(journal) if entry[0] == "validation"]
    assert during == [
        [("generate", 0, 7), ("submit", None), ("result",)],
        [("generate", 0, 14), ("submit", None), ("result",)],
    ]


def test_no_validation_set_is_no_error():
    made = loop(validate_first=True)
    made.run()
    assert not any(entry[0] == "validation" for entry in made.house.actor.journal)


def run_of(made, directory, overrides):
    closing = ExitStack()
    closing.callback(made.house.tracker.close)
    return Run(load_config(None, overrides), directory, "an id", Start(), made, Interrupt(), closing)


@pytest.mark.parametrize(
    ("val_only", "expected"),
    [(True, ["generate", "submit", "result", "validation"]), (False, ["take", "generate", "submit", "probe"])],
)
def test_val_only(tmp_path, val_only, expected):
    made = loop(validation=validation_of())
    run_of(made, tmp_path, {"training.val_only": val_only}).train()
    names = [entry[0] for entry in made.house.actor.journal]
    assert names[:4] == expected and ("update" in names) != val_only
    assert made.house.tracker.closed == 1 and (names[-1] == "all saved") != val_only


def test_everything_is_closed_when_a_step_fails(tmp_path):
    made = loop()
    made.house.actor.update = None  # calling it raises
    with pytest.raises(TypeError):
        run_of(made, tmp_path, {}).train()
    assert made.house.tracker.closed == 1


# ---------------------------------------------------------------------------------------------- stopping and going on
def test_asked_to_stop_it_finishes_the_step_and_saves():
    made = loop(total_steps=5)
    made.house.stop = lambda: made.done == 2
    made.run()
    assert made.done == 2 and list(made.house.store.saved) == [2]
    assert made.house.actor.journal[-2:] == [("metrics", 2), ("save", 2)]


def test_a_restored_loop_does_what_the_first_would_have_done():
    rule = Divergence("abs", 0.5, adaptive=True, target=0.25, horizon=10.0)

    def fresh():
        return loop(reference=FakeReference(None, reference=REFERENCE), divergence=rule, total_steps=3, save_every=2)

    whole, restored = fresh(), fresh()
    whole.run()
    snapshot, state, score = whole.house.store.saved[2]
    assert (snapshot, score) == ("snapshot of version 14", None) and state["step"] == 2
    restored.restore(Path("checkpoints/2"), state)
    restored.run()
    journal = whole.house.actor.journal
    assert restored.house.actor.journal == [("publish", 14), ("load", 14), *journal[journal.index(("save", 2)) + 1 :]]
    assert restored.house.tracker.rows[3]["actor/kl_coef"] == whole.house.tracker.rows[3]["actor/kl_coef"] > 0.5
    assert restored.house.source.next == whole.house.source.next == 3 * PROMPTS


def test_a_fixed_coefficient_is_the_configurations():
    made = loop(reference=FakeReference(None, reference=REFERENCE), divergence=Divergence("abs", 0.5))
    made.restore(Path("1"), {"step": 1, "source": {"next": 0}, "divergence_coef": 0.9})
    assert made.divergence.coef == 0.5


def test_a_best_validation_is_saved_wherever_it_is():
    class FakeLearner(FakeScorer):
        """0.2, 0.6, 0.6, 0.4 at validation."""

        scores = iter([0.2, 0.6, 0.6, 0.4])

        def submit(self, rollouts, step):
            self.total = (next(self.scores),) * 4 if step is None else (1.0, 0.0, 2.0, 0.0)
            return super().submit(rollouts, step)

    changes = {"total_steps": 4, "validate_every": 1, "save_every": 3}
    judge = replace(validation_of(), best_metric="val/reward_score")
    made = loop(validation=judge, scorer=FakeLearner(None), **changes)
    made.run()
    scores = {step: score for step, (_, _, score) in made.house.store.saved.items()}
    assert scores == pytest.approx({1: 0.2, 2: 0.6, 3: 0.6, 4: 0.4}), "3 is due, 4 the last; both know their score"
    made = loop(validation=validation_of(), **changes)
    made.run()
    assert {step: saved[2] for step, saved in made.house.store.saved.items()} == {3: None, 4: None}


def test_an_unknown_best_metric_is_said(caplog):
    made = loop(validation=replace(validation_of(), best_metric="val/acuracy"))
    made.run()
    assert "no 'val/acuracy' among val/reward_score" in caplog.text


def test_what_is_reported():
    made = loop()
    made.run()
    row = made.house.tracker.rows[1]
    assert row["reward/overall"] == 0.75 and row["actor/pg_loss"] == 0.5 and row["actor/grad_norm"] == 2.0
    assert row["response_length/mean"] == 2.5 and row["response_length/truncated"] == 0.25
    assert row["rollout/logprob_gap_max"] == 0.0 and "actor/kl_coef" not in row
    for phase in ("generate", "probe", "reward", "credit", "update", "publish", "step"):
        assert row[f"perf/seconds_{phase}"] >= 0
    assert row["perf/tokens_per_second"] == pytest.approx(10 / row["perf/seconds_step"])
    assert row["perf/samples_per_second"] == pytest.approx(4 / row["perf/seconds_step"])
    assert all(math.isfinite(value) for value in row.values())


# ---------------------------------------------------------------------------------------------------------- divergence
# Rewards 1, 0 | 2, 0 of rows of 1, 2 | 3, 4 tokens. d = o - ref = -0.2 a token: o = -1, ref = -0.8.
REFERENCE = torch.full((4, 4), -0.8)
D = -0.2
PER_TOKEN = {"kl": D, "abs": 0.2, "mse": 0.02, "low_var_kl": math.exp(-D) + D - 1, "full": 0.3}


@pytest.mark.parametrize("penalty", PER_TOKEN)
def test_divergence_in_the_reward(penalty):
    brought = {"divergence": torch.full((4, 4), 0.3)} if penalty == "full" else {"reference": REFERENCE}
    made = loop(reference=FakeReference(None, **brought), divergence=Divergence(penalty, 0.5))
    row = made.step(0)
    each = PER_TOKEN[penalty]
    paid = [1 - 0.5 * each, 0 - 0.5 * 2 * each, 2 - 0.5 * 3 * each, 0 - 0.5 * 4 * each]
    first, second = sum(paid[:2]) / 2, sum(paid[2:]) / 2
    close(advantages_of(made), [paid[0] - first, paid[1] - first, paid[2] - second, paid[3] - second], atol=1e-6)
    assert row["actor/reference_kl"] == pytest.approx(each * 2.5, rel=1e-5) and row["actor/kl_coef"] == 0.5
    assert row["reward/overall"] == 0.75, "the reward is reported without the penalty"
    assert made.house.actor.updates[-1][1].divergence_coef == 0.0, "and the loss does not charge it again"


def test_divergence_token_by_token_for_reinforce_plus_plus():
    made = loop(
        reference=FakeReference(None, reference=REFERENCE),
        divergence=Divergence("kl", 0.5),
        estimator="reinforce_plus_plus",
    )
    made.step(0)
    # A token gets -0.5 * -0.2 = 0.1, the last one its reward as well; returns are sums of what follows.
    returns = [[1.1], [0.2, 0.1], [2.3, 2.2, 2.1], [0.4, 0.3, 0.2, 0.1]]
    flat = torch.tensor([x for row in returns for x in row], dtype=torch.float64)
    white = (flat - flat.mean()) / flat.std()
    batch = made.house.actor.updates[-1][0][0]
    close(batch.advantage[batch.rollouts.mask], white, rtol=1e-5)


def test_divergence_as_a_loss():
    made = loop(
        reference=FakeReference(None, reference=REFERENCE), divergence=Divergence("low_var_kl", 0.5, in_loss=True)
    )
    made.step(0)
    (batch,), loss = made.house.actor.updates[-1]
    assert loss.divergence == "low_var_kl" and loss.divergence_coef == 0.5
    same(batch.reference, REFERENCE.where(batch.rollouts.mask, 0.0))
    close(advantages_of(made), [0.5, -0.5, 1, -1])


def test_the_adaptive_coefficient():
    # |d| = 0.2 a token, 2.5 tokens a response: KL 0.5 of a target of 0.25: e = min(1, 0.2); 4 responses, horizon 10.
    made = loop(
        reference=FakeReference(None, reference=REFERENCE),
        divergence=Divergence("abs", 0.5, adaptive=True, target=0.25, horizon=10.0),
        total_steps=3,
    )
    made.run()
    coefs = [made.house.tracker.rows[step]["actor/kl_coef"] for step in (1, 2, 3)]
    assert coefs == pytest.approx([0.5, 0.5 * 1.08, 0.5 * 1.08**2])
    penalised = 0.5 * 1.08**2 * 0.2
    close(advantages_of(made)[:2], [(1 + penalised) / 2, -(1 + penalised) / 2])


def test_a_fixed_coefficient_stays():
    made = loop(reference=FakeReference(None, reference=REFERENCE), divergence=Divergence("abs", 0.5), total_steps=2)
    made.run()
    assert made.divergence.coef == 0.5


# ----------------------------------------------------------------------------------------------- advantages and credit
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.5, -0.5, 1, -1]),
        ({"scale_rewards": "group"}, [1 / math.sqrt(2), -1 / math.sqrt(2), 1 / math.sqrt(2), -1 / math.sqrt(2)]),
        ({"estimator": "rloo"}, [1, -1, 2, -2]),
    ],
)
def test_estimators(changes, expected):
    made = loop(**changes)
    made.step(0)
    close(advantages_of(made), expected, rtol=1e-5)


def test_credit_is_decided_before_the_split():
    """The trajectory factor looks at all visual rows of the step, though each group is an optimizer step of its own."""
    dependency = torch.tensor([[9.0] * 4, [9.0] * 4, [1.0] * 4, [3.0] * 4])  # rows 0 and 1 have no image
    actor = FakeActor(None, dependency=dependency)
    made = loop(actor=actor, credit=CreditRule(scaling=Scaling(0.8, 2.0)), prompts_per_update=1)
    made.step(0)
    # u = 0 and 1, mean 1/2: beta_max = 0.8 + 0.2 / 0.5 = 1.2.
    close(advantages_of(made), [0.5, -0.5, 0.8, -1.2])
    assert len(actor.updates[-1][0]) == 2


# ------------------------------------------------------------------------------------------------------------- batches
def credit_of(rollouts, select=None):
    mask = rollouts.mask
    rows = torch.arange(len(mask), dtype=torch.float32)[:, None]
    return Credit(
        rows.expand(mask.shape).where(mask, 0.0),
        mask if select is None else select,
        mask.float(),
        torch.ones(len(mask)),
    )


def six_rows():
    """Three groups of two, lengths 1, 2 | 3, 4 | 1, 2; the fourth row is cut off."""
    prompts = [fake_prompt(f"p{i}") for i in range(3)]
    rollouts = FakeGenerator([]).generate(prompts, Sampling(n=2))
    return rollouts, Signals(old=torch.full((6, 4), -0.5), reference=torch.full((6, 4), -3.0))


def test_whole_groups_with_denominators_of_their_own():
    rollouts, signals = six_rows()
    batches = list(assemble(recipe(prompts_per_update=2, passes=2), rollouts, signals, credit_of(rollouts)))
    assert [len(batch) for batch in batches] == [4, 2, 4, 2]
    assert [len(batch.rollouts.prompts) for batch in batches] == [2, 1, 2, 1]
    first, second = batches[:2]
    assert second.rollouts.text == ("p2 response 0", "p2 response 1") and second.rollouts.group.tolist() == [0, 0]
    same(first.weights.policy, first.rollouts.mask / 10)  # 1 + 2 + 3 + 4 tokens
    same(second.weights.policy, second.rollouts.mask / 3)
    close(second.advantage, [[4, 0, 0, 0], [5, 5, 0, 0]])
    same(second.reference, torch.full((2, 4), -3.0))
    for batch in batches:
        assert float(batch.weights.token.sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "row", "expected"),
    [
        ({"loss_type": "grpo"}, 1, [1 / 12, 1 / 12, 0, 0]),  # six responses, two tokens
        ({"loss_type": "dr_grpo"}, 1, [1 / 48, 1 / 48, 0, 0]),  # of max_response_length 8
        ({"loss_type": "dapo"}, 1, [1 / 13, 1 / 13, 0, 0]),
        ({"mask_truncated": True}, 3, [0, 0, 0, 0]),
        ({"mask_truncated": True}, 1, [1 / 9, 1 / 9, 0, 0]),  # without the four tokens of row 3
    ],
)
def test_weights_by_hand(changes, row, expected):
    rollouts, signals = six_rows()
    (batch,) = assemble(recipe(prompts_per_update=3, **changes), rollouts, signals, credit_of(rollouts))
    close(batch.weights.policy[row], expected)


@pytest.mark.parametrize(("denominator", "kept"), [("all", 1 / 13), ("selected", 1 / 6)])
def test_filtered_tokens(denominator, kept):
    rollouts, signals = six_rows()
    first_tokens = rollouts.mask & (torch.arange(4) == 0)
    rules = recipe(prompts_per_update=3, loss_token_denominator=denominator)
    (batch,) = assemble(rules, rollouts, signals, credit_of(rollouts, first_tokens))
    close(batch.weights.policy, first_tokens * kept)
    close(batch.weights.divergence, rollouts.mask / 13)


def test_the_correction_is_capped_and_follows_its_rows():
    rollouts, signals = six_rows()  # o = -0.5, b = -1: exp(0.5) = 1.65; row 5 was sampled at b = -3.5
    rollouts.behaviour[5] = -3.5
    rules = recipe(prompts_per_update=1, loss=Loss(tis_clip=2.0))
    batches = list(assemble(rules, rollouts, signals, credit_of(rollouts)))
    close(batches[0].correction, [[math.exp(0.5), 1, 1, 1], [math.exp(0.5)] * 2 + [1, 1]])
    close(batches[2].correction[1], [2, 2, 1, 1])
    close(next(assemble(recipe(), rollouts, signals, credit_of(rollouts))).correction, torch.ones(4, 4))


# ---------------------------------------------------------------------------------------------------------- validation
def test_a_function_called_score_is_not_the_total():
    scores = defaultdict(list)
    rewards = Rewards(torch.tensor([3.0]), {"score": torch.tensor([1.0])}, torch.tensor([False]))
    collect(scores, fake_rollouts([2]), rewards, Signals())
    assert scores["reward_score"] == [3.0] and scores["reward/score"] == [1.0]


def test_avg_and_pass_by_hand():
    """Three prompts, two responses each, in batches of two and one; one response of the third has no truth."""
    accuracy = {
        "v0 response 0": 1.0, "v0 response 1": 0.0, "v1 response 0": 0.0, "v1 response 1": 0.0,
        "v2 response 0": NAN, "v2 response 1": 1.0,
    }  # fmt: skip
    result = validation_of(prompts=3).run(FakeGenerator([]), FakeScorer([], accuracy=accuracy), 0)
    assert result.metrics["val/avg@2"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert result.metrics["val/pass@2"] == pytest.approx(2 / 3)
    assert result.metrics["val/reward_score"] == pytest.approx(2 / 6)
    assert result.metrics["val/reward/accuracy"] == pytest.approx(2 / 5)
    assert result.metrics["val/response_length"] == pytest.approx((1 + 2 + 3 + 4 + 1 + 2) / 6)
    assert result.metrics["val/truncated"] == pytest.approx(1 / 6)
    parts = ({"accuracy": 1.0}, {"accuracy": 0.0}, {})
    assert result.samples == tuple(
        Sample(f"v{i}", "fake", f"v{i} response 0", None, part.get("accuracy", 0.0), part)
        for i, part in enumerate(parts)
    )


def test_partial_credit_is_not_a_pass():
    result = validation_of(prompts=1).run(
        FakeGenerator([]), FakeScorer([], accuracy={"v0 response 0": 0.9, "v0 response 1": 0.0}), 0
    )
    assert result.metrics["val/pass@2"] == 0.0


def test_without_a_truth_there_is_no_accuracy():
    accuracy = {"v0 response 0": NAN, "v0 response 1": NAN}
    result = validation_of(prompts=1).run(FakeGenerator([]), FakeScorer([], accuracy=accuracy), 0)
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
