"""What the viewer reads: runs of ours while they grow and after damage, of TRL and verl; sorting, filtering."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from view_helpers import fake_run, make_step, metrics_row, opened, recorded, replace_text

from mtrl.checkpoint.run_directory import RunDirectory
from mtrl.commands import view
from mtrl.utils.errors import StartError
from mtrl.view.history import MAX_POINTS, MetricTail
from mtrl.view.query import Query, select
from mtrl.view.run_index import NoRun, open_runs


def refreshed(*paths):
    runs = open_runs(paths)
    for run in runs:
        run.refresh()
    return runs


# ------------------------------------------------------------------------------------------------------------ numbers
def test_metrics_follow_a_running_run(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(metrics_row(1, loss=1.0) + metrics_row(2, loss=2.0) + '{"step": 3, "att')
    history = MetricTail(file)
    history.refresh()
    assert history.series(["loss"]) == {"loss": [[1, 2], [1.0, 2.0]]} and history.damaged == 0, "it is being written"
    with file.open("a") as more:
        more.write('empt": 1, "loss": 3.0}\n')
    history.refresh()
    assert history.series(["loss"]) == {"loss": [[1, 2, 3], [1.0, 2.0, 3.0]]} and history.last_step == 3
    with file.open("a") as more:
        more.write(metrics_row(2, attempt=2, loss=9.0))
    history.refresh()
    assert history.series(["loss"]) == {"loss": [[1, 2], [1.0, 9.0]]}, "a second attempt went on from step 1"


def test_a_long_run_costs_little_memory_and_few_points_at_each_poll(tmp_path):
    file, steps = tmp_path / "metrics.jsonl", 5000
    file.write_text("".join(metrics_row(step, loss=step / 2) for step in range(1, steps + 1)))
    (run,) = refreshed(tmp_path)
    curve = run.history.metrics["loss"]
    assert len(curve) == steps and sum(map(sys.getsizeof, (curve.steps, curve.values))) < 20 * steps
    with file.open("a") as more:
        more.write(metrics_row(steps + 1, loss=7.0))
    before = run.history._tail.offset
    run.refresh()
    assert run.history._tail.offset - before == len(metrics_row(steps + 1, loss=7.0)), "only the new row is read"
    assert run.history.metrics["loss"] is curve and run.summary()["last_step"] == steps + 1
    shown, values = run.history.series(["loss"])["loss"]
    assert 800 < len(shown) <= MAX_POINTS and (shown[-1], values[-1]) == (steps + 1, 7.0)
    assert sum(values) / len(values) == pytest.approx(steps / 4, rel=0.01), "means of all steps"


def test_damaged_lines_are_left_out_and_reported(tmp_path):
    run = fake_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(
            b'\xff\xfe broken\n[1, 2]\n{"step": "x"}\n{"step": 4, "reward/overall": NaN, "ok": 1}\n'
            + b"[" * 10**5
            + b"\n"
        )
    (opened_run,) = refreshed(run)
    assert opened_run.skipped() == ["metrics.jsonl: 4 lines are damaged and left out"]
    assert opened_run.history.series(["ok", "reward/overall"]) == {
        "ok": [[4], [1.0]],
        "reward/overall": [[1, 2, 3], [0.1, 0.2, 0.3]],
    }


def test_a_run_without_a_record_shows_its_rollouts(tmp_path):
    row = {"id": "a:1", "response": "red", "answer": "blue", "reward": 0.5, "rewards": {"accuracy": 0.0}, "tokens": 3}
    lines = [
        json.dumps({"step": s, "attempt": 1, "time": 1.0, **row, "response": f"{s} {k}"})
        for s in (1, 2)
        for k in range(3)
    ]
    lines[4] = lines[4][:30]  # damaged
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    (run,) = refreshed(tmp_path)
    assert run.store.steps() == {1: 3, 2: 2} and run.skipped() == ["rollouts: 1 lines are damaged and left out"]
    one = run.store.response(2, 1)
    assert (one["text"], one["prompt"]["answer"], one["reward"], one["members"]) == ("2 2", "blue", 0.5, [0, 1])
    assert one["pieces"] is None and one["streams"] == {}
    (tmp_path / "rollouts.jsonl").rename(tmp_path / "rollouts.1.jsonl")  # full: it rotates
    (tmp_path / "rollouts.jsonl").write_text(lines[0].replace('"step": 1', '"step": 3') + "\n")
    run.refresh()
    assert run.store.steps() == {1: 3, 2: 2, 3: 1} and run.store.response(1, 2)["text"] == "1 2"


# ---------------------------------------------------------------------------------------------------------- questions
def make_store(tmp_path, steps=4):
    return recorded(tmp_path, *[make_step() for _ in range(steps)])


def test_sorting_and_filtering(tmp_path):
    store = make_store(tmp_path)
    # each step: rewards 1.5, 0.5, 1.0; tokens 2, 1, 2; mean S 0.125, 0.5, 1.125
    best = select(store, Query(sort="reward", descending=True, size=5))
    assert best["total"] == 12 and [row["reward"] for row in best["rows"]] == [1.5, 1.5, 1.5, 1.5, 1.0]
    assert [row["step"] for row in best["rows"]] == [1, 2, 3, 4, 1], "equal ones in the order of the steps"
    some = select(store, Query(first_step=2, last_step=3, minimum={"dependency": 0.3}, maximum={"reward": 0.9}))
    assert [(row["step"], row["row"]) for row in some["rows"]] == [(2, 1), (3, 1)]
    none = select(store, Query(minimum={"entropy": 0.0}))
    assert none["total"] == 0, "it was not measured, so no response matches"
    assert select(store, Query(sort="entropy"))["total"] == 12, "but all can be listed"


def test_pages(tmp_path):
    store = make_store(tmp_path)
    pages = [select(store, Query(page=page, size=5))["rows"] for page in range(4)]
    places = [(row["step"], row["row"]) for rows in pages for row in rows]
    assert places == [(step, row) for step in (1, 2, 3, 4) for row in range(3)] and pages[3] == []
    newest = select(store, Query(descending=True, size=2))["rows"]
    assert [(row["step"], row["row"]) for row in newest] == [(4, 0), (4, 1)]
    for wrong in ({"sort": "id"}, {"size": 0}, {"size": 10**6}, {"page": -1}):
        with pytest.raises(ValueError):
            Query(**wrong)


def test_groups_without_signal_come_last(tmp_path):
    """The rewards of the first group are equal, so nothing is learned from it."""
    rewards = make_step().rewards
    same_first = replace(rewards, total=torch.tensor([1.0, 1.0, 0.0, 1.0]), parts={}, failed=torch.zeros(4).bool())
    step = make_step(lengths=(1, 1, 1, 1), group=(0, 0, 1, 1), rewards=same_first)
    store = recorded(tmp_path, step, step)
    places = [(row["step"], row["row"]) for row in select(store, Query())["rows"]]
    assert places == [(s, row) for s in (1, 2) for row in (2, 3, 0, 1)]
    second = select(store, Query(page=1, size=3, descending=True))["rows"]
    assert [(row["step"], row["row"]) for row in second] == [(2, 1), (1, 2), (1, 3)]


def test_ten_thousand_responses_by_their_numbers(tmp_path):
    """A range of 10,000 responses: the sort column is read once, and a page opens only the steps it shows."""
    store = recorded(tmp_path, make_step())
    block = store._blocks[1]
    store._blocks = dict.fromkeys(range(1, 3335), block)
    assert select(store, Query(sort="reward", descending=True))["total"] == 10_002
    read = []
    table, store.table = store.table, lambda step: read.append(step) or table(step)
    page = select(store, Query(sort="reward", descending=True, page=3, size=50))
    assert len(page["rows"]) == 50 and len(read) <= 50


# ------------------------------------------------------------------------------------------------------------- others
def test_completions_of_trl(tmp_path):
    folder = tmp_path / "completions"
    folder.mkdir()
    chat = [[{"role": "user", "content": "What is 2 + 2?"}]] * 2
    answers = [[{"role": "assistant", "content": answer}] for answer in "45"]
    for step in (5, 10):
        table = {
            "step": [step] * 2, "prompt": chat, "completion": answers,
            "accuracy_reward": [1.0, 0.0], "format_reward": [0.5, None], "advantage": [0.7, -0.7],
        }  # fmt: skip
        pq.write_table(pa.table(table), folder / f"completions_{step:05d}.parquet")
    (folder / "completions_00015.parquet").write_bytes(b"PAR1 half")
    (run,) = refreshed(tmp_path)
    assert run.kind == "trl" and run.store.steps() == {5: 2, 10: 2}
    assert run.skipped() == ["completions_00015.parquet is not a complete parquet file and is left out"]
    one = run.store.response(10, 1)
    assert (one["text"], one["prompt"]["text"], one["reward"], one["advantage"]) == ("5", "What is 2 + 2?", 0.0, -0.7)
    assert run.store.response(5, 0)["parts"] == {"accuracy_reward": 1.0, "format_reward": 0.5} and one["members"] == [
        0,
        1,
    ]
    assert run.history.series(["reward/mean"]) == {"reward/mean": [[5, 10], [0.75, 0.75]]}
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10/trainer_state.json").write_text(
        '{"log_history": [{"step": 5, "loss": 0.25, "epoch": 1}]}'
    )
    run.refresh()
    assert run.history.series(["loss"]) == {"loss": [[5], [0.25]]}


def test_rollouts_of_verl(tmp_path):
    for step in (2, 10):
        rows = [
            {"input": "q", "output": f"a{k}", "gts": "7", "score": float(k), "step": step, "acc": k} for k in range(2)
        ]
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = refreshed(tmp_path)
    assert run.kind == "verl" and run.store.steps() == {2: 2, 10: 2}
    one = run.store.response(10, 1)
    assert (one["text"], one["prompt"]["text"], one["prompt"]["answer"], one["reward"]) == ("a1", "q", "7", 1.0)
    assert one["parts"] == {"acc": 1} and run.history.series(["reward/mean"])["reward/mean"] == [[2, 10], [0.5, 0.5]]


def test_a_run_whose_process_has_ended_is_not_live(tmp_path):
    path = fake_run(tmp_path / "run")
    (run,) = refreshed(path)
    assert run.is_live(), "nothing is known of its process"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = socket.gethostname()
    for owner, is_live in ((f"{os.getpid()} on {here}", True), (f"{ended.pid} on {here}", False),
                           (f"{ended.pid} on elsewhere", True), (f"1 on {here}", True), ("x", True)):  # fmt: skip
        (path / "run.lock").write_text(f"process {owner}\n")
        assert run.is_live() == is_live, owner
    with RunDirectory(path):
        assert run.is_live(), "the lock of a real run"
    os.utime(path / "metrics.jsonl", (1, 1))
    os.utime(path / "record/part-00001.bin", (1, 1))
    assert not run.is_live(), "it wrote nothing for long"


def test_a_folder_of_runs_and_no_run(tmp_path):
    fake_run(tmp_path / "a" / "one")
    fake_run(tmp_path / "a" / "two")
    assert [run.name for run in open_runs([tmp_path / "a"])] == ["one", "two"]
    fake_run(tmp_path / "b" / "one")
    assert [run.name for run in open_runs([tmp_path / "a/one", tmp_path / "b/one"])] == ["a/one", "b/one"]
    (tmp_path / "empty").mkdir()
    for wrong, why in ((tmp_path / "empty", "holds no run"), (tmp_path / "none", "no such directory")):
        with pytest.raises(NoRun, match=why):
            open_runs([wrong])


# ------------------------------------------------------------------------------------------------------------ command
def test_arguments():
    options, paths = view.OPTIONS.parse_paths(["a", "--port=7000", "b", "--host", "::1", "--no-browser"])
    assert (paths, options.host, options.port, options.no_browser) == (["a", "b"], "::1", 7000, True)
    for wrong, why in (
        ([], "which run"),
        (["a", "--port", "x"], "no whole number"),
        (["--prot", "1"], "no option"),
        (["a", "--port"], "--port: expected one argument"),
    ):
        with pytest.raises(StartError, match=why):
            view.run(wrong)


def test_the_viewer_needs_no_torch():
    """It would take hundreds of megabytes and seconds."""
    pytest.importorskip("starlette", reason="pip install 'mtrl[view]'")
    code = "import sys, mtrl.cli, mtrl.commands.view, mtrl.view.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_odd_names_and_texts_are_unchanged(tmp_path):
    store = recorded(
        tmp_path,
        replace_text(make_step(), "<script>alert(1)</script>\x1b[2J\ud800", prompt="</script>", name="../../etc"),
    )
    one = store.response(1, 0)
    assert one["text"].startswith("<script>alert(1)</script>\x1b[2J") and one["id"] == "../../etc"
    assert json.dumps(one).isascii() and np.isfinite(one["reward"])
    assert opened(tmp_path).skipped() == []
