"""The files of a run: their exact contents, their rotation, and the effects of a broken disk."""

import json
import logging
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import NAN, fake_experience, fake_rollouts

from mtrl.protocols import Tracker
from mtrl.tracking import jsonl
from mtrl.tracking.jsonl import JsonlWriter, iter_rows, last_row, read_rows, rotated_parts
from mtrl.tracking.run_files import RunFiles, first_steps, read_validations
from mtrl.tracking.several import Trackers
from mtrl.types import Credit, Needs, Rewards, ValidationSample


def lines(path):
    """Parses strict JSON: NaN and Infinity are errors."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def reward_description(*total):
    count = len(total)
    parts = {"accuracy": torch.tensor(total), "mdi": torch.full((count,), NAN)}
    return Rewards(torch.tensor(total), parts, torch.tensor([False] * (count - 1) + [True]))


def make_credit(rollouts):
    shape = rollouts.mask.shape
    return Credit(torch.ones(shape), rollouts.mask, rollouts.mask.float(), torch.ones(shape[0]))


def write_rollouts(files, step, rollouts, rewards):
    files.rollouts(step, fake_experience(rollouts, rewards=rewards, credit=make_credit(rollouts)))


# --------------------------------------------------------------------------------------------------------------- files
def test_one_row_per_step(tmp_path):
    files = RunFiles(tmp_path / "new" / "run")
    files.metrics(1, {"reward/overall": 0.5, "actor/pg_loss": math.nan, "actor/grad_norm": math.inf})
    files.metrics(2, {"reward/overall": 0.75})
    files.validation(2, {"val/avg@1": 0.25}, {"kind": {"colour": 0.5, "shape": 0.0}})
    first, second, validation = lines(tmp_path / "new" / "run" / "metrics.jsonl")
    assert (first["step"], first["attempt"], first["reward/overall"]) == (1, 1, 0.5) and first["time"] > 1e9
    assert first["actor/pg_loss"] is None and first["actor/grad_norm"] is None
    assert second["step"] == 2 and "actor/pg_loss" not in second
    assert validation["val/avg@1"] == 0.25 and validation["val/by_kind/colour"] == 0.5 and validation["step"] == 2


def test_one_row_per_response(tmp_path):
    rollouts = fake_rollouts([2, 3], group=[0, 1], truncated=[False, True])
    write_rollouts(RunFiles(tmp_path), 3, rollouts, reward_description(1.0, 0.25))
    first, second = lines(tmp_path / "rollouts.jsonl")
    time = first.pop("time")
    assert first == {
        "step": 3, "attempt": 1, "id": "p0", "response": "row 0", "answer": None, "reward": 1.0,
        "rewards": {"accuracy": 1.0, "mdi": None}, "failed": False, "tokens": 2, "finish": "stop", "version": 0,
    }  # fmt: skip
    assert time > 1e9 and second["failed"] and second["finish"] == "length" and second["tokens"] == 3
    assert second["id"] == "p1" and second["reward"] == 0.25


def test_odd_responses_are_still_json(tmp_path):
    rollouts = fake_rollouts([1])
    task = replace(rollouts.prompts[0].task, answer=[NAN, {"a": math.inf}, {1}, "选项"])
    write_rollouts(
        RunFiles(tmp_path),
        1,
        replace(rollouts, prompts=(replace(rollouts.prompts[0], task=task),)),
        reward_description(1.0),
    )
    assert lines(tmp_path / "rollouts.jsonl")[0]["answer"] == [None, {"a": None}, "{1}", "选项"]
    assert "选项" in (tmp_path / "rollouts.jsonl").read_text(encoding="utf-8")


def test_attempts_count_and_files_only_grow(tmp_path):
    RunFiles(tmp_path).metrics(1, {"x": 1.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    second = RunFiles(tmp_path)
    second.metrics(1, {"x": 2.0})
    write_rollouts(second, 1, fake_rollouts([1]), reward_description(1.0))
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


def test_validation_samples_are_kept(tmp_path):
    files = RunFiles(tmp_path)
    files.validation(
        4, {"val/reward_score": 1.0}, {}, [ValidationSample("a:1", "<image>Which?", "B", ["B", NAN], 0.5, {"x": 0.5})]
    )
    files.validation(8, {"val/reward_score": 1.0}, {})
    (row,) = lines(tmp_path / "validations.jsonl")
    assert row.pop("time") > 1e9
    assert row == {
        "step": 4, "attempt": 1, "id": "a:1", "prompt": "<image>Which?", "response": "B", "answer": ["B", None],
        "reward": 0.5, "rewards": {"x": 0.5},
    }  # fmt: skip


def test_rollouts_of_validated_steps_only(tmp_path):
    files = RunFiles(tmp_path, every_step=False)
    for step in (1, 2, 3, 4, 5):
        write_rollouts(files, step, fake_rollouts([1, 1]), reward_description(1.0, 0.0))
        if step in (2, 4):
            files.validation(step, {"val/reward_score": 0.0}, {})
    files.close()
    assert [row["step"] for row in read_rows(tmp_path / "rollouts.jsonl")] == [2, 2, 4, 4]


def test_the_attempt_counts_from_every_file(tmp_path):
    """A crash in the first step leaves rollouts of an attempt that metrics.jsonl never heard of."""
    write_rollouts(RunFiles(tmp_path), 1, fake_rollouts([1]), reward_description(1.0))
    assert not (tmp_path / "metrics.jsonl").exists() and RunFiles(tmp_path).attempt == 2


def test_rows_without_a_step_are_left_out_and_reported_with_their_file(tmp_path, caplog):
    """Somebody edited the file: no row of it may end the run."""
    rows = [
        {"val/reward_score": 1.0}, {"step": None, "val/reward_score": 1.0}, {"step": "1", "perf/seconds_step": 1.0},
        {"step": 1, "perf/seconds_step": 1.0, "actor/entropy": "low", "attempt": "first"},
        {"step": 2, "val/reward_score": 0.5, "val/avg@1": [], "attempt": []},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_validations(tmp_path) == {2: {"val/reward_score": 0.5}}
    (said,) = caplog.messages
    assert said == f"{tmp_path / 'metrics.jsonl'}: 3 rows without a step are left out"
    assert first_steps(tmp_path) == [{"step": 1, "perf/seconds_step": 1.0}]
    assert RunFiles(tmp_path).attempt == 1


def test_rows_of_earlier_attempts(tmp_path):
    first = RunFiles(tmp_path)
    first.validation(0, {"val/reward_score": 0.1, "val/avg@1": NAN, "perf/seconds_validation": 3.0}, {"k": {"a": 0.5}})
    for step in range(1, 9):
        first.metrics(step, {"x": step, "perf/seconds_step": 1.0})
    first.validation(8, {"val/reward_score": 0.3}, {})
    second = RunFiles(tmp_path)
    second.validation(8, {"val/reward_score": 0.4}, {})
    assert read_validations(tmp_path) == {
        0: {"val/reward_score": 0.1, "val/by_k/a": 0.5},
        8: {"val/reward_score": 0.4},
    }
    assert [row["x"] for row in first_steps(tmp_path)] == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------------------------ rotation
def test_a_full_file_becomes_a_part_and_readers_see_all_in_order(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    file = JsonlWriter(path, rotate_at=100)
    for number in range(12):
        file.append([{"n": number, "text": "x" * 20}])  # 41 or 42 bytes: two fit
    assert [part.name for part in rotated_parts(path)] == [f"rollouts.{number}.jsonl" for number in (1, 2, 3, 4, 5)]
    assert [row["n"] for row in iter_rows(path)] == list(range(12))
    assert all(part.stat().st_size <= 100 for part in (*rotated_parts(path), path))
    assert [row["n"] for row in lines(path)] == [10, 11] and [row["n"] for row in lines(rotated_parts(path)[0])] == [
        0,
        1,
    ]


def test_numbers_sort_as_numbers_and_continue_after_a_restart(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    for number in range(12):
        JsonlWriter(path, rotate_at=1).append([{"n": number}])  # a new process each time
    assert [row["n"] for row in iter_rows(path)] == list(range(12)) and len(rotated_parts(path)) == 11


def test_the_oldest_parts_are_removed_and_reported_once(tmp_path, caplog):
    path = tmp_path / "rollouts.jsonl"
    (tmp_path / "rollouts.notes.jsonl").write_text("{}\n")  # somebody else's
    file = JsonlWriter(path, rotate_at=1, keep=3)
    for number in range(8):
        file.append([{"n": number}])
    assert [row["n"] for row in iter_rows(path)] == [4, 5, 6, 7]
    assert [part.name for part in rotated_parts(path)] == ["rollouts.5.jsonl", "rollouts.6.jsonl", "rollouts.7.jsonl"]
    assert len(caplog.records) == 1 and "rollouts.1.jsonl is deleted" in caplog.text
    assert (tmp_path / "rollouts.notes.jsonl").exists()


def test_rows_of_one_step_stay_together(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    file = JsonlWriter(path, rotate_at=50)
    file.append([{"n": n} for n in range(20)])  # larger than a part may be
    file.append([{"n": 20}])
    assert len(lines(rotated_parts(path)[0])) == 20 and len(lines(path)) == 1


def test_the_last_row_is_found_from_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "TAIL_BYTES", 16)
    path = tmp_path / "metrics.jsonl"
    assert last_row(path) is None
    path.write_text("")
    assert last_row(path) is None
    path.write_text('{"n": 1}\n{"n": 2, "text": "' + "\u2028选" * 50 + '"}\n{"n": 3, "cut', encoding="utf-8")
    assert last_row(path)["n"] == 2
    path.write_text('{"n": 1}\n[2]\nnull\n{"n"' + "x" * 300)
    assert last_row(path) == {"n": 1}


# -------------------------------------------------------------------------------------------------------- broken disks
def test_a_directory_that_vanishes_costs_only_its_files(tmp_path, caplog):
    files = RunFiles(tmp_path / "run")
    files.metrics(1, {"x": 1.0})
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run").rmdir()
    files.metrics(2, {"x": 2.0})
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [2]
    assert caplog.text.count("was removed") == 1


def test_rows_wait_until_the_directory_is_writable_again(tmp_path, caplog):
    """A file replaces the directory, so that not even root can write there."""
    files = RunFiles(tmp_path / "run")
    files.metrics(1, {"x": 1.0})
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "run").write_text("in the way")
    files.metrics(2, {"x": 2.0})
    files.metrics(3, {"x": 3.0})
    write_rollouts(files, 3, fake_rollouts([1]), reward_description(1.0))
    assert caplog.text.count("metrics.jsonl cannot be written") == 1 and caplog.text.count("cannot be written") == 2
    (tmp_path / "run").unlink()
    (tmp_path / "away").rename(tmp_path / "run")
    files.metrics(4, {"x": 4.0})
    files.close()
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [row["step"] for row in read_rows(tmp_path / "run" / "rollouts.jsonl")] == [3]
    assert caplog.text.count("can be written again") == 2 and "lost" not in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_does_not_stop_the_run(tmp_path, caplog):
    files = RunFiles(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")  # each write fails with ENOSPC
    files.metrics(1, {"x": 1.0})
    files.metrics(2, {"x": 2.0})
    assert caplog.text.count("No space left") == 1
    (tmp_path / "metrics.jsonl").unlink()
    files.metrics(3, {"x": 3.0})
    assert [row["x"] for row in lines(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0]


def test_half_a_line_is_taken_back(tmp_path):
    """A limit on the size of files stops a write in the middle, as a disk that fills up does."""
    path = tmp_path / "metrics.jsonl"
    code = f"""
import logging, resource, signal
from pathlib import Path
from mtrl.tracking.jsonl import JsonlWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = JsonlWriter(Path({str(path)!r}))
file.append([{{"n": 1}}])
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))
file.append([{{"n": 2, "text": "x" * 100}}])
assert Path({str(path)!r}).read_text() == '{{"n": 1}}\\n', "half a line stays"
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
file.append([{{"n": 3}}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "cannot be written" in done.stderr
    assert [row["n"] for row in lines(path)] == [1, 2, 3]


def test_waiting_rows_are_bounded_and_losses_are_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(jsonl, "WAITING_BYTES", 100)
    (tmp_path / "run").write_text("in the way")
    file = JsonlWriter(tmp_path / "run" / "metrics.jsonl")
    for number in range(30):
        file.append([{"n": number}])  # 9 or 10 bytes
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text
    (tmp_path / "run").unlink()
    file.append([{"n": 30}])
    kept = [row["n"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert kept == list(range(31 - len(kept), 31)) and 10 <= len(kept) <= 12
    assert f"{31 - len(kept)} rows are lost" in caplog.text


def test_rows_that_could_never_be_written_are_reported_at_the_end(tmp_path, caplog):
    (tmp_path / "run").write_text("in the way")
    file = JsonlWriter(tmp_path / "run" / "metrics.jsonl")
    file.append([{"n": 1}, {"n": 2}])
    file.close()
    assert caplog.records[-1].levelno == logging.ERROR and "2 rows could not be written" in caplog.text


# ------------------------------------------------------------------------------------------------------------- several
class FakeTracker(Tracker):
    def __init__(self, *needs):
        self.heard, self.needs = [], Needs(*needs)

    def metrics(self, *arguments):
        self.heard.append(("metrics", *arguments))

    def rollouts(self, *arguments):
        self.heard.append(("rollouts", *arguments))

    def validation(self, *arguments):
        self.heard.append(("validation", *arguments))

    def close(self):
        self.heard.append(("close",))


def test_several_hear_the_same():
    first, second = FakeTracker(), FakeTracker()
    both = Trackers([first, second])
    experience, samples = fake_experience(fake_rollouts([1])), [ValidationSample("a", "", "", None, 0.0)]
    both.metrics(1, {"a": 1.0})
    both.rollouts(1, experience)
    both.validation(1, {}, {}, samples)
    both.close()
    expected = [
        ("metrics", 1, {"a": 1.0}),
        ("rollouts", 1, experience),
        ("validation", 1, {}, {}, samples),
        ("close",),
    ]
    assert first.heard == expected and second.heard == expected


@pytest.mark.parametrize("event", ["metrics", "rollouts", "validation", "close"])
def test_a_tracker_that_fails_keeps_no_other_from_its_row(event, caplog):
    class Failing(Tracker):
        def __init__(self, name):
            setattr(self, event, lambda *arguments: self.fail(name))

        def fail(self, name):
            raise ValueError(f"{name} failed")

    heard = FakeTracker()
    several = Trackers([Failing("the first"), Failing("the second"), heard])
    arguments = {
        "metrics": (1, {"a": 1.0}),
        "rollouts": (1, fake_experience(fake_rollouts([1]))),
        "validation": (1, {}, {}, []),
        "close": (),
    }[event]
    with pytest.raises(ValueError, match="the first failed"):
        getattr(several, event)(*arguments)
    assert heard.heard == [(event, *arguments)]
    assert "Failing failed too" in caplog.text and "the second failed" in caplog.text


def test_needs_of_several_trackers_are_combined():
    assert Trackers(
        [FakeTracker("old_logprobs", "attention_mass"), FakeTracker(), FakeTracker("dependency")]
    ).needs == Needs("old_logprobs", "attention_mass", "dependency")
    assert Trackers([]).needs == Needs()


def test_a_tracker_may_implement_only_some_methods():
    class Numbers(Tracker):
        def __init__(self):
            self.seen = []

        def metrics(self, step, values):
            self.seen.append((step, values))

    numbers = Numbers()
    several = Trackers([numbers])
    several.metrics(1, {"a": 1.0})
    several.rollouts(1, fake_experience(fake_rollouts([1])))
    several.validation(1, {}, {}, [])
    several.close()
    assert numbers.seen == [(1, {"a": 1.0})] and not numbers.needs
