"""`mtrl view` of run folders that are damaged while it serves them, beside a run that trains: odd requests are answered
or refused, none hangs, none is an internal error, and memory stays bounded."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from run_helpers import get_run_dir, start, train_arguments, wait_for

from soak.ledger import Ledger
from soak.struck_runs import MARK

PORTION = 500  # requests between two entries of the ledger
PER_DAMAGE = 20  # requests between two damages
CLIENTS = 8
DAMAGING = threading.Lock()  # one at a time
SECONDS = 60.0  # without an answer: a hang
MOST_MIB, MOST_FILES = 300, 100  # memory and open files of the server
STEPS = 60  # of the run that trains; then another one begins in its folder
WRITING = [f"training.max_steps={STEPS}", "training.save_freq=20", "training.val_freq=-1"]
WRITING += ["training.val_before_train=false", "training.record_attention_maps=true"]
REQUESTS = {  # parameters and what they usually are
    "runs": (), "series": ("run", "names", "after"), "config": ("run",), "response": ("run", "step", "row"),
    "group": ("run", "step", "row", "id"), "maps": ("run", "step", "row"), "image": ("run", "step", "key"),
    "rollouts": ("run", "from", "to", "sort", "order", "min_reward", "max_tokens", "page", "size"),
}  # fmt: skip
USUAL = {
    "names": ["reward/overall", "actor/grad_norm,loss", ""], "key": ["x"], "id": ["train-3"], "after": ["-1", "20"],
    "sort": ["reward", "step"], "order": ["asc", "desc"],
}  # fmt: skip
ODD = [
    "", " ", "-1", "-0", "1e9", "NaN", "inf", "0x1", "1_0", " 1", "٣", "9" * 15, "9" * 400, "\0", "\ud800", "../..",
    "%", "a" * 9000, "1,2", "[]", "null", "\r\nHost: x", "__class__", "\U0001f600",
]  # fmt: skip


def viewed_runs(ledger: Ledger, cases: int) -> None:
    """`cases` requests, while copies of a training run and files of other tools are damaged."""
    os.environ |= {MARK: str(ledger.directory)}
    folder = ledger.directory / "runs"
    shutil.rmtree(folder, ignore_errors=True)
    with training(folder / "writing") as live:
        slots = [folder / name for name in ("copy_0", "copy_1", "trl", "verl")]
        for slot in slots:
            renew(slot, live)
        with viewer([live, *slots], ledger.directory / "view.txt") as (process, port):
            for first in range(ledger.get("cases"), cases, PORTION):
                count = min(PORTION, cases - first)
                answers = portion(first, count, port, slots, live)
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = max(int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) // 1024, ledger.get("peak_mib"))
                files = max(len(os.listdir(f"/proc/{process.pid}/fd")), ledger.get("files"))
                found = {f"answered {status}": ledger.get(f"answered {status}") + n for status, n in answers.items()}
                ledger.record(**{**found, "cases": first + count, "peak_mib": peak, "files": files})
                said = (ledger.directory / "view.txt").read_text()
                assert process.poll() is None and "Traceback" not in said, said[-6000:]
                assert peak < MOST_MIB and files < MOST_FILES, ledger.counts
                print(f"view: {first + count} of {cases}", flush=True)
    ledger.record(passed=True)


# ------------------------------------------------------------------------------------------------------------ requests
def portion(first: int, count: int, port: int, slots: list[Path], live: Path) -> Counter[int]:
    """Numbers of answers by their status. Folders are damaged while the server answers."""
    answers, damages = [], []
    with ThreadPoolExecutor(CLIENTS) as pool:
        for number in range(first, first + count):
            if number % PER_DAMAGE == 0:
                damages.append(pool.submit(damage, slots, live, random.Random(f"damage {number}")))
            answers.append(pool.submit(asked, number, port, len(slots) + 1))
        for each in damages:
            each.result()
        statuses = Counter(each.result() for each in answers)
    body = send(port, b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n" % port)
    assert body.startswith(b"HTTP/1.1 200"), f"after request {first}: {body[:300]!r}"
    shown = json.loads(body.partition(b"\r\n\r\n")[2])["runs"]
    assert len(shown) == len(slots) + 1, "a damaged folder hides no other"
    return statuses


def asked(number: int, port: int, runs: int) -> int:
    """The status of the answer to one odd request; 0 if the connection was closed without one."""
    dice = random.Random(number)
    name = dice.choice(list(REQUESTS))
    usual = {"run": [str(n) for n in range(runs)], "step": [str(n) for n in range(1, STEPS)], **USUAL}
    pairs = []
    for key in REQUESTS[name]:
        if dice.random() < 0.97:  # else it is missing
            value = dice.choice(ODD if dice.random() < 0.05 else usual.get(key, [str(n) for n in range(8)]))
            pairs += [f"{key}={quote(value, errors='surrogatepass')}"] * dice.choice([1, 1, 1, 2])
    request = (
        f"GET /api/{name}?{'&'.join(pairs)} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
    )
    is_whole = dice.random() < 0.99
    if not is_whole:
        at = dice.randrange(len(request))
        request = request[:at] + dice.randbytes(dice.randint(0, 6)) + request[at + dice.randint(0, 9) :]
    answer = send(port, request)
    found = re.match(rb"HTTP/1\.1 (\d+)", answer)
    status = int(found[1]) if found else 0
    assert status < 500 and (status or not is_whole), f"request {number}, {request[:300]!r}: {answer[:300]!r}"
    assert status == 200 or name != "runs" or not is_whole, f"request {number}: {answer[:300]!r}"
    return status


def send(port: int, request: bytes) -> bytes:
    """The whole answer; TimeoutError if none comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        parts = []
        with suppress(ConnectionResetError):
            connection.sendall(request)
            while part := connection.recv(1 << 16):
                parts.append(part)
    return b"".join(parts)


# ------------------------------------------------------------------------------------------------------------- damages
def renew(slot: Path, live: Path) -> None:
    """An undamaged run: a copy of the one that trains, just as it is, or files of TRL or verl."""
    shutil.rmtree(slot, ignore_errors=True)
    slot.mkdir(parents=True)
    rows = [{"prompt": "q", "completion": "own", "input": "q", "output": str(n), "score": n} for n in range(4)]
    if slot.name == "trl":
        for step in range(1, 6):
            pq.write_table(pa.Table.from_pylist(rows), slot / f"completions_{step:05}.parquet")
        (slot / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 0.5}]}))
    elif slot.name == "verl":
        for step in range(1, 6):
            (slot / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        (slot / "record").mkdir()
        for name in ("metrics.jsonl", "rollouts.jsonl", "config.yaml", "run.lock"):
            with suppress(FileNotFoundError):
                shutil.copy(live / name, slot / name)
        for part in live.glob("record/*"):
            with suppress(FileNotFoundError):  # a new run has just begun
                shutil.copy(part, slot / "record" / part.name)


def damage(slots: list[Path], live: Path, dice: random.Random) -> None:
    """Change one file of a folder, as a full disk, a bad disk, a stranger or a careless hand would."""
    with DAMAGING:
        slot = dice.choice(slots)
        files = sorted(path for path in slot.rglob("*") if path.is_file() and not path.is_symlink())
        if not files or dice.random() < 0.3:
            renew(slot, live)
        else:
            change(dice.choice(files), files, dice)


def change(file: Path, others: list[Path], dice: random.Random) -> None:
    kind, data = dice.randrange(8), file.read_bytes()
    at, length = dice.randrange(len(data) + 1), dice.choice([1, 20, 4000])
    if kind == 0:
        file.write_bytes(data[:at])
    elif kind == 1:
        file.write_bytes(data[:at] + dice.randbytes(length) + data[at + length :])
    elif kind == 2:
        file.write_bytes(data[:at] + bytes(length) + data[at:])
    elif kind == 3:
        with file.open("ab") as more:
            more.write(dice.choice([data, b'{"step": 1e400}\n', b"[" * 50_000, b"x" * (20 << 20)]))
    elif kind == 4:
        shutil.copy(dice.choice(others), aside := file.with_name("aside"))
        aside.replace(file)
    else:
        file.unlink()
        if kind == 5:
            file.mkdir()
        elif kind == 6:
            os.mkfifo(file)
        else:
            file.symlink_to(dice.choice(["/etc/passwd", "/dev/zero", file.name, ".", "nowhere"]))


# ----------------------------------------------------------------------------------------------------------- processes
@contextmanager
def training(output: Path) -> Iterator[Path]:
    """The folder of a run that trains again and again, from its first step."""
    run, ended, latest = get_run_dir(output), threading.Event(), [start(train_arguments(output, *WRITING))]

    def repeat() -> None:
        while latest[0].communicate() and not ended.is_set():
            shutil.rmtree(run, ignore_errors=True)
            latest[0] = start(train_arguments(output, *WRITING))

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        wait_for(lambda: list(run.glob("record/*")) and (run / "metrics.jsonl").exists(), "first step")
        yield run
    finally:
        ended.set()
        while thread.is_alive():
            latest[0].kill()
            thread.join(0.1)


@contextmanager
def viewer(runs: list[Path], output: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`mtrl view` and its port."""
    command = [sys.executable, "-m", "mtrl", "view", *map(str, runs), "--port", "0", "--no-browser"]
    with output.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "http://" in output.read_text() or process.poll() is not None, "address")
        found = re.search(r":(\d+)/", output.read_text())
        assert found, output.read_text()
        yield process, int(found[1])
    finally:
        process.kill()
