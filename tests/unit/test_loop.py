"""The loop with fakes: the calls of a step, where it stops, and how it resumes."""

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loop_helpers import PROMPTS, REFERENCE, FakeReference, FakeScorer, FakeSyncedReference, loop, make_validation, spec

from mtrl.algorithms.credit.controls import RandomFilter
from mtrl.algorithms.divergence import Divergence
from mtrl.commands.train import describe_saving
from mtrl.config import load_config
from mtrl.data import DataError
from mtrl.training.clock import Clock
from mtrl.training.interrupt import Interrupt
from mtrl.training.resumable_run import Run
from mtrl.training.resume import Start
from mtrl.utils.errors import RunError


# ------------------------------------------------------------------------------------------------------ order of calls
def test_a_step_in_order():
    made = loop(reference=FakeReference(None, ref_logprobs=torch.zeros(4, 4)), divergence=Divergence("kl", 0.1))
    made.step(0)
    assert made.components.actor.journal == [
        ("take", PROMPTS),
        ("wake",),
        ("generate", 0, 0),
        ("sleep",),  # before anybody else wants the device
        ("submit", 0),  # user code starts before the probes, and is waited for after them
        ("probe", 0),
        ("reference", 0),
        ("result",),
        ("update", 1),
        ("wake",),
        ("publish", 7),
        ("load", 7),
        ("sleep",),
        ("rollouts", 1),
    ]


def test_steps_are_keyed_and_versions_handed_over():
    made = loop(total_steps=3)
    made.run()
    journal = made.components.actor.journal
    assert [entry for entry in journal if entry[0] == "generate"] == [
        ("generate", 0, 0), ("generate", 1, 7), ("generate", 2, 14),
    ]  # fmt: skip
    for name in ("submit", "probe"):
        assert [entry[1] for entry in journal if entry[0] == name] == [0, 1, 2]
    for name in ("metrics", "rollouts"):  # logs count finished steps
        assert [entry[1] for entry in journal if entry[0] == name] == [1, 2, 3]
    assert [entry for entry in journal if entry[0] == "save"] == [("save", 3)]


@pytest.mark.parametrize(
    ("changes", "validated", "saved"),
    [
        ({}, [5], [5]),
        ({"validate_first": True}, [0, 5], [5]),
        ({"val_freq": 2, "save_freq": 3}, [2, 4, 5], [3, 5]),
        ({"val_freq": 5, "save_freq": 1}, [5], [1, 2, 3, 4, 5]),
        ({"val_freq": 0}, [5], [5]),
        ({"validate_first": True, "val_freq": 1}, [0, 1, 2, 3, 4, 5], [5]),
    ],
)
def test_when_to_validate_and_to_save(changes, validated, saved):
    made = loop(validation=make_validation(), total_steps=5, **changes)
    made.run()
    journal = made.components.actor.journal
    assert [entry[1] for entry in journal if entry[0] == "validation"] == validated
    assert [entry[1] for entry in journal if entry[0] == "save"] == saved
    assert journal[-1] == ("save", 5) and journal[-2] == ("validation", 5), "the last model is validated, then saved"


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({"save_freq": 4}, [2, 4, 5]),  # at 120 s; step 4 by steps; at the end
        ({"save_freq": 500}, [2, 4, 5]),
        ({"save_freq": 1}, [1, 2, 3, 4, 5]),
        ({"save_freq": -1}, [5]),
        ({"save_freq": 500, "save_minutes": None}, [5]),
    ],
)
def test_long_steps_are_saved_by_time(changes, saved, monkeypatch):
    """Steps of 70 s each, a checkpoint after 2 minutes."""
    made = loop(total_steps=5, **{"save_minutes": 2.0, **changes})
    start = made.saved_at
    monkeypatch.setattr("mtrl.training.loop.time", SimpleNamespace(monotonic=lambda: start + 70 * made.done))
    made.run()
    assert [entry[1] for entry in made.components.actor.journal if entry[0] == "save"] == saved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_freq": 500, "save_minutes": 30.0}, "every 500 steps and every 30 minutes; a kill costs the work since"),
        ({"save_freq": 5000, "save_minutes": 30.0}, "every 30 minutes; a kill costs"),
        ({"save_freq": 500, "save_minutes": None}, "every 500 steps; a kill"),
        ({"save_freq": 5000, "save_minutes": None}, "only at the end, so a kill costs the whole run"),
        ({"save_freq": -1, "save_minutes": 30.0}, "only at the end, so a kill costs the whole run"),
    ],
)
def test_the_start_says_what_a_kill_costs(changes, message):
    assert describe_saving(spec(total_steps=1000, **changes)).startswith(message)


def test_validation_samples_the_newest_weights_at_its_own_step():
    made = loop(validation=make_validation(), total_steps=2, val_freq=1)
    made.run()
    journal = made.components.actor.journal
    during = [journal[i - 5 : i] for i, entry in enumerate(journal) if entry[0] == "validation"]
    assert during == [
        [("wake",), ("generate", 0, 7), ("sleep",), ("submit", None), ("result",)],
        [("wake",), ("generate", 0, 14), ("sleep",), ("submit", None), ("result",)],
    ]


def test_no_validation_set_is_no_error():
    made = loop(validate_first=True)
    made.run()
    assert not any(entry[0] == "validation" for entry in made.components.actor.journal)


def make_run(made, directory, overrides):
    closing = ExitStack()
    closing.callback(made.components.tracker.close)
    return Run(load_config(None, overrides), directory, "an id", Start(), made, Interrupt(), closing)


@pytest.mark.parametrize(
    ("val_only", "expected"),
    [
        (True, ["wake", "generate", "sleep", "submit", "result", "validation"]),
        (False, ["take", "wake", "generate", "sleep", "submit", "probe"]),
    ],
)
def test_val_only(tmp_path, val_only, expected):
    made = loop(validation=make_validation())
    make_run(made, tmp_path, {"training.val_only": val_only}).train()
    names = [entry[0] for entry in made.components.actor.journal]
    assert names[:6] == expected and ("update" in names) != val_only
    assert made.components.tracker.closed == 1 and (names[-1] == "all saved") != val_only


def test_everything_is_closed_when_a_step_fails(tmp_path):
    made = loop()
    made.components.actor.update = None  # calling it raises
    with pytest.raises(TypeError):
        make_run(made, tmp_path, {}).train()
    assert made.components.tracker.closed == 1


# ------------------------------------------------------------------------------------------------- errors that end it
class Broken(Exception):
    pass


def failing(made, part, method, step):
    """Makes a component raise when it is called for the step of that number, from 1."""
    component, calls = getattr(made.components, part), []
    before = getattr(component, method)

    def call(*arguments, **options):
        calls.append(arguments)
        if len(calls) == step:
            raise Broken(f"{part} at step {step}")
        return before(*arguments, **options)

    setattr(component, method, call)


@pytest.mark.parametrize(
    ("part", "method", "saved"),
    [
        ("source", "take", 2),
        ("generator", "generate", 2),
        ("scorer", "submit", 2),
        ("actor", "probe", 2),
        ("actor", "update", None),  # it has begun to change the weights
        ("generator", "load", None),
        ("tracker", "rollouts", 3),
        ("tracker", "metrics", 3),
    ],
)
def test_an_error_saves_the_last_whole_step(tmp_path, capfd, part, method, saved):
    made = loop(total_steps=5)
    failing(made, part, method, 3)
    with pytest.raises(Broken, match=part):
        make_run(made, tmp_path, {}).train()
    assert list(made.components.store.saved) == ([] if saved is None else [saved])
    assert ("saved after step" in capfd.readouterr().err) == (saved is not None)
    if saved is not None:
        snapshots, state, _ = made.components.store.saved[saved]
        assert snapshots == {"actor": f"snapshot of version {7 * saved}"}
        assert state["step"] == saved and state["source"] == {"next": PROMPTS * saved}, (
            "the prompts of step 3 are drawn again"
        )


def test_a_run_resumes_after_an_error_with_the_same_calls(tmp_path):
    def fresh():
        rule = Divergence("abs", 0.5, divergence_type="adaptive", divergence_target=0.25, divergence_horizon=10.0)
        return loop(reference=FakeReference(None, ref_logprobs=REFERENCE), divergence=rule, total_steps=4)

    for part, method in (("scorer", "submit"), ("tracker", "rollouts")):
        whole, broken, restored = fresh(), fresh(), fresh()
        whole.run()
        failing(broken, part, method, 3)
        with pytest.raises(Broken):
            make_run(broken, tmp_path, {}).train()
        ((step, (_, state, _)),) = broken.components.store.saved.items()
        restored.restore(Path(f"checkpoints/{step}"), state)
        restored.run()
        rows, expected = restored.components.tracker.rows, whole.components.tracker.rows
        assert rows.keys() == set(range(step + 1, 5))
        for number, row in rows.items():
            assert {k: v for k, v in row.items() if "perf/" not in k} == {
                k: v for k, v in expected[number].items() if "perf/" not in k
            }
        assert restored.state() == whole.state()


@pytest.mark.parametrize("method", ["rollouts", "metrics", "validation"])
def test_a_tracker_that_fails_costs_no_row_and_no_validation(tmp_path, method):
    """The step is saved before the error ends the run: what it has not written by then, the resume must write."""
    judge = replace(make_validation(), best_metric="val/reward_score")
    whole, broken, restored = (loop(validation=judge, total_steps=4, val_freq=2) for _ in range(3))
    whole.run()
    failing(broken, "tracker", method, 1 if method == "validation" else 2)
    with pytest.raises(Broken, match="tracker"):
        make_run(broken, tmp_path, {}).train()
    ((step, (_, state, score)),) = broken.components.store.saved.items()
    assert step == 2 and (score is not None) == (method == "validation"), "the best model is known by its score"
    restored.restore(Path("checkpoints/2"), state)
    restored.run()

    def logged(*loops):
        journals = [made.components.actor.journal for made in loops]
        return [entry for journal in journals for entry in journal if entry[0] in ("metrics", "validation")]

    # The call that failed is not in the journal; within it `Trackers` has called the others, which write the files.
    failed = {"rollouts": [], "metrics": [("metrics", 2)], "validation": [("validation", 2)]}[method]
    assert sorted([*logged(broken, restored), *failed]) == sorted(logged(whole))
    assert restored.state() == whole.state()
    assert "unvalidated" not in restored.components.store.saved[4][1]


def test_an_error_before_the_last_validation_leaves_it_to_the_resume(tmp_path):
    broken, restored = (loop(validation=make_validation(), total_steps=2) for _ in range(2))
    failing(broken, "tracker", "rollouts", 2)
    with pytest.raises(Broken):
        make_run(broken, tmp_path, {}).train()
    _, state, _ = broken.components.store.saved[2]
    restored.restore(Path("checkpoints/2"), state)
    restored.run()
    journal = restored.components.actor.journal
    assert journal[-2:] == [("validation", 2), ("save", 2)] and ("take", PROMPTS) not in journal


def test_an_error_in_the_metrics_of_a_rule_repeats_the_step(tmp_path):
    class Rule(RandomFilter):
        def metrics(self, experience):
            raise Broken("metrics of a rule")

    made = loop(total_steps=2, credit=(Rule(),))
    with pytest.raises(RunError, match="metrics of a rule"):
        make_run(made, tmp_path, {}).train()
    assert not made.components.store.saved, "a saved step would have no row"
    assert ("update", 1) not in made.components.actor.journal


def test_nothing_is_saved_twice_or_before_the_first_step(tmp_path):
    made = loop(total_steps=5, save_freq=2)
    failing(made, "scorer", "submit", 3)
    with pytest.raises(Broken):
        make_run(made, tmp_path, {}).train()
    assert [entry for entry in made.components.actor.journal if entry[0] == "save"] == [("save", 2)]
    made = loop(validation=make_validation(), validate_first=True)
    failing(made, "scorer", "submit", 1)
    with pytest.raises(Broken):
        make_run(made, tmp_path, {}).train()
    assert not made.components.store.saved


def test_a_save_that_fails_does_not_hide_why_the_run_ended(tmp_path, caplog):
    made = loop(total_steps=5)
    failing(made, "scorer", "submit", 3)
    failing(made, "store", "save", 1)
    with pytest.raises(Broken, match="scorer"):
        make_run(made, tmp_path, {}).train()
    assert "step 2 could not be saved: store" in caplog.text


def test_data_that_cannot_be_read_end_a_run_with_a_line(tmp_path):
    made = loop(total_steps=5)

    def take(count):
        raise DataError("3 of the 200 rows drawn so far could not be read")

    made.components.source.take = take
    with pytest.raises(RunError, match="3 of the 200 rows"):
        make_run(made, tmp_path, {}).train()


# ---------------------------------------------------------------------------------------------- stopping and going on
def test_a_stop_request_finishes_the_step_and_saves():
    made = loop(total_steps=5)
    made.components.stop = lambda: made.done == 2
    made.run()
    assert made.done == 2 and list(made.components.store.saved) == [2]
    assert made.components.actor.journal[-2:] == [("metrics", 2), ("save", 2)]


def test_a_restored_loop_makes_the_same_calls():
    rule = Divergence("abs", 0.5, divergence_type="adaptive", divergence_target=0.25, divergence_horizon=10.0)

    def fresh():
        return loop(reference=FakeReference(None, ref_logprobs=REFERENCE), divergence=rule, total_steps=3, save_freq=2)

    whole, restored = fresh(), fresh()
    whole.run()
    snapshots, state, score = whole.components.store.saved[2]
    assert (snapshots, score) == ({"actor": "snapshot of version 14"}, None) and state["step"] == 2
    restored.restore(Path("checkpoints/2"), state)
    restored.run()
    journal = whole.components.actor.journal
    assert restored.components.actor.journal == [
        ("wake",),
        ("publish", 14),
        ("load", 14),
        ("sleep",),
        *journal[journal.index(("save", 2)) + 1 :],
    ]
    assert (
        restored.components.tracker.rows[3]["actor/kl_coef"] == whole.components.tracker.rows[3]["actor/kl_coef"] > 0.5
    )
    assert restored.components.source.next == whole.components.source.next == 3 * PROMPTS


def test_a_reference_is_synced_and_saved():
    def fresh():
        return loop(refreshed=FakeSyncedReference(), sync_ref_every=2, total_steps=5, save_freq=3)

    whole, restored = fresh(), fresh()
    whole.run()
    journal = [entry for entry in whole.components.actor.journal if entry[0] in ("publish", "sync", "save")]
    assert journal == [
        ("publish", 7), ("publish", 14), ("sync", 1), ("publish", 21), ("save", 3), ("publish", 28),
        ("sync", 2), ("publish", 35), ("save", 5),
    ]  # fmt: skip
    snapshots, state, _ = whole.components.store.saved[3]
    assert snapshots == {"actor": "snapshot of version 21", "reference": "reference, synced 1 times"}
    restored.restore(Path("checkpoints/3"), state)
    assert restored.components.reference.times == 3, "it restores the saved reference"
    restored.run()
    assert restored.components.reference.times == 4
    stays = loop(total_steps=4)
    stays.run()
    assert set(stays.components.store.saved[4][0]) == {"actor"}, "a fixed reference is made from the initial model"


def test_a_fixed_coefficient_is_the_configurations():
    made = loop(reference=FakeReference(None, ref_logprobs=REFERENCE), divergence=Divergence("abs", 0.5))
    made.restore(Path("1"), {"step": 1, "source": {"next": 0}, "divergence_coef": 0.9})
    assert made.divergence.divergence_coef == 0.5


def test_a_best_validation_is_saved_at_any_step():
    class FakeLearner(FakeScorer):
        """0.2, 0.6, 0.6, 0.4 at validation."""

        scores = iter([0.2, 0.6, 0.6, 0.4])

        def submit(self, rollouts, step):
            self.total = (next(self.scores),) * 4 if step is None else (1.0, 0.0, 2.0, 0.0)
            return super().submit(rollouts, step)

    changes = {"total_steps": 4, "val_freq": 1, "save_freq": 3}
    judge = replace(make_validation(), best_metric="val/reward_score")
    made = loop(validation=judge, scorer=FakeLearner(None), **changes)
    made.run()
    scores = {step: score for step, (_, _, score) in made.components.store.saved.items()}
    assert scores == pytest.approx({1: 0.2, 2: 0.6, 3: 0.6, 4: 0.4}), "3 is due, 4 the last; both know their score"
    made = loop(validation=make_validation(), **changes)
    made.run()
    assert {step: saved[2] for step, saved in made.components.store.saved.items()} == {3: None, 4: None}


def test_an_unknown_best_metric_is_reported(caplog):
    made = loop(validation=replace(make_validation(), best_metric="val/acuracy"))
    made.run()
    assert "no 'val/acuracy' among val/reward_score" in caplog.text


def test_the_metrics_of_a_step():
    made = loop()
    made.run()
    row = made.components.tracker.rows[1]
    assert row["reward/overall"] == 0.75 and row["actor/pg_loss"] == 0.5 and row["actor/grad_norm"] == 2.0
    assert row["response_length/mean"] == 2.5 and row["response_length/truncated"] == 0.25
    assert row["rollout/logprob_gap_max"] == 0.0 and "actor/kl_coef" not in row
    for phase in ("generate", "probe", "reward", "credit", "update", "publish", "step"):
        assert row[f"perf/seconds_{phase}"] >= 0
    assert row["perf/tokens_per_second"] == pytest.approx(10 / row["perf/seconds_step"])
    assert row["perf/samples_per_second"] == pytest.approx(4 / row["perf/seconds_step"])
    assert all(math.isfinite(value) for value in row.values())


def test_a_process_that_waits_for_others_does_not_report_its_cpu_share(monkeypatch):
    """Its share would be near 0, and would cause a warning about other programs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    alone, of_two = Clock().metrics(60, 3), Clock().metrics(60, 3, devices=2)
    assert "perf/cpu_share" in alone
    assert "perf/cpu_share" not in of_two and "perf/cpu_free" not in of_two
    assert of_two["perf/throughput"] == pytest.approx(of_two["perf/tokens_per_second"] / 2)
