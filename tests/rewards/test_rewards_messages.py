"""Messages of a worker are only data: none is executed, none causes a hang, and the stored size is bounded."""

import json

import pytest
from helpers import slow_but
from reward_helpers import rows

from mtrl.compose.reward_scorer import build_scorer
from mtrl.config import load_config
from mtrl.rewards import sandbox as sandboxes
from mtrl.rewards.messages import MAX_OUTCOME_BYTES, encode_outcome, read_outcomes, read_start
from mtrl.rewards.outcomes import MAX_EXTRAS, Outcome, read_outcome
from mtrl.rewards.sandbox import RewardJob, Sandbox
from mtrl.sandbox.frames import MAX_MESSAGE_BYTES, WorkerLost
from mtrl.sandbox.plain_text import MAX_FAILURE, sanitize_tail

LINE_OF_ITS_OWN = '''
import gc, json, os, pickle, socket, stat, struct, time

def line():
    """The socket to the trainer, which a function has no business with."""
    return next(fd for fd in range(3, 64) if is_socket(fd))

def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False

class Bomb:
    def __init__(self, note): self.note = note
    def __reduce__(self): return open, (self.note, "w")

def framed(body, job, length=None):
    return struct.pack("!QQ", job, len(body) if length is None else length) + body

def current_job():
    from mtrl.rewards.worker_main import OutcomeSender
    return next(each.job for each in gc.get_objects() if isinstance(each, OutcomeSender))

def good(place=0, value=1.0):
    return json.dumps({"answers": [[place, value, {}, None, 0.0]], "ends": False}).encode()

def reward_function(data):
    does, job = data["response"], current_job()
    if does == "pickle":  # as multiprocessing frames it, and as we do
        body = pickle.dumps(([(0, Bomb(data["note"]), {}, None, 0.0)], False))
        os.write(line(), struct.pack("!i", len(body)) + body)
        time.sleep(1000)
    if does == "framed pickle":
        os.write(line(), framed(pickle.dumps(([(0, Bomb(data["note"]), {}, None, 0.0)], False)), job)); time.sleep(1000)
    if does == "half a frame": os.write(line(), framed(b"", job)[:5]); time.sleep(1000)
    if does == "half a message": os.write(line(), framed(good(), job)[:-5]); time.sleep(1000)
    if does == "drip":
        for byte in framed(b" " * 100_000, job): os.write(line(), bytes([byte])); time.sleep(0.05)
    if does == "wrong job": os.write(line(), framed(good(), job + 1)); time.sleep(1000)
    if does == "wrong place": os.write(line(), framed(good(99), job)); time.sleep(1000)
    if does == "huge": os.write(line(), framed(b"", job, 1 << 40)); time.sleep(1000)
    if does == "no JSON": os.write(line(), framed(b"{", job)); time.sleep(1000)
    if does == "deep":
        body = b"[" * 1_000_000
        socket.socket(fileno=os.dup(line())).sendall(framed(body, job)); time.sleep(1000)
    if does == "twice": os.write(line(), framed(good(value=5.0), job) * 2); time.sleep(1000)
    if does == "before it": os.write(line(), framed(good(value=5.0), job))
    if does == "truncate":
        for fd in range(3, 64):
            try: os.ftruncate(fd, 0)
            except OSError: pass
        os._exit(4)
    if does == "many extras": return 1.0, {f"extra {i}": i for i in range(1_000)}
    if does == "long name": return 1.0, {"x" * 1_000_000: 1}
    if does == "long text": return 1.0, {"said": "x" * 10_000_000, "seen": 1}
    if does == "long weights": return 1.0, {"token_weights": [0.5] * 100_000}
    if does == "endless weights": return 1.0, {"token_weights": [1 / 3] * 250_000}
    if does == "long error": raise RuntimeError("x" * 1_000_000)
    if does == "sly error": raise RuntimeError("\\x1b]0;owned\\x07 \\ud800 end")
    if does == "sly print": print("\\x1b[2J gone", flush=True)
    if does == "names": return 1.0, {f"{data['row']} {i}": 1.0 for i in range(90)}
    if does == "sleep": time.sleep(data["seconds"])
    return 1.0
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "hostile.py"
    path.write_text(LINE_OF_ITS_OWN)
    return path


@pytest.fixture(scope="module")
def sandbox(file):
    shared = Sandbox(str(file), {}, workers=1, timeout_s=3)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def patient(file):
    """Enough time for large results, even on a busy machine."""
    shared = Sandbox(str(file), {}, workers=1, timeout_s=50)
    yield shared
    shared.close()


def outcome(sandbox, does, **columns):
    return sandbox.submit([{"response": does, **columns}])[0].result(timeout=60)


# ------------------------------------------------------------------------------------------------- through a process
NO_ANSWER = "its process sent an invalid message"
LATE = "took longer than 3 s"
HOSTILE = {
    "pickle": NO_ANSWER, "framed pickle": NO_ANSWER, "wrong job": NO_ANSWER, "wrong place": NO_ANSWER,
    "huge": NO_ANSWER, "no JSON": NO_ANSWER, "deep": NO_ANSWER, "half a frame": LATE, "half a message": LATE,
    "drip": LATE, "truncate": "its process ended with status 4",
}  # fmt: skip


@pytest.mark.parametrize("does", slow_but(HOSTILE, *HOSTILE.keys() - {"drip", "half a message"}))  # 3 s: they come late
def test_a_hostile_message_fails_alone(sandbox, tmp_path, does):
    note = tmp_path / "opened"
    assert outcome(sandbox, does, note=str(note)).failure == HOSTILE[does]
    assert not note.exists(), "the trainer executed a worker's message"
    assert outcome(sandbox, "fine").value == 1.0


@pytest.mark.parametrize("does", ["twice", "before it"])
def test_a_repeated_result_causes_no_hang(sandbox, does):
    """The forged result comes first and counts; the next call does not use the other one, but may lose its worker."""
    assert outcome(sandbox, does).value == 5.0
    found = outcome(sandbox, "fine")
    assert (found.value, found.failure) in ((1.0, None), (None, NO_ANSWER))
    assert outcome(sandbox, "fine").value == 1.0


@pytest.mark.parametrize("seconds", [2_147_484.0, 1e15, float("inf")])
def test_a_time_limit_beyond_the_systems_maximum(file, seconds):
    sandbox = Sandbox(str(file), {}, workers=1, timeout_s=seconds, step_timeout_s=seconds)
    assert outcome(sandbox, "fine").value == 1.0
    sandbox.close()


def test_a_thread_survives_any_error(sandbox, monkeypatch):
    def broken(*arguments):
        raise MemoryError("of the trainer")

    with monkeypatch.context() as patch:
        patch.setattr(sandboxes, "read_outcomes", broken)
        assert "MemoryError: of the trainer" in outcome(sandbox, "fine").failure
        patch.setattr(sandboxes.WorkerPool, "serve", broken)
        assert "MemoryError: of the trainer" in outcome(sandbox, "fine").failure
    assert outcome(sandbox, "fine").value == 1.0


def test_after_the_end_no_call_waits(file):
    sandbox = Sandbox(str(file), {}, workers=2, timeout_s=3)
    sandbox.close()
    assert outcome(sandbox, "fine").failure == "the run has ended"


# ------------------------------------------------------------------------------------------------- what is kept of it
@pytest.mark.parametrize(
    ("does", "failure"),
    [
        ("many extras", f"ValueError: at most {MAX_EXTRAS} extra values"),
        ("long name", f"ValueError: at most {MAX_EXTRAS} extra values"),
        ("endless weights", "its extra values take "),
        ("long error", "xxx"),
    ],
)
def test_an_oversized_result_is_a_short_failure(patient, does, failure):
    found = outcome(patient, does)
    assert failure in found.failure and len(found.failure) <= MAX_FAILURE and not found.extras


def test_extra_values_are_numbers_and_weights_as_long_as_the_response(patient):
    assert outcome(patient, "long text").extras == {"seen": 1}
    assert outcome(patient, "long weights", response_token_ids=[1, 2, 3]).extras == {"token_weights": [0.5] * 3}


def test_messages_contain_no_terminal_escapes(patient):
    failure = outcome(patient, "sly error").failure
    assert failure.endswith("RuntimeError: \\x1b]0;owned\\x07 \\ud800 end\n")
    assert outcome(patient, "sly print").output == "\\x1b[2J gone\n"


def test_names_that_are_made_up_for_every_response(file, caplog):
    settings = {"worker.reward.functions": (str(file),), "worker.reward.num_cpus": 1}
    scorer = build_scorer(load_config(None, settings), 10)
    for step in range(2):
        rewards = scorer.submit(rows(["names"] * 4, ["x"] * 4, row=list(range(4))), step).result()
        assert len(rewards.parts) == 1 + MAX_EXTRAS and not rewards.failed.any()
    assert caplog.text.count("return more than 100 different extra values") == 1
    scorer.close()


def test_a_builtin_that_cannot_read_a_row_fails_only_on_that_row():
    scorer = build_scorer(load_config(None, {"worker.reward.functions": ("accuracy",)}), 10)
    rewards = scorer.submit(rows(["B", "B"], ["B", 10**5000]), 0).result()
    assert rewards.failed.tolist() == [False, True] and rewards.parts["accuracy"].tolist() == [1.0, 0.0]


# -------------------------------------------------------------------------------------------------- the time of a step
@pytest.mark.slow  # 2 s
def test_a_step_ends_even_if_every_call_times_out(file):
    """Sixty calls of half a second, each well within its limit."""
    sandbox = Sandbox(str(file), {}, workers=1, timeout_s=30, step_timeout_s=2)
    assert outcome(sandbox, "fine").value == 1.0
    found = [each.result(60) for each in sandbox.submit([{"response": "sleep", "seconds": 0.5}] * 60)]
    late = "all responses together took longer than worker.reward.step_timeout_s=2"
    failures = [each.failure for each in found]
    assert failures[0] is None and late in failures and failures[-1] == f"not called: {late}"
    assert failures.count(None) <= 4 and failures.count(f"not called: {late}") >= 55, "two seconds are four calls"
    assert outcome(sandbox, "fine").value == 1.0  # the next step has its own time
    sandbox.close()


def test_the_limit_of_the_step_holds_for_a_single_call(file):
    sandbox = Sandbox(str(file), {}, workers=1, timeout_s=1000, step_timeout_s=1.5)
    assert outcome(sandbox, "sleep", seconds=1000).failure.endswith("step_timeout_s=1.5")
    sandbox.close()


def test_the_key_reaches_the_sandbox(file):
    settings = {"worker.reward.functions": (str(file),), "worker.reward.num_cpus": 1}
    settings["worker.reward.step_timeout_s"] = 1.5
    scorer = build_scorer(load_config(None, settings), 10)
    rewards = scorer.submit(rows(["sleep"], ["x"], seconds=[1000]), 0).result()
    assert rewards.failed.all()
    scorer.close()


# ---------------------------------------------------------------------------------------------------- reading, by hand
def sent(*answers, ends=False):
    return json.dumps({"answers": answers, "ends": ends}).encode()


FINE = [0, 1.0, {"seen": 2}, None, 0.5]


def test_a_result_arrives_unchanged():
    given = Outcome(1 / 3, {"a": -0.1, "token_weights": [0.1, 2]}, None, "", 1e-9)
    message = f'{{"answers": [{encode_outcome(1, given)}], "ends": true}}'.encode()
    answers, ends = read_outcomes(message, {0: 2, 1: 2}, "")
    assert answers == [(1, given)] and ends
    plain = Outcome(-1 / 3, {}, None, "", 1e-9)
    message = f'{{"answers": [{encode_outcome(0, plain)}], "ends": false}}'.encode()
    assert read_outcomes(message, {0: 2}, "")[0] == [(0, plain)]
    failed = Outcome(failure="why", seconds=2.0)
    assert read_outcomes(sent([None, None, {}, "why", 2.0]), {0: 1}, "")[0] == [(None, failed)]


@pytest.mark.parametrize(
    "message",
    [
        b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, sent(), sent(FINE, FINE), sent([1, *FINE[1:]]),
        sent(FINE[:4]), sent([*FINE, 1]), sent([True, *FINE[1:]]), sent([0.0, *FINE[1:]]), sent([[], *FINE[1:]]),
        sent([0, "1", {}, None, 0.0]), sent([0, float("nan"), {}, None, 0.0]), sent([0, 1e39, {}, None, 0.0]),
        sent([0, 10**400, {}, None, 0.0]), sent([0, 1.0, [], None, 0.0]), sent([0, 1.0, {"a": "text"}, None, 0.0]),
        sent([0, 1.0, {"\n": 1}, None, 0.0]), sent([0, 1.0, {str(i): i for i in range(101)}, None, 0.0]),
        sent([0, 1.0, {"token_weights": [-1]}, None, 0.0]), sent([0, 1.0, {}, 7, 0.0]), sent([0, 1.0, {}, None, None]),
        sent([None, *FINE[1:]], FINE), b'{"answers": {"a": 1}, "ends": false}',
    ],
)  # fmt: skip
def test_invalid_results(message):
    with pytest.raises(WorkerLost, match=NO_ANSWER):
        read_outcomes(message, {0: 4}, "")


@pytest.mark.parametrize("message", [b"", b"1", b"{}", b'{"traits": 1, "error": "", "contained": true}'])
def test_invalid_starts(message):
    with pytest.raises(WorkerLost, match=NO_ANSWER):
        read_start(message)


def test_limits_fit_together():
    """A message of an honest worker is never too long: it contains at most one result more than necessary."""
    longest = encode_outcome(0, Outcome(1.0, {"token_weights": [1 / 3] * 180_000}))
    assert len(longest) < MAX_OUTCOME_BYTES and 2 * MAX_OUTCOME_BYTES <= MAX_MESSAGE_BYTES
    assert len(sanitize_tail("\x1b" * 100_000)) == MAX_FAILURE
    assert len(read_outcome({"x" * 10_000: 1}).failure) < 2_000


def test_jobs_know_how_long_responses_are():
    assert RewardJob([{"response_token_ids": [1, 2]}, {}], []).pending == {0: 2, 1: 0}
