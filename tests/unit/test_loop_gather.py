"""The batch of a step, with fakes: filtered, refilled, replayed and compared with greedy responses, in which order, and
how it resumes after a restart."""

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import close, fake_experience, fake_rollouts
from loop_helpers import PROMPTS, FakeActor, FakeScorer, loop

from mtrl.algorithms.advantages import Remax
from mtrl.algorithms.filtering import GroupFilter
from mtrl.algorithms.losses import Loss, importance_ratio
from mtrl.algorithms.replay import ReplayRule
from mtrl.training.clock import Clock
from mtrl.training.collect import with_maps
from mtrl.training.dynamic_sampling import Filtering
from mtrl.types import Needs, Signals
from mtrl.utils.errors import RunError

SPREAD = Filtering(GroupFilter("spread"))


class Actor(FakeActor):
    """Returns signals for any number of rows and records their prompts."""

    def probe(self, rollouts, needs, step):
        self.journal.append(("probe", *(prompt.task.id for prompt in rollouts.prompts)))
        return Signals(old_logprobs=torch.full(rollouts.mask.shape, -1.0).where(rollouts.mask, 0.0))


class Scorer(FakeScorer):
    """Prompts of these numbers are worth learning from: one response of two is right. All else is always right."""

    def __init__(self, *good):
        super().__init__(None, accuracy=defaultdict(lambda: 1.0, {f"p{number} response 0": 0.0 for number in good}))


def made(*good, **changes):
    return loop(actor=Actor(None), scorer=Scorer(*good), **{"filtering": SPREAD} | changes)


def select_entries(made, *names):
    return [entry for entry in made.components.actor.journal if entry[0] in names]


# --------------------------------------------------------------------------------------------------------------- filter
def test_a_filter_scores_first_and_probes_only_the_remaining_groups():
    one = made(1, 3)
    one.step(0)
    assert select_entries(one, "take", "generate", "submit", "result", "probe", "update") == [
        ("take", PROMPTS), ("generate", 0, 0), ("submit", 0), ("result",),
        ("take", 1), ("generate", 0, 0), ("submit", 0), ("result",),
        ("take", 1), ("generate", 0, 0), ("submit", 0), ("result",),
        ("probe", "p1", "p3"),
        ("update", 1),
    ]  # fmt: skip


def test_rewards_that_read_signals_are_measured_before_they_are_judged():
    one = made(1, 3, reward_needs=Needs("old_logprobs"))
    one.step(0)
    assert select_entries(one, "submit", "result", "probe") == [
        ("submit", 0), ("probe", "p0", "p1"), ("result",),
        ("submit", 0), ("probe", "p2"), ("result",),
        ("submit", 0), ("probe", "p3"), ("result",),
    ]  # fmt: skip
    ((batch,), _) = one.components.actor.updates[0]
    assert (
        batch.old_logprobs.shape == batch.rollouts.mask.shape and batch.old_logprobs[batch.rollouts.mask].eq(-1).all()
    )


def test_the_update_gets_the_remaining_groups():
    one = made(1, 3, global_batch_size=1)
    one.step(0)
    batches = sorted(one.components.actor.updates[0][0], key=lambda batch: batch.rollouts.text)  # they are shuffled
    assert [tuple(p.task.id for p in batch.rollouts.prompts) for batch in batches] == [("p1",), ("p3",)]
    assert [batch.rollouts.text for batch in batches] == [
        ("p1 response 0", "p1 response 1"),
        ("p3 response 0", "p3 response 1"),
    ]
    assert [batch.advantage[:, 0].tolist() for batch in batches] == [[-0.5, 0.5]] * 2


def test_metrics_of_prompts_and_of_all_responses():
    one = made(1, 3, 4, 5, total_steps=2)
    one.run()
    first, second = (one.components.tracker.rows[step] for step in (1, 2))
    names = ("used", "dropped", "refilled")
    assert [first[f"filtering/prompts_{name}"] for name in names] == [2, 2, 2] and first["filtering/rounds"] == 3
    assert [second[f"filtering/prompts_{name}"] for name in names] == [2, 0, 0] and second["filtering/rounds"] == 1
    assert [second[f"filtering/prompts_{name}_so_far"] for name in names] == [4, 2, 2]
    assert first["reward/success_rate"] == 0.75, (
        "the mean over all four prompts; over the remaining ones it would be 1/2"
    )
    assert first["reward/zero_std_groups"] == 0.5


def test_the_engine_gets_the_counts_of_repeated_tasks():
    one = made(1, 3)
    asked = []
    before = one.components.generator.generate
    one.components.generator.generate = lambda prompts, sampling: (
        asked.append(dict(sampling.times_sampled)) or before(prompts, sampling)
    )
    one.step(0)
    assert asked == [{}, {"p0": 1, "p1": 1}, {"p0": 1, "p1": 1, "p2": 1}]


@pytest.mark.parametrize(("groups", "sizes"), [((1,), [1]), ((1, 4), [2]), ((0, 1, 3), [2, 1])])
def test_a_short_batch_learns_from_the_remaining_prompts(groups, sizes):
    """Whole groups in whole optimizer steps, the last of fewer."""
    short = Filtering(GroupFilter("spread"), max_refills=1)
    one = made(*groups, filtering=short, prompts_per_step=4, global_batch_size=2)
    one.step(0)
    batches, _ = one.components.actor.updates[0]
    assert [len(batch.rollouts.prompts) for batch in batches] == sizes
    assert [batch.weights.token.sum().item() for batch in batches] == pytest.approx([1.0] * len(sizes))


def test_a_short_batch_stops_before_anything_is_learnt():
    one = made(0, 1, 4, filtering=Filtering(GroupFilter("spread"), max_refills=1, on_short_batch="stop"), total_steps=2)
    with pytest.raises(RunError, match="after 1 refills 1 of the 2 prompts"):
        one.run()
    assert one.done == 1 and len(one.components.actor.updates) == 1
    assert one.whole["step"] == 1 and one.whole["source"] == {"next": PROMPTS}, "step 2 samples the same prompts again"
    assert one.whole["prompts"] == {"used": 2, "dropped": 0, "refilled": 0}


def test_a_restart_counts_on():
    good = (1, 2, 5, 7, 8, 9, 11)
    whole, restored = (made(*good, total_steps=3, save_freq=1) for _ in range(2))
    whole.run()
    restored.restore(Path("checkpoints/1"), whole.components.store.saved[1][1])
    restored.run()
    assert restored.state() == whole.state() and whole.state()["prompts"]["refilled"] > 2
    for step in (2, 3):
        row, expected = (each.components.tracker.rows[step] for each in (restored, whole))
        assert {k: v for k, v in row.items() if "perf/" not in k} == {
            k: v for k, v in expected.items() if "perf/" not in k
        }
    counts = whole.state()["prompts"]
    assert counts["used"] + counts["dropped"] == 3 * PROMPTS + counts["refilled"] == whole.components.source.next


def test_repeated_phases_add_up():
    one = made(1, 3)
    one.run()
    clock = one.clock
    assert clock.seconds.keys() >= {"generate", "reward", "probe"}
    with clock("generate"):
        before = clock.seconds["generate"]
    assert clock.seconds["generate"] >= before > 0


# ----------------------------------------------------------------------------------------------------- greedy baselines
# Rewards 0 1 for p0, 1 1 for p1; the greedy ones earn 0.25 and 0.75.
EARNED = {"p0 response 0": 0.0, "p0 greedy": 0.25, "p1 greedy": 0.75}


def remax(**changes):
    made = loop(actor=Actor(None), scorer=Scorer(), **{"estimator": Remax(), "greedy_baseline": True} | changes)
    made.components.scorer.accuracy.update(EARNED)
    generator, before = made.components.generator, made.components.generator.generate

    def generate(prompts, sampling):
        rollouts = before(prompts, sampling)
        if sampling.temperature > 0:
            return rollouts
        assert sampling.n == 1 and not sampling.cut and not sampling.times_sampled
        return replace(rollouts, text=tuple(f"{prompt.task.id} greedy" for prompt in prompts))

    generator.generate = generate
    return made


def test_remax_by_hand():
    made = remax()
    made.step(0)
    ((batch,), _) = made.components.actor.updates[0]
    assert batch.advantage[:, 0].tolist() == [-0.25, 0.75, 0.25, 0.25]
    assert [batch.advantage[row].count_nonzero().item() for row in range(4)] == [1, 2, 3, 4], "every token, no padding"


def test_greedy_responses_are_scored_and_not_logged():
    made = remax()
    made.run()
    row = made.components.tracker.rows[1]
    assert row["reward/greedy_baseline"] == 0.5 and row["reward/overall"] == 0.75
    assert row["response_length/mean"] == 2.5, "the mean over the four sampled responses"
    ((batch,), _) = made.components.actor.updates[0]
    assert not any("greedy" in text for text in batch.rollouts.text)
    assert select_entries(made, "take", "wake", "generate", "sleep", "submit", "probe", "result")[:9] == [
        ("take", PROMPTS), ("wake",), ("generate", 0, 0), ("generate", 0, 0), ("sleep",),
        ("submit", 0), ("submit", 0), ("probe", "p0", "p1"), ("result",),
    ]  # fmt: skip


def test_rewards_that_read_signals_read_those_of_the_greedy_response_too():
    made = remax(reward_needs=Needs("old_logprobs"))
    made.step(0)
    assert len(select_entries(made, "probe")) == 2


def test_baselines_stay_with_their_groups_in_a_filter():
    made = remax(filtering=SPREAD, prompts_per_step=1)
    made.components.scorer.accuracy.update({"p0 response 0": 1.0, "p1 response 0": 0.0})
    made.step(0)
    ((batch,), _) = made.components.actor.updates[0]
    assert [prompt.task.id for prompt in batch.rollouts.prompts] == ["p1"]
    assert batch.advantage[:, 0].tolist() == [-0.75, 0.25]


# --------------------------------------------------------------------------------------------------------------- replay
def replaying(*good, **changes):
    return made(*good, **{"filtering": None, "replay": ReplayRule(4, 1e-6, 0.0), "total_steps": 3} | changes)


def learnt_from(made):
    """The prompts of each step's update."""
    return [
        [prompt.task.id for batch in batches for prompt in batch.rollouts.prompts]
        for batches, _ in made.components.actor.updates
    ]


def test_groups_of_earlier_steps_replace_them():
    # Step 1: p0 has equal rewards, nothing is stored yet. Step 2: both are equal, one is stored. Step 3: both differ.
    one = replaying(1, 4, 5)
    one.run()
    assert learnt_from(one) == [["p0", "p1"], ["p1", "p3"], ["p4", "p5"]]
    rows = one.components.tracker.rows
    assert [rows[step]["replay/hits"] for step in (1, 2, 3)] == [0, 1, 0]
    assert [rows[step]["replay/wanted"] for step in (1, 2, 3)] == [1, 2, 0]
    assert [rows[step]["replay/size"] for step in (1, 2, 3)] == [1, 1, 3], "a group is stored once"
    assert rows[2]["replay/age_mean"] == rows[2]["replay/age_max"] == 1
    (batch,) = one.components.actor.updates[1][0]
    assert batch.rollouts.version.tolist() == [0, 0, 7, 7], "those of step 2 are of the newest weights"
    assert batch.advantage[:, 0].tolist() == [-0.5, 0.5, 0, 0]


def test_replayed_rows_keep_their_own_old_policy_and_sampler():
    """In step 1 o = -1 and b = -1, in step 2 o = -1.5 and b = -1. With l = -1.2, rho is e^-0.2 and e^0.3."""
    one = replaying(1, total_steps=2, loss=Loss(tis_clip=2.0))
    before = one.components.actor.probe
    one.components.actor.probe = lambda rollouts, needs, step: Signals(
        old_logprobs=before(rollouts, needs, step).old_logprobs * (1 + 0.5 * step)
    )
    one.run()
    (batch,) = one.components.actor.updates[1][0]
    mask = batch.rollouts.mask
    close(batch.old_logprobs[:, 0], [-1, -1, -1.5, -1.5])
    close(batch.correction[:, 0], [1, 1, math.exp(-0.5), math.exp(-0.5)])
    ratio = importance_ratio(torch.full(mask.shape, -1.2), batch.old_logprobs, mask, "token")
    close(ratio[:, 0], [math.exp(-0.2), math.exp(-0.2), math.exp(0.3), math.exp(0.3)])


def test_metrics_are_those_of_the_steps_own_responses():
    one = replaying(1, 4, 5)
    one.run()
    row = one.components.tracker.rows[2]
    assert row["reward/success_rate"] == 1 and row["reward/zero_std_groups"] == 1, "p2 and p3, not p1"


def test_a_filter_and_replay_together():
    short = Filtering(GroupFilter("spread"), max_refills=1, on_short_batch="stop")
    one = replaying(1, 3, filtering=short, total_steps=1)
    with pytest.raises(RunError, match="1 of the 2"):
        one.run()  # p0 is dropped, and so is its replacement p2; nothing is stored
    # Step 1: p2 replaces p0. Step 2: p3, p4 and then p5 are dropped; p6 stays, and a stored group fills the gap.
    one = replaying(1, 2, 6, filtering=short, total_steps=2)
    one.run()
    first, (own, replayed) = learnt_from(one)
    assert first == ["p1", "p2"] and own == "p6" and replayed in first
    row = one.components.tracker.rows[2]
    assert (row["filtering/prompts_used"], row["filtering/prompts_dropped"], row["replay/hits"]) == (1, 3, 1)


def test_a_restart_replays_the_same(tmp_path):
    good = (1, 2, 5, 9, 10)
    whole, restored = (replaying(*good, total_steps=6, save_freq=3) for _ in range(2))
    whole.run()
    snapshots, state, _ = whole.components.store.saved[3]
    assert snapshots.keys() == {"actor", "replay"} and state["replay"] == 3
    (tmp_path / "3").mkdir()
    snapshots["replay"].write(tmp_path / "3")
    restored.restore(tmp_path / "3", state)
    restored.run()
    assert learnt_from(restored) == learnt_from(whole)[3:]
    for step in (4, 5, 6):
        row, expected = (each.components.tracker.rows[step] for each in (restored, whole))
        assert {k: v for k, v in row.items() if "perf/" not in k} == {
            k: v for k, v in expected.items() if "perf/" not in k
        }
    assert sum(whole.components.tracker.rows[step]["replay/hits"] for step in (4, 5, 6)) > 2
    assert restored.state() == whole.state()


def test_an_error_within_a_step_keeps_the_earlier_stored_groups():
    one = replaying(1, 2, 5, total_steps=3)
    one.components.actor.update = lambda batches, loss, before=one.components.actor.update: (
        before(batches, loss) if len(one.components.actor.updates) < 1 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        one.run()
    assert [entry.payload.task for entry in one.memory.buffer.entries] == ["p1"], "p2 is of the step that failed"


def test_a_checkpoint_of_a_run_without_replay_resumes_with_an_empty_memory():
    one = replaying(1)
    one.restore(Path("checkpoints/2"), {"step": 2, "source": {"next": 4}, "divergence_coef": None})
    assert one.memory.buffer.entries == () and one.done == 2


# ------------------------------------------------------------------------------------------------ for those who look on
def test_phases_have_their_names():
    one = made(0, 1)
    one.step(0)
    assert set(one.clock.seconds) == {"generate", "reward", "probe", "credit", "update", "publish"}


@pytest.mark.parametrize("reads", [True, False])
def test_maps_of_the_first_responses_and_of_no_others(reads):
    """Whole groups come first; a model whose attention cannot be read has none."""
    asked, clock = [], Clock()

    def probe(rollouts, needs, step):
        asked.append((len(rollouts), needs, step))
        return Signals(attention_maps=tuple(range(len(rollouts))) if reads else None)

    step = fake_experience(fake_rollouts([1] * 4, group=[0, 0, 1, 1]))
    prober = SimpleNamespace(probe=probe)
    assert with_maps(step, prober, 0, 5, clock) is step and not asked
    found = with_maps(step, prober, 2, 5, clock)
    assert asked == [(2, Needs("attention_maps"), 5)] and set(clock.seconds) == {"probe"}
    assert found.signals.attention_maps == ((0, 1, None, None) if reads else None) and found.rollouts is step.rollouts
