"""`mtrl reward`: the values, failures and time of a function on stored responses."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from run_helpers import bound_by_permissions

from mtrl.cli import main
from mtrl.data import open_sources
from mtrl.data.cache import DiskCache
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.report.reward_page import failures, parts_table, report
from mtrl.rewards.dry_run import DryRunResult, ScoredResponse, ValueSummary, histogram
from mtrl.rewards.outcomes import Outcome

FUNCTION = '''
import time

def score(data, scale=1.0):
    """The response says what to do; the row's columns say how much."""
    does = data["response"]
    if does == "raise": raise RuntimeError("deliberate, on " + str(data["level"]))
    if does == "hang": time.sleep(1000)
    if does == "sleep": time.sleep(0.3)
    if does == "none": return None
    side = data["images"][0].size if data["images"] else (0, 0)
    return scale * data["level"], {"width": side[0], "tokens": len(data["response_token_ids"]), "word": "text"}
'''


@pytest.fixture
def function(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    return str(tmp_path / "mine.py")


def write_rows(path: Path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tried(capsys, *words, status=0):
    """The last line of JSON, and the whole output."""
    assert main(["reward", *words]) == status
    said = capsys.readouterr()
    return json.loads(said.out.splitlines()[-1]), said.out, said.err


def make_rows(responses, **columns):
    rows = [{"prompt": f"what is {i}", "answer": "x", "level": i, "response": r} for i, r in enumerate(responses)]
    return [row | columns for row in rows]


# ------------------------------------------------------------------------------------------------------------- numbers
def test_spread_by_hand():
    spread = ValueSummary.from_values([1.0, 3.0, float("nan"), 5.0])
    assert (spread.mean, spread.min, spread.max, spread.absent) == (3.0, 1.0, 5.0, 1)
    assert spread.std == pytest.approx((8 / 3) ** 0.5)
    assert np.isnan(ValueSummary.from_values([float("nan")]).mean) and ValueSummary.from_values([]).absent == 0


def test_histogram_by_hand():
    assert histogram([1.0, 0.0, 1.0]) == [(0.0, 0.0, 1), (1.0, 1.0, 2)]
    bins = histogram([float(x) for x in range(100)], max_bins=4)
    assert [count for _, _, count in bins] == [25, 25, 25, 25] and bins[0][:2] == (0.0, 24.75) and bins[-1][1] == 99.0


def test_totals_and_parts_by_hand():
    outcomes = [
        Outcome(1.0, {"width": 4}, seconds=0.5),
        Outcome(None, {"word": "text", "endless": float("inf")}),
        Outcome(failure="Traceback\nKeyError: 'x'", seconds=2.0),
        Outcome(0.0, {"width": 8}),
    ]
    trial = DryRunResult(
        "mine", tuple(ScoredResponse(f"row {i}", "said", each) for i, each in enumerate(outcomes)), 2.0, -1.0
    )
    assert trial.totals == [1.0, 0.0, -1.0, 0.0]
    assert trial.parts() == {"mine": ValueSummary(0.5, 0.5, 0.0, 1.0, 1), "width": ValueSummary(6.0, 2.0, 4.0, 8.0, 1)}
    assert [each.origin for each in trial.slowest(2)] == ["row 2", "row 0"]
    assert "KeyError: 'x'" in failures(trial) and "row 2" in failures(trial)
    own, width, total = (line.split() for line in parts_table(trial).splitlines()[1:])
    assert own == ["mine", "0.5000", "0.5000", "0.0000", "1.0000", "1", "1"]
    assert width[0] == "width" and total[:2] == ["total", "0.0000"]
    assert "4 responses in 2.00 s, 2 per second" in report(trial)


# ------------------------------------------------------------------------------------------------------------ datasets
def test_a_dataset_with_responses(function, tmp_path, capsys):
    data = write_rows(tmp_path / "data.jsonl", make_rows(["fine", "raise", "none", "sleep", "hang", "fine"]))
    words = ["worker.reward.timeout_s=2", "worker.reward.reward_fn_kwargs={scale: 10}", "worker.reward.num_cpus=1"]
    found, out, err = tried(capsys, function, "--data", data, *words)
    assert (found["function"], found["samples"], found["failed"]) == ("mine", 6, 2)
    assert found["parts"]["mine"] == {
        "mean": pytest.approx(80 / 3), "std": pytest.approx(np.std([0, 30, 50])), "min": 0.0, "max": 50.0, "absent": 1,
    }  # fmt: skip
    assert found["mean"] == pytest.approx(80 / 6) and "word" not in found["parts"]
    assert "RuntimeError: deliberate, on 1" in out and "took longer than 2 s" in out
    assert f"{tmp_path}/data.jsonl, row 2: raise" in out
    slowest = out.split("slowest")[1].splitlines()[1:3]
    assert any("sleep" in line and float(line.split()[0]) >= 300 for line in slowest)
    assert "response_token_ids is empty" in err


def test_a_function_that_always_fails_is_an_exit_status_too(function, tmp_path, capsys):
    data = write_rows(tmp_path / "data.jsonl", make_rows(["raise", "raise"]))
    found, out, _ = tried(capsys, function, "--data", data, status=1)
    assert found["failed"] == found["samples"] == 2 and "failed: 2 of 2" in out
    data = write_rows(tmp_path / "more.jsonl", make_rows(["raise", "none"]))
    assert tried(capsys, function, "--data", data)[0]["failed"] == 1, "one that does not apply has not failed"


def test_several_responses_per_row_and_images(function, tmp_path, capsys):
    Image.new("RGB", (70, 40)).save(tmp_path / "a.png")
    data = write_rows(tmp_path / "data.jsonl", make_rows([["fine", "none", "fine"]], images=["a.png"], level=2))
    found, _, err = tried(capsys, function, "--data", data)
    assert found["samples"] == 3 and found["parts"]["width"]["mean"] == 70 and found["parts"]["mine"]["absent"] == 1
    assert "images have their own size" in err


def test_without_responses_the_answers_are_tried(tmp_path, capsys):
    data = write_rows(tmp_path / "data.jsonl", [{"question": "why?", "answer": a} for a in ("B", "C", "A")])
    found, _, err = tried(capsys, "accuracy", "--data", data, "dataset.prompt_key=question")
    assert found["mean"] == 1.0 and found["samples"] == 3
    assert "3 rows have no column 'response'" in err


def test_a_model_provides_tokens(function, capsys, tmp_path):
    data = write_rows(tmp_path / "data.jsonl", make_rows(["<answer>A</answer>"]))
    found, _, err = tried(capsys, function, "--data", data, f"worker.actor.model.model_path={MODEL_DIRECTORY}")
    assert found["parts"]["tokens"]["mean"] == 4 and "note" not in err  # three and the end token, as in a run


def test_math_runs_in_its_sandbox(tmp_path, capsys):
    rows = [{"prompt": "?", "answer": "1/2", "response": r"\boxed{0.5}"}, {"prompt": "?", "answer": 3, "response": "3"}]
    found, _, _ = tried(capsys, "math", "--data", write_rows(tmp_path / "data.jsonl", rows), "worker.reward.num_cpus=1")
    assert found["function"] == "math" and found["mean"] == 0.5 and found["failed"] == 0


def test_bad_rows_stop_it_or_are_skipped(function, tmp_path, capsys):
    rows = [*make_rows(["fine", "fine"]), {"answer": "no prompt"}, {"prompt": "neither"}]
    data = write_rows(tmp_path / "data.jsonl", rows)
    assert main(["reward", function, "--data", data]) == 2
    assert "data.jsonl, row 3: it has no column 'prompt'" in capsys.readouterr().err
    found, _, err = tried(capsys, function, "--data", data, "dataset.on_bad_row=skip")
    assert found["samples"] == 2 and "2 rows cannot be used and are skipped" in err


# ----------------------------------------------------------------------------------------------------- a run's rollouts
@pytest.fixture
def run(tmp_path):
    """The files of a run as it leaves them: two steps, the first of them done twice."""
    Image.new("RGB", (80, 80)).save(tmp_path / "a.png")
    data = [{"prompt": f"<image>what is {i}", "images": ["a.png"], "answer": "x", "level": i + 1} for i in range(3)]
    path = write_rows(tmp_path / "train.jsonl", data)
    (source,) = open_sources(path, DiskCache(tmp_path / "cache"))
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text(f"dataset: {{train_files: {path}, min_pixels: 784}}\n")
    heads = [(1, 1, 0, "undone"), (1, 2, 0, "fine"), (1, 2, 0, "none"), (2, 2, 2, "fine")]
    rows = [
        {"step": step, "attempt": attempt, "id": f"{source.fingerprint}:{row}", "response": text, "answer": "x"}
        for step, attempt, row, text in heads
    ]
    write_rows(directory / "rollouts.jsonl", rows)
    return directory


@pytest.mark.parametrize("name", ["rollouts.jsonl", "."])
def test_rollouts_are_joined_with_the_rows_they_came_from(run, function, name, capsys):
    found, out, err = tried(capsys, function, "--data", str(run / name))
    assert found["samples"] == 3, "for a repeated step the last attempt counts"
    assert found["parts"]["mine"]["mean"] == 2.0 and found["parts"]["mine"]["absent"] == 1  # levels 1 and 3
    assert found["parts"]["width"]["mean"] == 84, "as the model sees it: a multiple of its patches"
    assert "prompt, images and columns are those of" in err and "step 2, " in out and "row 3: fine" in out


def test_rollouts_without_their_data_still_have_response_and_answer(run, tmp_path, capsys):
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "exact.py").write_text("def f(data):\n    return data['response'] == data['ground_truth']\n")
    found, _, err = tried(capsys, str(tmp_path / "exact.py"), "--data", str(run / "rollouts.jsonl"))
    assert found["samples"] == 3 and found["failed"] == 0 and found["mean"] == 0
    assert "the run's data cannot be opened" in err and "3 of 3 responses have no row" in err


@pytest.mark.parametrize("strange", [{"response": "x"}, {"step": 1, "id": 7, "response": "x"}])
def test_a_foreign_row_is_reported_with_its_file(run, strange, capsys):
    with (run / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(strange) + "\n")
    assert main(["reward", "format", "--data", str(run / "rollouts.jsonl")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rollouts.jsonl, row " in line and "was not written by a run" in line


def test_rollouts_alone(run, capsys):
    (run / "config.yaml").unlink()
    found, _, err = tried(capsys, "format", "--data", str(run / "rollouts.jsonl"))
    assert found["mean"] == 0 and "there is no config.yaml next to" in err and "3 of 3 responses" in err


def test_a_function_that_needs_signals_is_reported(tmp_path, capsys):
    (tmp_path / "looks.py").write_text("def f(data, signals):\n    return len(signals)\n")
    data = write_rows(tmp_path / "data.jsonl", make_rows(["fine"]))
    found, _, err = tried(capsys, str(tmp_path / "looks.py"), "--data", data)
    assert found["failed"] == 0 and found["mean"] == 0 and "asks for signals" in err


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "mtrl reward FILE --data"),
        (["mine.py"], "--data: name the rollouts.jsonl"),
        (["mine.py", "--data"], "--data: expected one argument"),
        (["nowhere.py", "--data", "data.jsonl"], "there is no reward file nowhere.py"),
        (["broken.py", "--data", "data.jsonl"], "SyntaxError"),
        (["mine.py:other", "--data", "data.jsonl"], "other"),
        (["no.such.module:f", "--data", "data.jsonl"], "No module named 'no'; name file.py[:name]"),
        (["./mine", "--data", "data.jsonl"], "./mine is no Python file; name file.py[:name]"),
        (["folder.py", "--data", "data.jsonl"], "there is no reward file folder.py"),
        (["empty.py", "--data", "data.jsonl"], "It has none; write empty.py:NAME"),
        (["my rewards.py", "--data", "data.jsonl"], "there is no reward file my rewards.py"),
        (["", "--data", "data.jsonl"], "which reward?"),
        (["mine.py", "--data", ""], "--data: expected one argument"),
        (["mine.py", "--data", "--data"], "--data: expected one argument"),
        (["mine.py", "--data", "data.jsonl", "--data=other.jsonl"], "--data: given 2 times, keep one"),
        (["mine.py", "--data=nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["mine.py", "--data", "data.jsonl", "worker.reward.timeout_s"], "worker.reward.timeout_s: not an override"),
        (["mine.py", "--data", "locked.jsonl"], "locked.jsonl cannot be used: Permission denied"),
        (["mine.py", "--data", "zoo@tset"], "no split 'tset'; it has train, validation, test"),
        (["acuracy", "--data", "data.jsonl"], "there is no reward acuracy; use a built-in (accuracy"),
        (["mine.py", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["mine.py", "--data", "empty.jsonl"], "empty.jsonl"),
        (["mine.py", "--data", "data.jsonl", "dataset.prompt_key=question"], "no column 'question'"),
        (["mine.py", "--data", "data.jsonl", "worker.reward.timeout=3"], "worker.reward.timeout_s"),
        (["mine.py", "--data", "numbers.jsonl"], "its response is a int"),
        (["mine.py", "--data", "nothing.jsonl"], "neither a column 'response' nor an answer"),
    ],
)
def test_user_errors(words, named, function, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "data.jsonl", make_rows(["fine"]))
    write_rows(tmp_path / "numbers.jsonl", make_rows([3]))
    write_rows(tmp_path / "nothing.jsonl", [{"prompt": "why?"}])
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "locked.jsonl").touch(mode=0)
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "empty.py").touch()
    (tmp_path / "folder.py").mkdir()
    with bound_by_permissions():
        assert main(["reward", *words]) == 2
    said = capsys.readouterr().err
    assert named in said and ("Traceback" in said) == (words[:1] == ["broken.py"]), (
        "except for errors in a user's own file"
    )
