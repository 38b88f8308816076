"""Prompts made by processes: the same prompts in the same order, even if processes fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from data_helpers import FakeEncoder, picture_bytes

from mtrl.data import DataError, DataSettings, RowList, Sampler, open_dataset
from mtrl.data.workers import DecodeWorkers, worker_count

ROWS = 24


def write_rows(folder, count=ROWS):
    for place in range(count):
        (folder / f"{place}.png").write_bytes(picture_bytes(40 + place, 60, seed=place))
    rows = [{"prompt": f"{i}", "images": [str(folder / f"{i}.png")], "answer": i} for i in range(count)]
    rows[3]["images"] = [picture_bytes(50, 50)]  # as bytes in the row
    rows[5] = {"prompt": "no picture", "answer": "x", "strange": lambda: 1}  # cannot be sent
    return rows


@pytest.fixture
def dataset(tmp_path):
    return open_dataset([RowList(write_rows(tmp_path), "rows")], DataSettings(), FakeEncoder(), workers=1)


def same(left, right):
    assert left.task.id == right.task.id and left.task.messages == right.task.messages
    assert left.task.answer == right.task.answer and len(left.media) == len(right.media)
    for name in ("ids", "engine_ids", "token_pool"):
        assert torch.equal(getattr(left, name), getattr(right, name))
    assert all(np.array_equal(a, b) and not b.flags.writeable for a, b in zip(left.media, right.media, strict=True))


def test_the_same_prompts_in_the_same_order(dataset):
    """Over two epochs and a restore, by threads and by processes."""
    with Sampler(dataset, FakeEncoder()) as threads, Sampler(dataset, FakeEncoder(), workers=3) as forked:
        for left, right in zip(threads.take(30), forked.take(30), strict=True):
            same(left, right)
        state, expected = forked.state(), threads.take(10)
        forked.take(7)
        forked.restore(state)
        for left, right in zip(expected, forked.take(10), strict=True):
            same(left, right)
        whole = [prompt for batch in forked.one_pass(5) for prompt in batch]
        assert [prompt.task.answer for prompt in whole] == [row["answer"] for row in dataset.sources[0].rows]


def test_a_picture_that_several_prompts_show_is_in_memory_once(tmp_path):
    (tmp_path / "a.png").write_bytes(picture_bytes(56, 56))
    rows = [{"prompt": f"{i}", "images": "a.png"} for i in range(8)]
    dataset = open_dataset([RowList(rows, "rows", tmp_path)], DataSettings(), FakeEncoder(), workers=1)
    with Sampler(dataset, FakeEncoder(), workers=2) as sampler:
        assert len({id(prompt.media[0]) for prompt in sampler.take(8)}) == 1


def test_a_row_that_breaks_later_is_a_bad_row(dataset, tmp_path):
    (tmp_path / "7.png").write_bytes(b"")
    with Sampler(dataset, FakeEncoder(), workers=2, shuffle=False) as sampler:
        assert [prompt.task.answer for prompt in sampler.take(9)] == [0, 1, 2, 3, 4, "x", 6, 8, 9]
        (bad,) = sampler.bad_rows.values()
        assert bad.row == 8 and "7.png is empty" in bad.reason
    rows, strict = RowList(write_rows(tmp_path), "rows"), DataSettings(on_bad_row="error")
    dataset = open_dataset([rows], strict, FakeEncoder(), workers=1)
    (tmp_path / "0.png").write_bytes(b"")
    with (
        Sampler(dataset, FakeEncoder(), workers=2, shuffle=False) as sampler,
        pytest.raises(DataError, match=r"0\.png is empty"),
    ):
        sampler.take(1)


def test_an_internal_error_is_raised_where_the_prompt_is_taken(dataset):
    class Wrong(FakeEncoder):
        def encode(self, task, media):
            raise ZeroDivisionError("a mistake")

    with Sampler(dataset, Wrong(), workers=2) as sampler, pytest.raises(ZeroDivisionError, match="a mistake"):
        sampler.take(1)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_failing_process_costs_only_time(dataset, how, caplog, monkeypatch):
    monkeypatch.setattr("mtrl.data.workers.STALLED_S", 1.0)
    with Sampler(dataset, FakeEncoder(), shuffle=False) as threads:
        expected = threads.take(ROWS)
    with Sampler(dataset, FakeEncoder(), workers=2, shuffle=False, prompts_ahead=2) as sampler:
        first = sampler.take(2)
        for worker in sampler._workers.processes:
            os.kill(worker.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        for left, right in zip(expected, first + sampler.take(ROWS - 2), strict=True):
            same(left, right)
    assert ("has died" if how == "killed" else "has stalled") in caplog.text


def test_no_process_is_left_running(dataset):
    sampler = Sampler(dataset, FakeEncoder(), workers=2)
    sampler.take(1)
    children = [psutil.Process(worker.pid) for worker in sampler._workers.processes]
    sampler.close()
    assert not any(child.is_running() for child in children)
    forgotten = DecodeWorkers(sampler.loader.load, sampler.loader.share_pixels, 2)
    children = [psutil.Process(worker.pid) for worker in forgotten.processes]
    del forgotten
    assert not any(child.is_running() for child in children)


SCRIPT = """
import sys, time
sys.path[:0] = {paths}
from data_helpers import FakeEncoder
from mtrl.data import DataSettings, Sampler, open_dataset
dataset = open_dataset({file!r}, DataSettings(), FakeEncoder(), workers=1)
sampler = Sampler(dataset, FakeEncoder(), workers=2)
sampler.take(1)
print(*(worker.pid for worker in sampler._workers.processes), flush=True)
time.sleep(60)
"""


@pytest.mark.slow  # it imports torch again
def test_workers_end_with_a_run_that_is_killed(tmp_path):
    rows = [row for row in write_rows(tmp_path) if "strange" not in row and isinstance(row["images"][0], str)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = Path(__file__).resolve().parent
    script = SCRIPT.format(paths=[str(here), str(here.parents[1])], file=str(tmp_path / "rows.jsonl"))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not alive, gone


def test_processes_are_forked_where_they_pay(monkeypatch):
    monkeypatch.setattr("mtrl.data.workers.usable_cores", lambda: 32)
    large, small = np.full(5, 1024 * 768), np.full(5, 56 * 56)
    assert worker_count(None, large) == 8 and worker_count(None, small) == 0 == worker_count(None, np.zeros(0))
    assert worker_count(3, small) == 3 and worker_count(0, large) == 0
    monkeypatch.setattr("mtrl.data.workers.usable_cores", lambda: 1)
    assert worker_count(None, large) == 0
    monkeypatch.setattr("mtrl.data.workers.can_fork", lambda: False)
    assert worker_count(3, large) == 0
