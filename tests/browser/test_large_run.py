"""A run of the largest size that rotation keeps, a thousand steps in a GiB: the first page reads little of it."""

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from view_helpers import make_step, metrics_row, recorded

from mtrl.tracking.blocks import BlockWriter, block_parts

pytestmark = pytest.mark.slow
pytest.importorskip("uvicorn", reason="pip install 'mtrl[view]'")
STEPS, LIMIT = 1000, 2**30
METRICS = 70  # metrics per step


@pytest.fixture(scope="module")
def large_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("large") / "run"
    store = recorded(tmp_path_factory.mktemp("one"), make_step())
    table, block = store.table(1), store._blocks[1]
    responses = [block.read(place) for place in table["where"]]
    many = 64 // len(responses) * len(responses)
    columns = {
        name: column * (many // len(responses))
        for name, column in table["rollouts"].items()
        if isinstance(column, list) and name != "mass"
    }
    filler = os.urandom(LIMIT // STEPS - many * len(responses[0]) - 4000)  # bytes that longer responses would take
    writer = BlockWriter(run / "record", LIMIT)
    for step in range(1, STEPS + 1):
        images = {key: (lambda place=place: block.read(place)) for key, place in table["images"].items()}
        whole = {"step": step, "prompts": table["prompts"], "segments": [], "rollouts": columns}
        writer.append(
            step, 1, whole, [*responses] * (many // len(responses)), images | {f"filler {step}": lambda: filler}
        )
    rows = [
        metrics_row(s, **{f"group{k % 7}/metric{k}": s * k / 7 for k in range(METRICS)}, **{"reward/overall": s / 9})
        for s in range(1, STEPS + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(rows))
    assert 0.9 * LIMIT < sum(part.stat().st_size for part in block_parts(run / "record")) <= LIMIT
    return run


@pytest.fixture
def server(large_run):
    command = [sys.executable, "-m", "mtrl", "view", str(large_run), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    address = re.search(r"http://\S+", process.stdout.readline())[0]
    yield process, address
    process.terminate()
    process.wait(10)


def test_the_first_page_reads_little_and_the_server_stays_small(server):
    process, address = server

    def ask(path):
        with urllib.request.urlopen(address + path) as answer:
            return answer.read()

    def bytes_read():
        return int(re.search(r"rchar: (\d+)", Path(f"/proc/{process.pid}/io").read_text())[1])

    begin = bytes_read()
    ask("")
    ask("api/runs")
    ask("api/series?run=0&names=" + ",".join(f"group{k % 7}/metric{k}" for k in range(12)))
    ask(f"api/rollouts?run=0&from={STEPS}&to={STEPS}")
    ask(f"api/response?run=0&step={STEPS}&row=5")
    first = bytes_read() - begin
    assert b'"total":63000' in ask("api/rollouts?run=0&sort=reward&order=desc")
    whole = bytes_read() - begin - first
    ask("api/rollouts?run=0&sort=dependency&order=desc&page=7")
    again = bytes_read() - begin - first - whole
    for step in range(1, STEPS, 7):
        ask(f"api/response?run=0&step={step}&row=3")
    peak = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]) / 1024
    print(
        f"read: first page {first / 1e6:.1f} MB, all sorted {whole / 1e6:.1f}, then {again / 1e6:.1f}; peak {peak:.0f}"
    )
    assert first < LIMIT / 50 and whole < LIMIT / 5 and again < whole / 10
    assert peak < 300
