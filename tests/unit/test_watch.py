"""Warnings about problems that ruin runs: each appears once, and only when it should."""

import logging
import math
from pathlib import Path

import pytest

from mtrl.config.tree import known_leaves
from mtrl.tracking import alerts as watch
from mtrl.tracking.alerts import RunAlerts, Thresholds
from mtrl.utils.seeding import rng_for

HEALTHY = {
    "actor/entropy": 0.5,
    "actor/grad_norm": 1.0,
    "actor/skipped_steps": 0.0,
    "reward/success_rate": 0.4,
    "reward/zero_std_groups": 0.3,
    "response_length/truncated": 0.05,
    "rollout/logprob_gap_mean": 0.01,
}


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING)

    def run(steps, watcher=None):
        watcher = watcher or RunAlerts()
        for number, values in enumerate(steps, 1):
            watcher.metrics(number, HEALTHY | values)
        return [(record.args[0], record.args[1].split(":")[0]) for record in caplog.records]

    return run


def series(name, values):
    return [{name: value} for value in values]


# ---------------------------------------------------------------------------------------------------------- triggering
def test_entropy_collapse(warned):
    steps = series("actor/entropy", [1.0] * 5 + [0.5, 0.2] + [0.09] * 20)
    assert warned(steps) == [(12, "entropy collapse")]  # the fifth step in a row


def test_no_variance(warned):
    assert warned(series("reward/zero_std_groups", [0.9] * 3 + [1.0] * 20))[0][0] == 8


@pytest.mark.parametrize(("success", "why"), [(1.0, "too easy"), (0.0, "too hard"), (0.5, "are equal")])
def test_no_variance_reports_why(warned, caplog, success, why):
    warned([{"reward/zero_std_groups": 1.0, "reward/success_rate": success}] * 9)
    assert len(caplog.records) == 1 and why in caplog.text


def test_growing_truncation(warned):
    steps = series("response_length/truncated", [0.05] * 5 + [0.1, 0.2] + [0.25] * 20)
    assert warned(steps) == [(12, "growing truncation")]


def test_logprob_gap(warned):
    assert warned(series("rollout/logprob_gap_mean", [0.01] * 3 + [0.3] * 20)) == [(8, "log-prob gap")]


def test_gradient_spike(warned):
    assert warned(series("actor/grad_norm", [1.0] * 12 + [11.0] + [1.0] * 5 + [50.0])) == [(13, "gradient spike")]


def test_busy_processors(warned):
    """Two jobs on one core: each gets half of it, and nothing is idle."""
    steps = [{"perf/cpu_share": 0.9, "perf/cpu_free": 0.02}] * 3 + [{"perf/cpu_share": 0.3, "perf/cpu_free": 0.02}] * 20
    assert warned(steps) == [(8, "busy processors")]


def test_skipped_updates(warned):
    found = warned([{}, {"actor/skipped_steps": 1.0, "actor/grad_norm": math.nan}, {"actor/skipped_steps": 2.0}])
    assert [step for step, _ in found] == [2]


def test_several_problems_are_each_reported_once(warned):
    bad = {"reward/zero_std_groups": 1.0, "rollout/logprob_gap_mean": 1.0, "response_length/truncated": 1.0}
    found = warned([{}] * 5 + [bad] * 30)
    assert len(found) == 3 and {step for step, _ in found} == {10}


# ------------------------------------------------------------------------------------------------------ not triggering
def test_a_healthy_run_with_noise_is_left_in_peace(warned):
    """Halving entropy, gradients that vary fourfold, odd batches now and then."""
    noise = rng_for("noise").random((300, 4)).tolist()
    steps = [
        {
            "actor/entropy": 0.5 * (0.4 + 0.6 * math.exp(-number / 100)) * (0.5 + a),
            "actor/grad_norm": math.exp(2.8 * (b - 0.5)),
            "reward/zero_std_groups": 1.0 if c > 0.9 else 0.5 * c,
            "response_length/truncated": 0.3 if d > 0.9 else 0.1 * d,
            "rollout/logprob_gap_mean": 0.5 if d < 0.1 else 0.02 * d,
        }
        for number, (a, b, c, d) in enumerate(noise)
    ]
    assert warned(steps) == []


@pytest.mark.parametrize(
    "steps",
    [
        series("actor/entropy", [1.0] * 5 + [0.05, 0.05, 0.05, 0.05, 0.2] * 6),  # four in a row are no collapse
        [{"actor/entropy": 1.0}] * 5 + [{"actor/entropy": 0.01, "reward/success_rate": 0.97}] * 20,  # solved
        series("actor/entropy", [0.0] * 20),  # never had any, so there is no comparison
        series("response_length/truncated", [0.6] * 5 + [0.5] * 20),  # high, but coming down
        series("response_length/truncated", [0.0] * 5 + [0.19] * 20),  # grown, but few
        series("actor/grad_norm", [1.0] * 8 + [50.0]),  # too early to know a median
        series("actor/grad_norm", [0.0] * 30 + [1.0]),  # steps without updates do not count for the median
        series("actor/grad_norm", [1.0] * 30 + [9.9] * 30),
        [{"rollout/logprob_gap_mean": None, "rollout/logprob_gap_cut_mean": 0.5}] * 20,  # top-p: no error
        [{"perf/cpu_share": 0.2, "perf/cpu_free": 0.7}] * 20,  # a small model on many cores, which are idle
        [{"perf/cpu_share": 0.2}] * 20,  # the system does not report idle time
        [dict.fromkeys(HEALTHY)] * 20,
    ],
)
def test_quiet(warned, steps):
    assert warned(steps) == []


def test_estimators_without_groups(warned):
    assert warned(series("reward/zero_std_groups", [1.0] * 20), RunAlerts(groups=False)) == []


# -------------------------------------------------------------------------------------------------- runs that go on
def test_a_resumed_run_is_compared_with_its_own_beginning(warned):
    """It had collapsed before it was stopped; compared with itself it would look fine."""
    first = [HEALTHY | {"actor/entropy": 1.0}] * 5
    assert warned(series("actor/entropy", [0.05] * 10), RunAlerts(first)) == [(5, "entropy collapse")]


def test_a_healthy_resumed_run(warned):
    first = [HEALTHY | {"actor/entropy": 1.0}] * 2  # stopped in its third step: three more make the beginning
    assert warned(series("actor/entropy", [0.5] * 20), RunAlerts(first)) == []


def test_a_resumed_run_needs_steps_of_its_own_before_it_warns(warned):
    first = [HEALTHY] * 5
    assert warned(series("actor/grad_norm", [40.0] * 9), RunAlerts(first)) == []


# -------------------------------------------------------------------------------------------------------------- keeping
def test_memory_is_bounded():
    watcher = RunAlerts(limits=Thresholds(remembered=50))
    for number in range(500):
        watcher.metrics(number, HEALTHY | {f"other/{number}": 1.0})
    assert len(watcher._recent) == 50 and len(watcher._first) == 5 and len(watcher._recent[-1]) == len(HEALTHY)


def test_every_key_that_a_warning_names_exists():
    """Advice must name existing keys."""
    source = Path(watch.__file__).read_text(encoding="utf-8")
    words = {word.strip("`;,.()") for word in source.replace('"', " ").split()}
    named = {word.partition("=")[0] for word in words if word.startswith(("worker.", "optimization.", "dataset."))}
    assert named and named <= set(known_leaves())


def test_a_metric_that_is_not_finite_is_reported_once_by_name(caplog):
    tracker = RunAlerts()
    values = {"actor/pg_loss": math.nan, "actor/kl": math.inf, "actor/entropy": 1.0, "a": math.nan, "b": -math.inf}
    with caplog.at_level(logging.WARNING):
        tracker.metrics(1, {"actor/entropy": 1.0})
        assert not caplog.records
        tracker.metrics(2, values)
        tracker.metrics(3, values)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "step 2: actor/pg_loss, actor/kl, a and 1 more are NaN or infinite, null in metrics.jsonl: the run diverges. "
        "Lower worker.actor.optim.lr"
    )
