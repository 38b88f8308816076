"""One-step off-policy rollouts with fakes: when sampling happens, with which weights, and what a checkpoint stores."""

from dataclasses import replace

import pytest
import torch
from helpers import close
from loop_helpers import PROMPTS, FakeActor, FakeGenerator, FakePending, FakeScorer, loop

from mtrl.algorithms.advantages import Remax
from mtrl.algorithms.filtering import GroupFilter
from mtrl.algorithms.losses import Loss
from mtrl.training.dynamic_sampling import Filtering
from mtrl.training.off_policy import staleness_metrics
from mtrl.types import Signals

VERBS = ("generate", "submit", "result", "probe", "update", "load")


class Actor(FakeActor):
    """Its log-probs are off the sampler's (-1 each) as far as updates have brought it."""

    def probe(self, rollouts, needs, step):
        self.journal.append(("probe", step))
        return Signals(old_logprobs=torch.full(rollouts.mask.shape, -1.0 + self.version / 70).where(rollouts.mask, 0.0))


def made(**changes):
    return loop(actor=Actor(None), **{"off_policy_steps": 1, "total_steps": 3, "loss": Loss(tis_clip=2.0)} | changes)


def verbs(one):
    return [entry for entry in one.components.actor.journal if entry[0] in VERBS]


def test_a_step_learns_from_responses_of_the_previous_weights():
    one = made()
    one.run()
    assert verbs(one) == [
        ("generate", 0, 0), ("submit", 0), ("generate", 1, 0), ("submit", 1),
        ("probe", 0), ("result",), ("update", 1), ("load", 7),
        ("generate", 2, 7), ("submit", 2),
        ("probe", 1), ("result",), ("update", 1), ("load", 14),
        ("probe", 2), ("result",), ("update", 1), ("load", 21),
    ]  # fmt: skip
    rows = one.components.tracker.rows
    assert [rows[step]["rollout/staleness_mean"] for step in (1, 2, 3)] == [0.0, 7.0, 7.0]


class DedicatedGenerator(FakeGenerator):
    """Samples in the background until its rows are collected."""

    colocated = False

    def begin(self, prompts, sampling):
        self.journal.append(("begin", sampling.step, sampling.version))
        rows = self.generate(prompts, sampling)

        def arrived():
            self.journal.append(("arrive", sampling.step))
            return rows

        return arrived


def test_a_dedicated_engine_samples_during_the_update():
    """Its responses are waited for when the update is over, before it gets other weights; all else is as above."""
    beside, before = made(), made()
    beside.components.generator = DedicatedGenerator(beside.components.actor.journal)
    beside.run()
    before.run()
    order = [entry for entry in beside.components.actor.journal if entry[0] in ("begin", "arrive", "update", "load")]
    assert order == [
        ("begin", 0, 0), ("arrive", 0), ("begin", 1, 0), ("update", 1), ("arrive", 1), ("load", 7),
        ("begin", 2, 7), ("update", 1), ("arrive", 2), ("load", 14),
        ("update", 1), ("load", 21),
    ]  # fmt: skip
    rows = [each.components.tracker.rows for each in (beside, before)]
    for step in (1, 2, 3):
        assert same_but_clock(rows[0][step]) == same_but_clock(rows[1][step])


def same_but_clock(row):
    return {name: value for name, value in row.items() if not name.startswith("perf/")}


def test_on_policy_a_dedicated_engine_is_waited_for():
    one = made(off_policy_steps=0)
    one.components.generator = DedicatedGenerator(one.components.actor.journal)
    one.run()
    order = [entry[0] for entry in one.components.actor.journal if entry[0] in ("begin", "arrive", "update", "load")]
    assert order == ["begin", "arrive", "update", "load"] * 3


def test_older_responses_are_corrected_by_importance_sampling():
    one = made()
    one.run()
    for (batches, _), gap in zip(one.components.actor.updates, (0.0, 0.1, 0.2), strict=True):
        mask = batches[0].rollouts.mask
        close(batches[0].correction, torch.tensor(gap).exp().expand(mask.shape).where(mask, 1.0))


def test_on_policy_it_is_not_reported():
    one = made(off_policy_steps=0)
    one.run()
    assert one.ahead is None and "ahead" not in one.state()
    assert not any("staleness" in name for name in one.components.tracker.rows[1])
    assert [entry[:3] for entry in verbs(one) if entry[0] == "generate"] == [("generate", k, 7 * k) for k in range(3)]


def test_a_filter_refills_with_the_weights_of_now():
    """The earlier samples are the first round; replacements of dropped prompts are sampled once those are known."""
    good = {f"p{number} response 0": 0.0 for number in (0, 1, 3, 4, 5, 6)}
    scorer = FakeScorer(
        None, accuracy={f"p{number} response {row}": 1.0 for number in range(9) for row in (0, 1)} | good
    )
    one = made(scorer=scorer, filtering=Filtering(GroupFilter("spread")), total_steps=2)
    one.run()
    # p0, p1 and p2, p3 are sampled first, ahead; p2 is dropped, and p4 replaces it.
    assert [entry for entry in verbs(one) if entry[0] == "generate"] == [
        ("generate", 0, 0), ("generate", 1, 0), ("generate", 1, 7),
    ]  # fmt: skip
    batches, _ = one.components.actor.updates[1]
    assert [prompt.task.id for prompt in batches[0].rollouts.prompts] == ["p3", "p4"]
    assert batches[0].rollouts.version.tolist() == [0, 0, 7, 7]
    assert one.components.tracker.rows[2]["rollout/staleness_mean"] == 3.5


# ------------------------------------------------------------------------------------------------- to disk and back
class Folders:
    """A store that writes only the state that these tests need."""

    def __init__(self, place):
        self.place = place

    def is_best(self, score):
        return False

    def save(self, step, snapshots, state, score):
        folder = self.place / str(step) / "ahead"
        folder.mkdir(parents=True)
        snapshots["ahead"].detached().write(folder)
        self.state = state

    def restore(self, checkpoint, learners):
        learners["actor"].restore(checkpoint)
        learners["ahead"].restore(checkpoint / "ahead")


def saving(place, **changes):
    one = made(save_freq=1, **changes)
    one.components.store = Folders(place)
    return one


@pytest.mark.parametrize("greedy", [False, True])
def test_a_resumed_run_uses_the_same_responses(greedy, tmp_path):
    changes = {"greedy_baseline": True, "estimator": Remax()} if greedy else {}
    whole, first, second = (saving(tmp_path / name, **changes) for name in ("whole", "cut", "cut"))
    whole.run()
    first.step(0)
    first.save()
    second.restore(tmp_path / "cut" / "1", first.components.store.state)
    second.run()
    own = [updates for one in (first, second) for updates in one.components.actor.updates]
    for (batches, _), (others, _) in zip(own, whole.components.actor.updates, strict=True):
        mine, theirs = batches[0], others[0]
        assert (
            mine.rollouts.text == theirs.rollouts.text and mine.rollouts.finish_reason == theirs.rollouts.finish_reason
        )
        assert [p.task.id for p in mine.rollouts.prompts] == [p.task.id for p in theirs.rollouts.prompts]
        for name in ("tokens", "mask", "rollout_logprobs", "version", "group"):
            close(getattr(mine.rollouts, name), getattr(theirs.rollouts, name), rtol=0, atol=0)
        close(mine.correction, theirs.correction, rtol=0, atol=0)
        close(mine.advantage, theirs.advantage, rtol=0, atol=0)


def test_after_the_last_step_nothing_is_sampled(tmp_path):
    one, longer = saving(tmp_path, total_steps=1), saving(tmp_path, total_steps=2)
    one.run()
    longer.restore(tmp_path / "1", one.components.store.state)
    longer.run()
    assert ("generate", 1, 7) in verbs(longer), "the weights of now sample, since no others are there"


def test_an_error_within_a_step_saves_the_state_before_that_step(tmp_path):
    """The responses of the next step exist by then; they do not belong to the last complete step."""
    one = saving(tmp_path)
    one.step(0)
    asked = one.ahead.pending[1]
    one.ahead.pending[1] = replace(asked, rewards=Failing(one.components.actor.journal, None))
    with pytest.raises(RuntimeError, match="no reward"):
        one.step(1)
    assert 2 in one.ahead.pending
    one.save()
    again = saving(tmp_path)
    again.restore(tmp_path / "1", one.components.store.state)
    again.step(1)
    batches, _ = again.components.actor.updates[0]
    assert batches[0].rollouts.text == asked.sampled.rollouts.text
    assert len(batches[0].rollouts.prompts) == PROMPTS


class Failing(FakePending):
    def result(self, signals=None):
        raise RuntimeError("no reward")


def test_staleness_counts_updates():
    class Rows:
        version = torch.tensor([3, 3, 5, 5])

    assert staleness_metrics(5, Rows) == {"rollout/staleness_mean": 1.0, "rollout/staleness_max": 2.0}
