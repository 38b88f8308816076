"""Run folders with links, pipes, odd values and endless lines: the viewer shows the rest and says what it left out."""

import json
import os
import shutil
import threading
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from view_helpers import fake_run, make_step, metrics_row, recorded

pytest.importorskip("starlette", reason="pip install 'mtrl[view]'")
from starlette.testclient import TestClient

from mtrl.commands import report
from mtrl.tracking import jsonl
from mtrl.tracking.blocks import BlockWriter
from mtrl.tracking.jsonl import JsonlWriter, parse_row, read_rows
from mtrl.view import history
from mtrl.view.query import Query, select
from mtrl.view.run_index import open_runs
from mtrl.view.server import make_app

SECRET = "the secret of another folder"


def asked(*paths):
    """A client of a server that shows these runs."""
    return TestClient(make_app(open_runs(paths), "127.0.0.1", 6060), base_url="http://127.0.0.1:6060")


def summary(client):
    answer = client.get("/api/runs")
    assert answer.status_code == 200, answer.text
    return answer.json()["runs"][0]


def rollout_line(step, **values):
    return json.dumps({"step": step, "attempt": 1, "time": 1.0, "id": "a", "reward": 0.5, **values}) + "\n"


# --------------------------------------------------------------------------------------------------------------- links
def link_rollouts(run, outside):
    (outside / "secret.jsonl").write_text(rollout_line(1, response=SECRET))
    (run / "rollouts.jsonl").write_text(rollout_line(2, response="own"))
    (run / "rollouts.1.jsonl").symlink_to(outside / "secret.jsonl")


def link_record(run, outside):
    recorded(run / "record", make_step())
    recorded(outside / "record", make_step(), make_step())
    (run / "record" / "part-00002.bin").symlink_to(outside / "record" / "part-00001.bin")
    (run / "metrics.jsonl").write_text(metrics_row(1, loss=1.0))


def link_parquet(run, outside):
    (run / "completions").mkdir()
    for folder, step, text in ((run / "completions", 1, "own"), (outside, 2, SECRET)):
        pq.write_table(pa.table({"prompt": ["q"], "completion": [text]}), folder / f"completions_{step}.parquet")
    (run / "completions" / "completions_2.parquet").symlink_to(outside / "completions_2.parquet")


def link_verl(run, outside):
    (run / "1.jsonl").write_text(json.dumps({"input": "q", "output": "own", "score": 1}) + "\n")
    (outside / "2.jsonl").write_text(json.dumps({"input": "q", "output": SECRET, "score": 1}) + "\n")
    (run / "2.jsonl").symlink_to(outside / "2.jsonl")


@pytest.mark.parametrize("link", [link_rollouts, link_record, link_parquet, link_verl])
def test_links_out_of_a_run_are_not_followed(tmp_path, link):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    link(run, outside)
    client = asked(run)
    about = summary(client)
    assert len(about["steps"]) == 1 and any("a link that leads out" in text for text in about["skipped"])
    report.run([str(run), "--out", str(tmp_path / "shared")])
    assert SECRET not in (tmp_path / "shared" / "report.html").read_text()


def test_a_link_that_appears_later_is_not_followed(tmp_path):
    run, outside = fake_run(tmp_path / "run"), fake_run(tmp_path / "outside", steps=5)
    client = asked(run)
    assert summary(client)["steps"] == [1, 2, 3]
    shutil.rmtree(run / "record")
    (run / "record").symlink_to(outside / "record")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    about = summary(client)
    assert about["steps"] == [] and about["last_step"] == 3
    assert [text.split()[0] for text in about["skipped"]] == ["metrics.jsonl", "record"]


def test_links_within_a_run_are_followed(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "old").write_text(rollout_line(1, response="own"))
    (tmp_path / "rollouts.jsonl").symlink_to(tmp_path / "parts" / "old")
    (run,) = open_runs([tmp_path])
    run.refresh()
    assert run.store.steps() == {1: 1} and run.skipped() == []


# --------------------------------------------------------------------------------------------------------------- pipes
@pytest.mark.parametrize(
    "name", ["completions/completions_00002.parquet", "trainer_state.json", "checkpoint-3/trainer_state.json"]
)
def test_pipes_do_not_hang_it(tmp_path, name):
    (tmp_path / "completions").mkdir()
    pq.write_table(
        pa.table({"prompt": ["q"], "completion": ["own"]}), tmp_path / "completions/completions_00001.parquet"
    )
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    seen = []
    reader = threading.Thread(target=lambda: seen.append(summary(asked(tmp_path))), daemon=True)
    reader.start()
    reader.join(20)
    assert seen and seen[0]["steps"] == [1] and any(name.rpartition("/")[2] in text for text in seen[0]["skipped"])


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.lock"])
def test_a_file_that_is_removed_while_it_is_opened_hides_no_run(tmp_path, monkeypatch, name):
    """The check whether it is a file comes before that."""
    runs = [fake_run(tmp_path / each) for each in ("one", "two")]
    client = asked(*runs)
    (runs[0] / name).unlink(missing_ok=True)
    for module in ("history", "run_index"):
        monkeypatch.setattr(f"mtrl.view.{module}.is_own_file", lambda file, root: True)
    assert summary(client)["name"] == "one"
    assert [run["steps"] for run in client.get("/api/runs").json()["runs"]][1] == [1, 2, 3]


# ---------------------------------------------------------------------------------------------------------- odd values
DEEP = '[{"content": ' * 460 + '"x"' + "}]" * 460
ODD_ROWS = {
    "NaN part": '"rewards": {"accuracy": NaN}',
    "infinite reward": '"reward": Infinity',
    "huge integer": f'"tokens": {"9" * 400}, "reward": {"9" * 400}, "version": {"9" * 400}',
    "deep": f'"prompt": {DEEP}, "finish": {DEEP}, "rewards": {{"a": {DEEP}}}',
    "surrogate": r'"response": "\ud800", "id": "\udfff", "rewards": {"\ud800": 1}',
    "wrong kinds": '"rewards": [1], "failed": {"a": NaN}, "finish": {}, "version": [NaN], "answer": {"b": NaN}',
}


@pytest.mark.parametrize("odd", ODD_ROWS.values(), ids=ODD_ROWS)
@pytest.mark.parametrize("kind", ["ours", "verl"])
def test_one_odd_value_of_a_row(tmp_path, kind, odd):
    lines = (
        rollout_line(1, response="fine") + f'{{"step": 1, "attempt": 1, {odd}}}\n' + rollout_line(2, response="fine")
    )
    (tmp_path / ("rollouts.jsonl" if kind == "ours" else "rows.jsonl")).write_text(lines)
    client = asked(tmp_path)
    assert summary(client)["counts"] == [2, 1]
    for sort in ("step", "reward", "tokens"):
        found = client.get(f"/api/rollouts?run=0&sort={sort}")
        assert found.status_code == 200 and len(found.json()["rows"]) == 3, found.text
    for row in (0, 1):
        assert client.get(f"/api/response?run=0&step=1&row={row}").status_code == 200
    assert client.get("/api/group?run=0&step=1&row=1").status_code == 200
    report.run([str(tmp_path), "--out", str(tmp_path / "shared")])


def test_odd_values_of_a_record(tmp_path):
    """A table may have NaN, and numbers and texts that JSON can write but UTF-8 or a float cannot hold."""
    store = recorded(tmp_path / "first", make_step())
    table, block = store.table(1), store._blocks[1]
    columns = dict(table["rollouts"])
    columns["reward"] = [float("nan"), 10**400, 1.0]
    columns["finish"] = [json.loads("[" * 200 + "]" * 200), float("inf"), "stop"]
    columns["head"] = ["\ud800", "b", "c"]
    writer = BlockWriter(tmp_path / "run" / "record", 2**30)
    responses = [block.read(place) for place in table["where"]]
    writer.append(1, 1, {**table, "rollouts": columns}, responses, {})
    client = asked(tmp_path / "run")
    assert summary(client)["counts"] == [3]
    rows = client.get("/api/rollouts?run=0&sort=reward&order=desc").json()["rows"]
    assert [row["reward"] for row in rows] == [1.0, None, 10**400], "what is no number comes last"
    assert all(client.get(f"/api/response?run=0&step=1&row={row}").status_code == 200 for row in range(3))
    report.run([str(tmp_path / "run")])


@pytest.mark.parametrize(
    "change",
    [{"segments": 3}, {"segments": [[]]}, {"prompts": [{"images": 7}] * 2}, {"images": []}, {"rollouts": {"parts": 3}}],
)
def test_tables_of_other_kinds_are_damage(tmp_path, change, monkeypatch):
    store = recorded(tmp_path / "first", make_step())
    table, block = store.table(1), store._blocks[1]
    responses = [block.read(place) for place in table["where"]]
    writer = BlockWriter(tmp_path / "run" / "record", 2**30)
    if "rollouts" in change:
        change = {"rollouts": table["rollouts"] | change["rollouts"]}
    with monkeypatch.context() as patch:
        dumps = json.dumps
        patch.setattr(json, "dumps", lambda whole, **options: dumps(whole | change, **options))
        writer.append(1, 1, table, responses, {})
    writer.append(2, 1, table, responses, {})
    (run,) = open_runs([tmp_path / "run"])
    run.refresh()
    assert select(run.store, Query(sort="reward"))["total"] == 3
    assert run.skipped() == ["record: step 1 is damaged and left out"]


def test_a_metric_whose_name_is_no_text(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        metrics_row(1, **{"reward/overall": 1.0, "a\ud800": 2.0, "face \U0001f600": 3})
    )
    client = asked(tmp_path)
    (name,) = [name for name in summary(client)["metrics"] if name.startswith("a")]
    assert client.get("/api/series", params={"run": 0, "names": name}).json() == {name: [[1], [2.0]]}
    assert "face \U0001f600" in summary(client)["metrics"]
    report.run([str(tmp_path)])


def test_rows_with_lone_surrogates_are_written_and_read(tmp_path):
    JsonlWriter(tmp_path / "rows.jsonl").append([{"id": "a\ud800"}])
    assert read_rows(tmp_path / "rows.jsonl") == [{"id": "a?"}]
    assert parse_row(rb'{"a\ud800": "\ud83d\ude00"}') == {"a\ufffd": "\U0001f600"}


def test_a_damaged_trainer_state_is_read_once(tmp_path, monkeypatch):
    pq.write_table(pa.table({"prompt": ["q"], "completion": ["own"]}), tmp_path / "completions_1.parquet")
    huge = 10**400
    rows = [{"step": huge, "loss": 1}, {"step": 2, "loss": huge}, {"step": 3, "loss": 0.5}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    client = asked(tmp_path)
    assert client.get("/api/series?run=0&names=loss").json() == {"loss": [[], []]} and summary(client)["last_step"] == 3
    assert client.get("/api/series?run=0&names=loss").json() == {"loss": [[3], [0.5]]}
    monkeypatch.setattr("mtrl.view.run_index.parse_json", lambda data: pytest.fail("it has not changed"))
    assert summary(client)["last_step"] == 3


# ---------------------------------------------------------------------------------------------------------- long lines
@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
def test_a_line_without_an_end_is_passed_over_once(tmp_path, monkeypatch, name):
    for module in (jsonl, history):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 2**16)
    (tmp_path / "metrics.jsonl").write_text(metrics_row(1, loss=1.0))
    with (tmp_path / name).open("ab") as file:
        file.write(b'{"step": 2, "response": "')
        file.write(b"x" * 2**23)
    (run,) = open_runs([tmp_path])
    tracemalloc.start()
    run.refresh()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22, f"{peak} bytes for a line of {2**23}"
    assert any(name.split(".")[0] in text and "1 lines above" in text for text in run.skipped())
    reads = []
    monkeypatch.setattr(history, "skip_line", lambda file, limit=None: reads.append(jsonl.skip_line(file, limit)))
    run.refresh()
    assert len(reads) <= 1, "only what is new is read"
    monkeypatch.undo()
    with (tmp_path / name).open("a") as file:
        file.write('"}\n' + (metrics_row(3, loss=3.0) if name == "metrics.jsonl" else rollout_line(3)))
    run.refresh()
    assert run.summary()["last_step"] == 3


def test_an_incomplete_line_is_read_again_only_when_it_grows(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(metrics_row(1, loss=1.0) + '{"step": 2')
    tail = history.LineTail(file, tmp_path)
    assert len(list(tail.read_new())) == 1 and tail._partial_size == file.stat().st_size
    with file.open("a") as more:
        more.write(', "loss": 1}\n')
    assert [line for _, line in tail.read_new()] == [b'{"step": 2, "loss": 1}\n']


def test_many_rows_are_sorted_with_few_opens(tmp_path, monkeypatch):
    """A row took an open file of its own: a million of them took most of a minute."""
    (tmp_path / "rollouts.jsonl").write_text(
        "".join(rollout_line(s, response=str(k)) for s in (1, 2) for k in range(500))
    )
    (run,) = open_runs([tmp_path])
    run.refresh()
    opened = []
    monkeypatch.setattr("mtrl.view.foreign_rollouts.regular_file", lambda path: opened.append(path) or path)
    assert select(run.store, Query(sort="reward"))["total"] == 1000 and len(opened) <= 4
    start = len(opened)
    select(run.store, Query(sort="tokens"))
    assert len(opened) - start <= 1, "the columns are kept"
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write(rollout_line(2, reward=9.0))
    run.refresh()
    best = select(run.store, Query(sort="reward", descending=True, size=1))
    assert best["total"] == 1001 and best["rows"][0]["reward"] == 9.0
