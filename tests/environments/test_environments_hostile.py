"""Tools that hang, die, lie and flood: each becomes an error for the model, and its neighbours do not notice."""

import os
import re
import subprocess
import sys
import time

import environment_helpers
import pytest
from environment_helpers import call, call_all, key
from helpers import is_alive, slow_but

from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.records import EnvironmentLimits

MANNERS = '''
import asyncio, gc, itertools, os, pickle, random, signal, struct, subprocess, sys, time
import numpy as np
from PIL import Image

class Odd:
    def __str__(self): raise RuntimeError("no text of me")

class Endless:
    def __str__(self):
        while True: time.sleep(0.01)

class Bomb:
    def __init__(self, note): self.note = note
    def __reduce__(self): return open, (self.note, "w")

def line():
    """The socket to the trainer, which a tool has no business with."""
    return next(o for o in gc.get_objects() if type(o).__name__ == "EnvironmentProcess").connection.fileno()

hoard = []

class Manners:
    def reset(self, word="", **row):
        if word == "hang": time.sleep(1000)
        if word == "raise": raise RuntimeError("no such place")
        if word == "quit": os._exit(3)
        self.count = 0

    def count_up(self) -> str:
        "Counts."
        self.count += 1
        return f"{self.count} {random.random()}"

    async def wait(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return self.count_up()

    async def block(self) -> str:
        "Holds the loop."
        time.sleep(1000)

    async def refuse(self) -> str:
        "Does not want to stop."
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass

    def note_and_block(self) -> str:
        "Says who it is, starts others, and holds the interpreter."
        start(os.environ["NOTE"])
        sum(itertools.repeat(0))

    def do(self, what: str, note: str = "") -> str:
        """Behaves badly.

        Args:
            what: How.
            note: A file.
        """
        self.count += 100  # what does not come back has not happened
        if what == "raise": raise RuntimeError("deliberate")
        if what == "exit": sys.exit(3)
        if what == "interrupt": raise KeyboardInterrupt
        if what == "ask": return input()
        if what == "long error": raise RuntimeError("x" * 1_000_000)
        if what == "print": print("noise " * 1000)
        if what == "flood text": return "x" * 1_000_000
        if what == "flood images": return [{"type": "image", "image": Image.new("RGB", (4, 4))}] * 1_000
        if what == "huge image": return [{"type": "image", "image": Image.new("1", (30_000, 1_000))}]
        if what == "strange block": return [{"type": "video", "video": 1}]
        if what == "strange image": return [{"type": "image", "image": object()}]
        if what == "no text": return Odd()
        if what == "coroutine": return self.wait(0.0)
        if what == "a loop of its own": return asyncio.run(self.wait(0.0))
        if what == "fork":
            child = os.fork()
            if child: os.waitpid(child, 0)
            return "forked"
        if what == "fork and raise":
            child = os.fork()
            if not child: raise RuntimeError("of the child")
            return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if what == "devour": hoard.append(bytearray(1 << 40))
        if what == "hang": time.sleep(1000)
        if what == "endless text": return Endless()
        if what == "drain":
            while True: print("x" * 100_000)
        if what == "quit": os._exit(4)
        if what == "crash": os.kill(os.getpid(), signal.SIGSEGV)
        if what == "killed": os.kill(os.getpid(), signal.SIGKILL)
        if what == "close": os.closerange(3, 64)
        if what == "pickle":
            body = pickle.dumps(Bomb(note))
            os.write(line(), struct.pack("!QQ", 0, len(body)) + body); time.sleep(1000)
        if what == "no frame": os.write(line(), b"x" * 100); time.sleep(1000)
        if what == "of nobody":
            body = b'{"number": 999999, "content": ["a"], "error": null, "seconds": 0, "values": []}'
            body = struct.pack("!Q", len(body)) + body
            os.write(line(), struct.pack("!QQ", 0, len(body)) + body); time.sleep(1000)
        return "fine"

    def get_reward(self):
        return {1: "much", 2: float("nan"), 3: None}.get(self.count, float(self.count))

def start(note):
    """A child, one in a session of its own, and one of whom nobody is the parent any more."""
    child, apart = (subprocess.Popen(["sleep", "1000"], start_new_session=new).pid for new in (False, True))
    orphan = subprocess.check_output("setsid sleep 1000 >/dev/null 2>&1 & echo $!", shell=True, text=True)
    open(note + ".part", "w").write(f"{os.getpid()} {child} {apart} {orphan}")
    os.rename(note + ".part", note)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "manners.py"
    path.write_text(MANNERS)
    return f"{path}:Manners"


@pytest.fixture(scope="module")
def pool(file):
    shared = EnvironmentPool(file, EnvironmentLimits(call_seconds=5.0, memory_bytes=1 << 30))
    yield shared
    shared.close()


def begin(pool, keys):
    return environment_helpers.begin(pool, keys, word="")


STAYS = {  # the kind of the error, and what the model reads: in the same process
    "raise": ("exception", "{'error': 'deliberate'}"), "exit": ("exception", "{'error': 'SystemExit: 3'}"),
    "interrupt": ("exception", "KeyboardInterrupt"), "ask": ("exception", "EOF when reading a line"),
    "long error": ("exception", "xxx"), "print": (None, "fine"), "coroutine": (None, "101 "),
    "a loop of its own": (None, "101 "),
    "flood text": ("too_large", "1,000,000 characters; at most 20,000"),
    "flood images": ("too_large", "1,000 images; at most 4"),
    "huge image": ("too_large", "30000 x 1000 pixels; at most 4,194,304"),
    "strange block": ("exception", "the tool returned a list with something else"),
    "strange image": ("exception", "an image must be a PIL image or an array"),
    "no text": ("exception", "no text of me"), "fork": (None, "forked"), "fork and raise": (None, "1"),
}  # fmt: skip


@pytest.mark.parametrize("what", STAYS)
def test_a_fault_is_an_error_to_read_and_the_process_stays(pool, what):
    (session, neighbour), _ = begin(pool, [key(sample, what) for sample in range(2)])
    before = session.worker.generation
    kind, text = STAYS[what]
    result = call(session, "do", what=what)
    assert result.error == kind and text in result.text and len(result.text) < 3_000
    assert call(neighbour, "count_up").text.startswith("1 ") and session.worker.generation == before
    if kind == "exception":
        assert len(result.output) <= 4_000 and ("Traceback" in result.output or what == "long error")
    if what == "print":
        assert result.output.endswith("noise noise \n")


ENDS = {
    "quit": ("died", "do: its process ended with status 4"), "crash": ("died", "killed by SIGSEGV"),
    "killed": ("died", "killed by SIGKILL (out of memory?)"), "close": ("died", "its process"),
    "pickle": ("died", "invalid message"), "no frame": ("died", "invalid message"),
    "of nobody": ("died", "invalid message"), "devour": ("memory", "do needed too much memory"),
    "hang": ("timeout", "do: took longer than 5 s"), "drain": ("timeout", "took longer than 5 s"),
    "endless text": ("timeout", "took longer than 5 s"),
}  # fmt: skip


@pytest.mark.parametrize("what", slow_but(ENDS, "quit", "devour", "hang", "pickle"))
def test_the_end_of_a_process_is_an_error_to_read_and_all_are_rebuilt(pool, tmp_path, what):
    """Its own call has not happened: the counter is not at a hundred."""
    (session, neighbour), _ = begin(pool, [key(sample, what) for sample in range(2)])
    call_all(pool, [(session, "count_up", {}), (neighbour, "count_up", {})])
    before, errors, note = session.worker.generation, pool.errors, tmp_path / "opened"
    kind, text = ENDS[what]
    result = call(session, "do", what=what, note=str(note))
    assert result.error == kind and text in result.text
    assert pool.errors - errors == {kind: 1} and not note.exists(), "the trainer executed a worker's message"
    assert call(session, "count_up").text.startswith("2 ") and call(neighbour, "count_up").text.startswith("2 ")
    assert session.worker.generation > before


def test_a_coroutine_out_of_time_is_stopped_alone(pool):
    """Its process stays; the environment is built again, since it was stopped in the middle."""
    sessions, _ = begin(pool, [key(sample, "coroutine") for sample in range(3)])
    before = sessions[0].worker.generation
    turn = [(sessions[0], "wait", {"seconds": 100.0}), (sessions[1], "wait", {"seconds": 0.1})]
    late, quick = call_all(pool, turn)
    assert late.error == "timeout" and quick.error is None and sessions[0].worker.generation == before
    assert call(sessions[0], "count_up").text.startswith("1 ")


@pytest.mark.slow  # 20 s
@pytest.mark.parametrize("tool", ["block", "refuse"])
def test_a_coroutine_that_holds_the_process_is_found_among_others(pool, tool):
    sessions, _ = begin(pool, [key(sample, tool) for sample in range(3)])
    turn = [(sessions[0], "wait", {"seconds": 0.5}), (sessions[1], tool, {}), (sessions[2], "wait", {"seconds": 0.5})]
    results = call_all(pool, turn)
    assert [result.error for result in results] == [None, "timeout", None]
    assert call(sessions[1], "count_up").text.startswith("1 ")


def test_a_reset_that_fails_fails_alone(pool):
    sessions, _ = begin(pool, [key(0, "fine"), key(1, "fine")])
    (failing,) = pool.open([{"word": "raise"}], [key(2, "fine")])
    assert failing.reset().result(60).text == "{'error': 'no such place'}"
    result = call(failing, "count_up")
    assert result.error == "lost" and "reset failed: no such place" in result.text
    assert failing.reward().result(60).failure.startswith("reset failed")
    assert call(sessions[0], "count_up").error is None


@pytest.mark.parametrize(("word", "kind"), [("quit", "died"), ("hang", "timeout")])
def test_a_reset_that_ends_the_process(pool, word, kind):
    (neighbour,), _ = begin(pool, [key(0, word)])
    (failing,) = pool.open([{"word": word}], [key(1, word)])
    assert failing.reset().result(60).error == kind
    assert call(failing, "count_up").error == "lost" and call(neighbour, "count_up").text.startswith("1 ")


def test_rewards_that_are_none(pool):
    (session,), _ = begin(pool, [key(task="rewards")])
    assert session.reward().result(60).value == 0.0
    found = []
    for _ in range(4):
        call(session, "count_up")
        found.append(session.reward().result(60))
    assert "it returned str" in found[0].failure and "finite" in found[1].failure
    assert (found[2].value, found[2].failure) == (None, None) and found[3].value == 4.0


def test_a_row_that_cannot_travel_fails_alone(pool):
    (session,) = pool.open([{"word": "x", "odd": (n for n in ())}], [key(task="odd")])
    assert "cannot pickle" in session.reset().result(60).text
    assert begin(pool, [key(task="even")])[1] == [""]


def test_output_reaches_no_terminal(file, capfd):
    pool = EnvironmentPool(file)
    (session,), _ = begin(pool, [key()])
    call(session, "do", what="print")
    call(session, "do", what="raise")
    pool.close()
    assert capfd.readouterr() == ("", "")


def test_a_killed_run_leaves_no_processes(file, tmp_path):
    """Nobody is there to close anything, and the tool holds the interpreter and has started others."""
    note = tmp_path / "pids"
    program = (
        "from mtrl.environments.pool import EnvironmentPool\n"
        "from mtrl.environments.records import *\n"
        f"pool = EnvironmentPool({file!r}, EnvironmentLimits(call_seconds=1000.0))\n"
        "(session,) = pool.open([{}], [RolloutKey(0, 0, 't', 0)])\n"
        "session.reset().result()\n"
        "pool.call([(session, ToolCall('note_and_block'))])[0].result()\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"NOTE": str(note)})
    try:
        assert comes_true(note.exists, 60)
        started = [int(pid) for pid in note.read_text().split()]
        assert len(started) == 4 and all(map(is_alive, started))
    finally:
        run.kill()
        run.wait()
    assert comes_true(lambda: not any(map(is_alive, started)), 20)


def comes_true(condition, seconds):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


def test_every_behaviour_is_tried():
    """A new one belongs to one of the tables above."""
    named = set(re.findall(r'what == "([^"]+)"', MANNERS))
    assert named == STAYS.keys() | ENDS.keys()
