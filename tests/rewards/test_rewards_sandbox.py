"""User functions in worker processes: the failure of one affects only its own call."""

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import NAN, close, fake_rollouts, is_alive
from PIL import Image
from reward_helpers import named, score

from mtrl.compose.reward_scorer import build_scorer
from mtrl.config import load_config
from mtrl.rewards import sandbox as sandboxes
from mtrl.rewards.sandbox import InProcess, Sandbox

MANNERS = '''
import itertools, os, signal, subprocess, sys, threading, time

import numpy

hoard = []

class Odd:
    pass

def start(note):
    """A child, one that left for a session of its own, and one of whom nobody is the parent any more."""
    child, apart = (subprocess.Popen(["sleep", "1000"], start_new_session=new).pid for new in (False, True))
    orphan = subprocess.check_output("setsid sleep 1000 >/dev/null 2>&1 & echo $!", shell=True, text=True)
    open(note + ".part", "w").write(f"{child} {apart} {orphan}")
    os.rename(note + ".part", note)

def reward_function(data, scale=1.0):
    """Behaves as its response says."""
    does = data["response"]
    if does == "raise": raise RuntimeError("deliberate " + data["response"])
    if does == "hang": time.sleep(1000)
    if does == "hang with children":
        start(data["note"])
        time.sleep(1000)
    if does == "hold the interpreter with children":
        start(data["note"])
        sum(itertools.repeat(0))  # for ever, in C: no other thread of Python runs
    if does == "quit with children":
        start(data["note"])
        os._exit(4)
    if does.startswith("fork"):
        child = os.fork()
        if not child:
            if does == "fork and exit": sys.exit(7)
            if does == "fork and raise": raise RuntimeError("of the child")
            return 100.0
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if does == "exit": sys.exit(3)
    if does == "quit": os._exit(4)
    if does == "ask": input()
    if does == "print": print("noise " * 1000)
    if does == "close": os.closerange(3, 64)
    if does == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if does == "killed": os.kill(os.getpid(), signal.SIGKILL)  # as the system does where memory ends
    if does == "loop's end": threading.Thread(target=os._exit, args=(5,)).start(); time.sleep(1000)
    if does == "flood":
        print("the first word")
        for _ in range(80): print("x" * 100_000)
        raise RuntimeError("after " + "the flood")
    if does == "drain for ever":
        while True: print("x" * 100_000)
    if does == "devour": hoard.append(bytearray(1 << 40))
    if does == "hoard": hoard.append(bytearray(1 << 28))
    values = {
        "nan": float("nan"), "huge": 1e39, "none": None, "inf": float("inf"),
        "text": "1.0", "list": [1.0], "object": Odd(),
        "triple": (1.0, {}, 2), "pair": (1.0, 2.0), "bad extras": (1.0, {(1, 2): 3}),
        "empty": {}, "weights": (1.0, {"token_weights": [1.0, -1.0]}), "dict": {"overall": 0.25, "seen": 1},
        "numpy": numpy.float32(0.5), "array": numpy.ones(3), "true": True, "whole": 2,
        "extras": (1.0, {"seen": numpy.float32(7), "odd": Odd(), "words": "many"}),
        "pid": (1.0, {"pid": os.getpid()}),
        "columns": float(sorted(data) == ["a", "b", "response"] and data["b"] == {"c": [1]}),
    }
    return values.get(does, scale)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "manners.py"
    path.write_text(MANNERS)
    return path


@pytest.fixture(scope="module")
def sandbox(file):
    shared = Sandbox(str(file), {}, workers=1, timeout_s=20)
    yield shared
    shared.close()


def outcome(sandbox, does, **columns):
    return sandbox.submit([{"response": does, **columns}])[0].result(timeout=60)


def noted(path):
    """Process ids that a function left there: three of them."""
    found = [int(pid) for pid in path.read_text().split()]
    assert len(found) == 3
    return found


def ends(pid, seconds=5.0):
    limit = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < limit:
        time.sleep(0.02)
    return not is_alive(pid)


# ---------------------------------------------------------------------------------------------------- values and faults
@pytest.mark.parametrize(
    ("does", "value"), [("fine", 1.0), ("none", None), ("numpy", 0.5), ("true", 1.0), ("whole", 2.0), ("dict", 0.25)]
)
def test_values(sandbox, does, value):
    found = outcome(sandbox, does)
    assert found.failure is None and found.value == value


def test_every_column_arrives(sandbox):
    assert outcome(sandbox, "columns", a=1, b={"c": [1]}).value == 1.0


def test_numbers_return_as_plain_values(sandbox):
    """Nobody reads other extra values."""
    assert outcome(sandbox, "extras").extras == {"seen": 7.0}


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        ("raise", "RuntimeError: deliberate raise"),
        ("nan", "a reward must be finite; it was nan"),
        ("inf", "a reward must be finite; it was inf"),
        ("huge", "a reward must be finite; it was 1e+39"),
        ("text", "it returned str"),
        ("list", "it returned list"),
        ("object", "it returned Odd"),
        ("array", "Error"),
        ("triple", "it returned a tuple of float, "),
        ("pair", "it returned a tuple of float, "),
        ("bad extras", "TypeError"),
        ("ask", "EOFError"),
        ("exit", "SystemExit: 3"),
        ("empty", "its dict has nothing"),
        ("weights", "token_weights must be a list of finite numbers, none below 0"),
    ],
)
def test_a_fault_is_reported_and_the_worker_continues(sandbox, does, cause):
    before = outcome(sandbox, "pid").extras["pid"]
    found = outcome(sandbox, does)
    assert found.value is None and cause in found.failure
    assert outcome(sandbox, "pid").extras["pid"] == before


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        ("quit", "its process ended with status 4"),
        ("close", "its process ended with status 1"),
        ("crash", "its process was killed by SIGSEGV"),
        ("killed", "its process was killed by SIGKILL (out of memory?)"),
        ("loop's end", "its process ended with status 5"),
    ],
)
def test_a_worker_that_ends_is_replaced(sandbox, does, cause):
    before = outcome(sandbox, "pid").extras["pid"]
    assert cause in outcome(sandbox, does).failure
    after = outcome(sandbox, "pid")
    assert after.value == 1.0 and after.extras["pid"] != before and ends(before)


def test_a_worker_that_hangs_is_replaced_with_all_it_started(file, tmp_path):
    sandbox = Sandbox(str(file), {}, workers=1, timeout_s=1.0)
    before, note = outcome(sandbox, "pid").extras["pid"], tmp_path / "pid"
    found = outcome(sandbox, "hang with children", note=str(note))
    assert found.failure == "took longer than 1 s"
    assert ends(before) and all(map(ends, noted(note)))
    assert outcome(sandbox, "fine").value == 1.0
    sandbox.close()


def test_no_process_outlives_its_worker(sandbox, tmp_path):
    note = tmp_path / "pid"
    assert "ended with status 4" in outcome(sandbox, "quit with children", note=str(note)).failure
    assert all(map(ends, noted(note)))


@pytest.mark.parametrize(("does", "status"), [("fork", 0), ("fork and exit", 7), ("fork and raise", 1)])
def test_a_forked_child_is_no_second_worker(sandbox, does, status):
    before = outcome(sandbox, "pid").extras["pid"]
    assert outcome(sandbox, does).value == status
    assert outcome(sandbox, "pid").extras["pid"] == before


ALTERS = """
def reward_function(data):
    data["options"].append("x")
    data["images"][0].thumbnail((7, 7))
    return float(len(data["options"])), {"width": data["images"].pop().width}
"""


def test_changes_by_a_function_do_not_reach_the_next_response(tmp_path):
    picture = Image.new("RGB", (28, 28))
    shared = {"options": ["a", "b"], "images": [picture]}
    sandbox = Sandbox(str(named(tmp_path, ALTERS)), {}, workers=1, timeout_s=20)
    found = [each.result() for each in sandbox.submit([{"response": "", **shared}] * 3)]
    assert [each.value for each in found] == [3.0] * 3
    sandbox.close()

    def alters(data):
        data["options"].append("x")
        return float(len(data["options"]))

    found = [each.result() for each in InProcess(alters, {}).submit([{"response": "", **shared}] * 3)]
    assert [each.value for each in found] == [3.0] * 3 and shared == {"options": ["a", "b"], "images": [picture]}


def test_rows_with_many_images(tmp_path):
    """An image is an open file until it is read, and shells allow 1024 open files."""
    path = named(tmp_path, "def reward_function(data): return float(len(data['images']))")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        sandbox = Sandbox(str(path), {}, workers=1, timeout_s=20)
        pictures = [Image.new("RGB", (4, 4)) for _ in range(20)]
        found = [each.result() for each in sandbox.submit([{"response": "", "images": pictures}] * 40)]
        assert {each.value for each in found} == {20.0}
        sandbox.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_sample_that_cannot_travel_fails_alone(sandbox):
    assert "cannot pickle" in outcome(sandbox, "fine", column=(n for n in ())).failure
    assert outcome(sandbox, "fine").value == 1.0


def test_output_reaches_no_terminal_and_its_end_is_kept(file, capfd):
    sandbox = Sandbox(str(file), {}, workers=1, timeout_s=20)
    assert outcome(sandbox, "print").output.endswith("noise noise \n")
    assert outcome(sandbox, "fine").output == ""  # not that of another call
    flood = outcome(sandbox, "flood")
    assert "after the flood" in flood.failure and flood.output.endswith("xxx\n") and len(flood.output) <= 4_000
    assert outcome(sandbox, "fine").value == 1.0
    sandbox.close()
    assert capfd.readouterr() == ("", "")


def test_one_who_prints_for_ever_is_stopped_in_time(file):
    sandbox = Sandbox(str(file), {}, workers=1, timeout_s=0.5)
    assert outcome(sandbox, "drain for ever").failure == "took longer than 0.5 s"
    assert outcome(sandbox, "fine").value == 1.0
    sandbox.close()


def test_the_memory_limit(file):
    """512 MB: a sample that allocates a terabyte fails, and samples that fill the process gradually harm no others."""
    sandbox = Sandbox(str(file), {}, workers=1, timeout_s=20, memory_bytes=512 << 20)
    before = outcome(sandbox, "pid").extras["pid"]
    assert "MemoryError" in outcome(sandbox, "devour").failure
    assert outcome(sandbox, "pid").extras["pid"] != before and ends(before)
    rows = [{"response": does} for does in ("fine", "hoard", "hoard", "hoard", "fine", "fine")]
    found = [each.result(timeout=60) for each in sandbox.submit(rows)]
    assert [each.failure is None for each in found].count(False) in (1, 2)  # the heap may hold one or two of them
    assert found[0].value == found[4].value == found[5].value == 1.0
    sandbox.close()


@pytest.mark.slow  # 2 s
def test_of_sequential_samples_only_the_faulty_one_fails(file):
    """All sixteen are in one message; samples finished before a crash but not reported are computed again."""
    manners = ["fine", "fine", "quit", "fine", "raise", "hang", "fine", "killed", "fine", "none"] + ["fine"] * 6
    sandbox = Sandbox(str(file), {}, workers=1, timeout_s=1)
    found = [each.result(timeout=60) for each in sandbox.submit([{"response": does} for does in manners])]
    failed = {place for place, each in enumerate(found) if each.failure}
    assert failed == {2, 4, 5, 7}
    assert "status 4" in found[2].failure and "took longer" in found[5].failure and "SIGKILL" in found[7].failure
    sandbox.close()


@pytest.mark.slow  # 3 s
def test_a_step_of_hanging_calls_ends_soon(tmp_path):
    source = "import time\ndef f(data):\n    if data['response'] == 'hang': time.sleep(1000)\n    return 1.0\n"
    sandbox = Sandbox(str(named(tmp_path, source)), {}, workers=2, timeout_s=0.4)
    found = [each.result(timeout=120) for each in sandbox.submit([{"response": "hang"}] * 64)]
    tried = [each.failure == "took longer than 0.4 s" for each in found]
    assert 10 <= sum(tried) <= 12 and all(each.failure for each in found)
    assert "the 10 calls before it all lost their worker process" in found[tried.index(False)].failure
    assert outcome(sandbox, "fine").value == 1.0  # the next step starts afresh
    sandbox.close()


def test_keyword_arguments(file):
    sandbox = Sandbox(str(file), {"scale": 0.25}, workers=1, timeout_s=20)
    assert outcome(sandbox, "fine").value == 0.25
    sandbox.close()


# ---------------------------------------------------------------------------------------------------- nothing is left
def pids(sandbox, workers):
    """Asks until every worker has shown itself."""
    found = set()
    limit = time.monotonic() + 60
    while len(found) < workers and time.monotonic() < limit:
        asked = sandbox.submit([{"response": "pid"}] * (16 * workers))
        found |= {each.result(timeout=60).extras["pid"] for each in asked}
    assert len(found) == workers
    return found


def test_close_ends_every_process(file):
    sandbox = Sandbox(str(file), {}, workers=2, timeout_s=20)
    running = pids(sandbox, 2)
    assert all(map(is_alive, running))
    sandbox.close()
    assert all(map(ends, running))
    sandbox.close()  # repeating it does no harm


def test_a_forgotten_sandbox_ends_its_processes(file):
    sandbox = Sandbox(str(file), {}, workers=2, timeout_s=20)
    running = pids(sandbox, 2)
    del sandbox
    gc.collect()
    assert all(map(ends, running))


def test_closing_does_not_wait_for_a_call(file):
    sandbox = Sandbox(str(file), {}, workers=1, timeout_s=1000)
    running = pids(sandbox, 1)
    hanging, waiting = sandbox.submit([{"response": "hang"}, {"response": "fine"}])
    time.sleep(0.2)
    sandbox.close()
    assert hanging.result(timeout=60).failure and waiting.result(timeout=60).failure
    assert all(map(ends, running))


def test_a_killed_run_leaves_no_processes(file, tmp_path):
    """Nobody is there to close anything, and the function holds the interpreter, so that no thread of its process could
    notice."""
    note = tmp_path / "pids"
    program = (
        "from mtrl.rewards.sandbox import Sandbox\n"
        f"sandbox = Sandbox({str(file)!r}, {{}}, workers=1, timeout_s=1000)\n"
        "print(sandbox.submit([{'response': 'pid'}])[0].result().extras['pid'], flush=True)\n"
        f"row = {{'response': 'hold the interpreter with children', 'note': {str(note)!r}}}\n"
        "sandbox.submit([row])[0].result()\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    worker = int(run.stdout.readline())
    limit = time.monotonic() + 60
    while not note.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    started = [worker, get_parent_pid(worker), *noted(note)]
    assert all(map(is_alive, started)) and get_parent_pid(get_parent_pid(worker)) == run.pid
    run.kill()
    run.wait()
    run.stdout.close()
    assert all(map(ends, started))


def get_parent_pid(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_worker_outlives_the_thread_that_started_it(file):
    """Linux also signals a process when its parent's thread ends, not only its parent."""
    made = []
    thread = threading.Thread(target=lambda: made.append(Sandbox(str(file), {}, workers=1, timeout_s=20)))
    thread.start()
    thread.join()
    before = outcome(made[0], "pid").extras["pid"]
    time.sleep(0.3)
    assert outcome(made[0], "pid").extras["pid"] == before
    made[0].close()
    assert ends(before)


def test_a_worker_without_its_supervisor_dies(file):
    sandbox = Sandbox(str(file), {}, workers=1, timeout_s=20)
    before = outcome(sandbox, "pid").extras["pid"]
    os.kill(get_parent_pid(before), signal.SIGKILL)
    assert ends(before)
    sandbox.close()


def test_a_system_without_subreapers_is_reported_once(sandbox, caplog):
    sandboxes.warn_about_strays.cache_clear()
    for _ in range(2):
        sandboxes.warn_about_strays()
    assert caplog.text.count("may outlive the run") == 1


# ------------------------------------------------------------------------------------------------- through the scorer
def test_one_bad_sample_among_good_ones(tmp_path, caplog):
    source = (
        "import os, time\n"
        "def moody(data):\n"
        "    row = int(data['response'].split()[1])\n"
        "    if row == 1: raise RuntimeError('first trouble')\n"
        "    if row == 2: os._exit(1)\n"
        "    if row == 3: time.sleep(1000)\n"
        "    if row == 4: return None\n"
        "    return float(row), {'seen': row}\n"
    )
    overrides = {"worker.reward.failure_reward": -1.0, "worker.reward.timeout_s": 1.5, "worker.reward.num_cpus": 2}
    settings = {"worker.reward.functions": (f"{named(tmp_path, source)}:moody", "format")} | overrides
    scorer = build_scorer(load_config(None, settings), 10)
    rewards = scorer.submit(fake_rollouts([1] * 6), 0).result()
    scorer.close()
    close(rewards.parts["moody"], [0, -1, -1, -1, NAN, 5])
    close(rewards.parts["seen"], [0, NAN, NAN, NAN, NAN, 5])
    close(rewards.total, [0, -1, -1, -1, 0, 5])
    assert rewards.failed.tolist() == [False, True, True, True, False, False]
    for word in ("moody", "3 of 6", "failure_reward=-1", "fake p0", "first trouble"):
        assert word in caplog.text


def test_two_files_with_functions_of_one_name(tmp_path):
    specs = tuple(f"{named(tmp_path, f'def f(data): return {n}.0', f'file{n}.py')}:f" for n in (1, 2))
    config = load_config(None, {"worker.reward.functions": specs, "worker.reward.num_cpus": 1})
    scorer = build_scorer(config, 10)
    close(scorer.submit(fake_rollouts([1]), 0).result().total, [3])
    scorer.close()


def test_the_worker_does_not_load_torch(tmp_path):
    """Workers are many and start often."""
    source = "import sys\ndef f(data): return float('torch' in sys.modules)\n"
    close(score(f"{named(tmp_path, source)}:f")[1].total, [0])
