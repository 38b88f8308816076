"""The loop with a critic, with fakes: when it is probed, when it learns, what is saved."""

from pathlib import Path

import pytest
import torch
from loop_helpers import PROMPTS, FakeActor, loop

from mtrl.algorithms.advantages import Gae
from mtrl.algorithms.value_loss import ValueLoss
from mtrl.types import Needs, Signals


class FakeCritic:
    """Returns the value 1/2 for every token and stores its batches."""

    def __init__(self, journal):
        self.journal, self.updates, self.restored = journal, [], None

    def probe(self, rollouts, needs, step):
        assert "values" in needs
        self.journal.append(("values", step))
        return Signals(values=torch.full(rollouts.mask.shape, 0.5).where(rollouts.mask, 0.0))

    def update(self, batches, loss):
        batches = list(batches)
        self.journal.append(("critic update", len(batches)))
        self.updates.append((batches, loss))
        return {"value_loss": 0.25, "lr": 1e-5}

    def snapshot(self):
        return f"after {len(self.updates)} updates"

    def restore(self, directory):
        self.restored = directory.name


def loop_with_critic(**changes):
    made = loop(needs=Needs("old_logprobs", "values"), estimator=Gae(gamma=1.0, lam=1.0), **changes)
    critic = FakeCritic(made.components.actor.journal)
    made.components.critic, made.components.probers = critic, [*made.components.probers, critic]
    return made


def test_a_step_in_order():
    made = loop_with_critic()
    made.step(0)
    journal = [entry for entry in made.components.actor.journal if entry[0] not in ("wake", "sleep")]
    assert journal == [
        ("take", PROMPTS),
        ("generate", 0, 0),
        ("submit", 0),
        ("probe", 0),
        ("values", 0),
        ("result",),
        ("critic update", 1),
        ("update", 1),
        ("publish", 7),
        ("load", 7),
        ("rollouts", 1),
    ]


def test_both_learn_from_the_same_batches():
    """Rows of 1 to 4 tokens, rewards 1 0 2 0 on the last: with gamma = lam = 1 the return of a token is its reward."""
    made = loop_with_critic(value_loss=ValueLoss(0.2), global_batch_size=1)
    made.step(0)
    (batches, loss), *_ = made.components.critic.updates
    (theirs, _), *_ = made.components.actor.updates
    assert loss == ValueLoss(0.2) and len(batches) == 2
    assert all(ours is other for ours, other in zip(batches, theirs, strict=True))
    earned = {1: 1.0, 2: 0.0, 3: 2.0, 4: 0.0}  # sorted by tokens, since the order of groups is random
    for batch in batches:
        mask = batch.rollouts.mask
        expected = torch.tensor([earned[int(length)] for length in mask.sum(1)])[:, None].expand(mask.shape)
        torch.testing.assert_close(batch.returns, expected.where(mask, 0.0))
        assert set(batch.values[mask].tolist()) == {0.5}
    assert sorted(int(n) for batch in batches for n in batch.rollouts.mask.sum(1)) == [1, 2, 3, 4]


def test_the_metrics_of_a_step():
    values = loop_with_critic().step(0)
    assert (values["critic/value_loss"], values["critic/lr"]) == (0.25, 1e-5)
    assert values["actor/pg_loss"] == 0.5 and "actor/value_loss" not in values
    # Constant values explain nothing; 1, 2 x 0, 3 x 2 and 4 x 0 have the mean 7/10.
    assert values["critic/explained_variance"] == pytest.approx(0.0)
    assert values["critic/return_mean"] == pytest.approx(0.7)


def test_in_the_warm_up_the_critic_learns_alone():
    made = loop_with_critic(total_steps=3, critic_warmup=2)
    made.run()
    journal, rows = made.components.actor.journal, made.components.tracker.rows
    learning = [entry[0] for entry in journal if "update" in entry[0]]
    assert learning == ["critic update", "critic update", "critic update", "update"]
    assert [entry[1:] for entry in journal if entry[0] == "generate"] == [(0, 0), (1, 0), (2, 0)], "the policy stays"
    assert ["actor/pg_loss" in rows[step] for step in (1, 2, 3)] == [False, False, True]
    assert all("critic/value_loss" in rows[step] for step in (1, 2, 3))


def test_the_warm_up_counts_from_the_start_of_the_run():
    made = loop_with_critic(total_steps=3, critic_warmup=2)
    made.restore(Path("2"), {"step": 2, "source": {"next": 4}, "divergence_coef": None})
    made.run()
    assert len(made.components.actor.updates) == 1


def test_it_is_saved_and_restored_with_the_actor():
    made = loop_with_critic(total_steps=2, save_freq=1)
    made.run()
    saved = made.components.store.saved
    assert saved[1][0] == {"actor": "snapshot of version 7", "critic": "after 1 updates"}
    assert saved[2][0] == {"actor": "snapshot of version 14", "critic": "after 2 updates"}
    again = loop_with_critic(total_steps=2)
    again.restore(Path("1"), saved[1][1])
    assert again.components.critic.restored == "1" and again.version == 7


def test_without_a_critic_there_are_no_critic_metrics():
    made = loop(actor=FakeActor([]))
    values = made.step(0)
    made.save()
    assert not [name for name in values if name.startswith("critic/")]
    assert made.components.store.saved[1][0].keys() == {"actor"}
