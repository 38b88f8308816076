"""metrics.jsonl, rollouts.jsonl and the console, to the letter."""

import io
import json
import math
from dataclasses import replace

import pytest
import torch
from helpers import NAN, fake_rollouts

from mtrl.tracking import console
from mtrl.tracking.console import Console
from mtrl.tracking.run_files import RunFiles, read_rows
from mtrl.tracking.several import Trackers
from mtrl.types import Rewards


def lines(path):
    """As strict JSON: NaN and Infinity are refused."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def rewards_of(*total):
    count = len(total)
    parts = {"accuracy": torch.tensor(total), "mdi": torch.full((count,), NAN)}
    return Rewards(torch.tensor(total), parts, torch.tensor([False] * (count - 1) + [True]))


# --------------------------------------------------------------------------------------------------------------- files
def test_a_row_a_step(tmp_path):
    files = RunFiles(tmp_path / "new" / "run")
    files.metrics(1, {"reward/overall": 0.5, "actor/pg_loss": math.nan, "actor/grad_norm": math.inf})
    files.metrics(2, {"reward/overall": 0.75})
    files.validation(2, {"val/avg@1": 0.25}, {"kind": {"colour": 0.5, "shape": 0.0}})
    first, second, validation = lines(tmp_path / "new" / "run" / "metrics.jsonl")
    assert (first["step"], first["attempt"], first["reward/overall"]) == (1, 1, 0.5) and first["time"] > 1e9
    assert first["actor/pg_loss"] is None and first["actor/grad_norm"] is None
    assert second["step"] == 2 and "actor/pg_loss" not in second
    assert validation["val/avg@1"] == 0.25 and validation["val/by_kind/colour"] == 0.5 and validation["step"] == 2


def test_a_row_a_response(tmp_path):
    RunFiles(tmp_path).rollouts(3, fake_rollouts([2, 3], group=[0, 1], truncated=[False, True]), rewards_of(1.0, 0.25))
    first, second = lines(tmp_path / "rollouts.jsonl")
    time = first.pop("time")
    assert first == {
        "step": 3, "attempt": 1, "id": "p0", "response": "row 0", "answer": None, "reward": 1.0,
        "rewards": {"accuracy": 1.0, "mdi": None}, "failed": False, "tokens": 2, "finish": "stop",
    }  # fmt: skip
    assert time > 1e9 and second["failed"] and second["finish"] == "length" and second["tokens"] == 3
    assert second["id"] == "p1" and second["reward"] == 0.25


def test_odd_answers_are_still_json(tmp_path):
    rollouts = fake_rollouts([1])
    task = replace(rollouts.prompts[0].task, answer=[NAN, {"a": math.inf}, {1}, "选项"])
    RunFiles(tmp_path).rollouts(
        1, replace(rollouts, prompts=(replace(rollouts.prompts[0], task=task),)), rewards_of(1.0)
    )
    assert lines(tmp_path / "rollouts.jsonl")[0]["answer"] == [None, {"a": None}, "{1}", "选项"]
    assert "选项" in (tmp_path / "rollouts.jsonl").read_text(encoding="utf-8")


def test_attempts_count_and_files_only_grow(tmp_path):
    RunFiles(tmp_path).metrics(1, {"x": 1.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    second = RunFiles(tmp_path)
    second.metrics(1, {"x": 2.0})
    second.rollouts(1, fake_rollouts([1]), rewards_of(1.0))
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)
    assert [(row["attempt"], row["x"]) for row in read_rows(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 2.0)]
    assert read_rows(tmp_path / "rollouts.jsonl")[0]["attempt"] == 2
    assert RunFiles(tmp_path).attempt == 3


@pytest.mark.parametrize("cut", ['{"step": 2, "att', '{"step": 2, "a": {"b": 1}', "", '{"step": 2, "text": "选'])
def test_a_line_that_a_crash_cut_off_costs_only_itself(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    RunFiles(tmp_path).metrics(1, {"x": 1.0})
    with path.open("ab") as file:
        file.write(cut.encode()[: -1 if "选" in cut else None])  # in the middle of a character
    assert [row["step"] for row in read_rows(path)] == [1]
    again = RunFiles(tmp_path)
    again.metrics(2, {"x": 2.0})
    assert [(row["step"], row["attempt"]) for row in read_rows(path)] == [(1, 1), (2, 2)]


def test_no_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []


# ------------------------------------------------------------------------------------------------------------- console
class Terminal(io.StringIO):
    def isatty(self):
        return True


class FakeTime:
    """A clock that moves when it is told."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(console, "time", fake)
    return fake


VALUES = {
    "reward/overall": 0.5,
    "reward/success_rate": 0.25,
    "response_length/mean": 12.04,
    "perf/tokens_per_second": 99.6,
    "perf/seconds_step": 10.0,
    "actor/grad_norm": 1.0,
}


def test_plain_lines_off_a_terminal(time):
    stream = io.StringIO()
    shown = Console(4, stream)
    time.now = 130.0  # 20 s of start and validation, then a step of 10 s
    shown.metrics(1, VALUES)
    time.now = 150.0  # a step of 10 s and 10 s of something else: 30 s for two steps, two to go
    shown.metrics(2, VALUES)
    time.now = 160.0
    shown.metrics(4, VALUES)
    shown.close()
    numbers = "reward 0.500  accuracy 0.25  length 12.0  tok/s 100"
    assert stream.getvalue().splitlines() == [
        f"step 1/4  ETA 0:30  {numbers}",
        f"step 2/4  ETA 0:30  {numbers}",
        f"step 4/4  ETA 0:00  {numbers}",
    ]


def test_hours_and_missing_numbers(time):
    stream = io.StringIO()
    shown = Console(1000, stream)
    time.now += 10
    shown.metrics(1, {"perf/seconds_step": 10.0, "reward/overall": 1.0})  # 999 steps of 10 s: 2 h 46 min 30 s
    assert stream.getvalue() == "step 1/1000  ETA 2:46:30  reward 1.000\n"


def test_the_time_left_of_a_run_that_goes_on(time):
    """Steps of earlier attempts tell nothing about the speed of this one."""
    stream = io.StringIO()
    shown = Console(100, stream)
    time.now += 5
    shown.metrics(91, {"perf/seconds_step": 5.0})
    time.now += 5
    shown.metrics(92, {"perf/seconds_step": 5.0})
    assert [line.split("  ")[1] for line in stream.getvalue().splitlines()] == ["ETA 0:45", "ETA 0:40"]


def test_a_terminal_has_one_line_that_moves(time):
    stream = Terminal()
    shown = Console(4, stream)
    for step in range(1, 5):
        time.now += 10
        shown.metrics(step, VALUES if step == 1 else {"perf/seconds_step": 10.0})
    text = stream.getvalue()
    assert text.count("\r") == 4 and text.count("\n") == 1 and text.endswith("\n"), "only the last line is kept"
    first, second, *_ = text.split("\r")[1:]
    assert first.startswith("step 1/4 [======                  ]  ETA 0:30  reward")
    assert second.startswith("step 2/4 [============            ]  ETA 0:20") and len(second) == len(first)
    assert "[========================]" in text


def test_validation_lines():
    stream = io.StringIO()
    shown = Console(4, stream)
    shown.validation(
        0, {"val/avg@4": 0.375, "val/pass@4": 0.5, "val/reward_score": 1.0}, {"kind": {"a": 0.5, "b": 0.25}}
    )
    shown.validation(2, {"val/reward_score": 1.25}, {})
    assert stream.getvalue().splitlines() == [
        "validation at step 0: avg@4 0.375  pass@4 0.500",
        "  by kind: a 0.50  b 0.25",
        "validation at step 2: reward 1.250",
    ]


def test_a_terminal_keeps_validation_lines(time):
    stream = Terminal()
    shown = Console(4, stream)
    shown.metrics(1, VALUES)
    shown.validation(1, {"val/avg@1": 0.375}, {})
    shown.metrics(2, VALUES)
    shown.close()
    progress, kept, after = stream.getvalue().split("\r")[1:]
    assert kept.startswith("validation at step 1") and kept.endswith("\n") and len(kept.rstrip("\n")) == len(progress)
    assert after.startswith("step 2/4") and after.endswith("\n")


# ------------------------------------------------------------------------------------------------------------- several
class FakeTracker:
    def __init__(self):
        self.heard = []

    def __getattr__(self, name):
        return lambda *arguments: self.heard.append((name, *arguments))


def test_several_hear_the_same():
    first, second = FakeTracker(), FakeTracker()
    both = Trackers([first, second])
    rollouts, rewards = fake_rollouts([1]), rewards_of(1.0)
    both.metrics(1, {"a": 1.0})
    both.rollouts(1, rollouts, rewards)
    both.validation(1, {}, {})
    both.close()
    expected = [("metrics", 1, {"a": 1.0}), ("rollouts", 1, rollouts, rewards), ("validation", 1, {}, {}), ("close",)]
    assert first.heard == expected and second.heard == expected
