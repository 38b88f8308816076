"""Environments in processes: a rollout's results do not depend on what else happens there, not even on its end."""

import gc
import os
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, wait

import numpy as np
import pytest
from environment_helpers import begin, call, call_all, key, seen, walk_file
from helpers import is_alive
from PIL import Image

from mtrl.environments.messages import Reply, decode_reply, decode_start, encode_reply, read_content
from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.randomness import seed_for
from mtrl.environments.records import EnvironmentLimits, RolloutKey, ToolCall
from mtrl.sandbox.frames import WorkerLost
from mtrl.utils.errors import StartError

PLAN = [("step", {"length": 1}), ("wait_and_step", {"seconds": 0.01}), ("picture", {}), ("step", {"length": 2}),
        ("wait_and_step", {"seconds": 0.005}), ("step", {"length": 3})]  # fmt: skip


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    return walk_file(tmp_path_factory.mktemp("environments"))


@pytest.fixture(scope="module")
def pool(walk):
    shared = EnvironmentPool(walk)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def alone(walk):
    """What each of three rollouts reads if it has a process to itself: nothing else ever happens there."""
    read = {}
    for sample in range(3):
        pool = EnvironmentPool(walk)
        (session,), first = begin(pool, [key(sample)])
        read[sample] = [*first, *(seen(call(session, name, **arguments)) for name, arguments in PLAN)]
        read[sample].append(session.reward().result(timeout=60).value)
        pool.close()
    return read


def test_rollouts_differ_by_their_keys(alone):
    assert len({repr(read) for read in alone.values()}) == 3


def test_results_do_not_depend_on_neighbours_their_order_or_their_end(pool, alone):
    """The three together, in reverse order, coroutines beside each other, and the process ended twice in between."""
    keys = [key(sample) for sample in (2, 0, 1)]
    sessions, first = begin(pool, keys)
    (culprit,), _ = begin(pool, [key(7)])  # of the same group, so in the same process
    before = culprit.worker.generation
    read = [[each] for each in first]
    for turn, (name, arguments) in enumerate(PLAN):
        if turn in (2, 4):
            assert call(culprit, "quit").error == "died"
        for each, result in zip(
            read, call_all(pool, [(session, name, arguments) for session in sessions]), strict=True
        ):
            each.append(seen(result))
    for each, session in zip(read, sessions, strict=True):
        each.append(session.reward().result(timeout=60).value)
    assert read == [alone[2], alone[0], alone[1]]
    assert culprit.worker.generation >= before + 2, "two processes ended"


def test_calls_of_a_turn_keep_their_order_and_have_numbers_of_their_own(pool):
    (session,), _ = begin(pool, [key(task="order")])
    turn = [(session, "wait_and_step", {"seconds": 0.05}), (session, "step", {"length": 1}), (session, "picture", {})]
    first = call_all(pool, turn)
    assert [len(result.images) for result in first] == [0, 0, 1] and " 5 " in first[1].text
    assert first[2].images[0].shape == (5, 4, 3)
    drawn = call_all(pool, [(session, "step", {"length": 1})] * 2)
    assert drawn[0].text.split("(")[1] != drawn[1].text.split("(")[1]


def test_who_is_ready_does_not_wait_for_the_slowest(pool):
    sessions, _ = begin(pool, [key(sample, "ready") for sample in range(2)])
    slow = pool.call([(sessions[0], ToolCall("wait_and_step", {"seconds": 1.0}))])
    quick = pool.call([(sessions[1], ToolCall("wait_and_step", {"seconds": 0.0}))])
    assert wait(slow + quick, 60, FIRST_COMPLETED).done == set(quick)
    again = pool.call([(sessions[1], ToolCall("wait_and_step", {"seconds": 0.0}))])  # while the other still waits
    assert wait(slow + again, 60, FIRST_COMPLETED).done == set(again)
    assert slow[0].result(60).seconds > 1.9 and slow[0].result().waited >= slow[0].result().seconds


def test_a_group_shares_a_process_and_groups_spread_over_all(walk):
    pool = EnvironmentPool(walk, workers=2)
    keys = [key(sample, task) for task in "ab" for sample in range(2)]
    sessions, _ = begin(pool, keys)
    first, second, third, fourth = (call(session, "process").text for session in sessions)
    assert first == second != third == fourth
    for session in sessions:
        session.close()
    assert not pool._groups
    pool.close()


def test_one_death_that_was_no_fault_of_the_call_is_not_seen(pool, tmp_path):
    """Whoever ends the process once, by chance: the call is made again, alone."""
    (session,), _ = begin(pool, [key(task="chance")])
    result = call(session, "quit_once", note=str(tmp_path / "note"))
    assert result.error is None and result.text.startswith("chance 4 ")


def test_sets_have_the_same_order_in_every_process(pool):
    sessions, _ = begin(pool, [key(sample, "sets") for sample in range(2)])
    before = call(sessions[0], "order").text
    assert call(sessions[1], "quit").error == "died"
    assert call(sessions[0], "order").text == before


def test_an_environment_that_cannot_be_repeated_is_given_up(pool, caplog):
    sessions, _ = begin(pool, [key(sample, "unsteady") for sample in range(2)])
    assert call(sessions[0], "unsteady").error is None
    assert call(sessions[1], "quit").error == "died"
    result = call(sessions[0], "step", length=1)
    assert result.error == "lost" and "a repeated call gave another result than before" in result.text
    assert sessions[0].reward().result(60).failure and "unsteady" in caplog.text
    assert call(sessions[1], "step", length=1).error is None


def test_who_ends_process_after_process_is_given_up(pool):
    sessions, _ = begin(pool, [key(sample, "again") for sample in range(2)])
    assert [call(sessions[0], "quit").error for _ in range(4)] == ["died", "died", "died", "lost"]
    assert call(sessions[1], "step", length=1).error is None


def test_a_seed_is_given_where_reset_declares_it(tmp_path):
    path = tmp_path / "seeds.py"
    path.write_text(
        "class With:\n    def reset(self, seed=None, **row): return f'{seed} {sorted(row)}'\n"
        "class Without:\n    def reset(self, **row): return str(sorted(row))\n"
        "class Named:\n    def reset(self, more): return str(more)\n"
    )
    names = ("With", "Without", "Named")
    pool = EnvironmentPool({name: f"{path}:{name}" for name in names})
    rows = [{"environment": name, "more": 1} for name in ("With", *names)] + [{"environment": "With", "seed": 5}]
    sessions = pool.open(rows, [key(sample) for sample in range(5)])
    said = [session.reset().result(60).text for session in sessions]
    seeds = [int(each.split()[0]) for each in said[:2]]
    assert seeds == 2 * [seed_for(key(0).at(0))], "the same for all rollouts of a prompt, which begin alike"
    assert said[2:] == ["['more']", "1", "5 []"], "a column of that name comes first; columns nobody takes are left out"
    pool.close()


def test_errors_that_need_no_process(pool):
    (session,), _ = begin(pool, [key(task="errors")])
    before = pool.errors
    results = [
        call(session, "fly", to="x"),
        call(session, "reset"),
        call(session, "step"),
        call(session, "step", far=1),
    ]
    (malformed,) = pool.call([(session, ToolCall("", error="The tool call is no valid JSON"))])
    kinds = [each.error for each in results] + [malformed.result().error]
    assert kinds == ["unknown_tool", "unknown_tool", "arguments", "arguments", "malformed"]
    assert results[0].text.startswith("{'error': 'Tool fly not found. There is: order, picture, process, quit")
    assert results[2].text == "{'error': \"missing a required argument: 'length'; the tool takes length\"}"
    assert pool.errors - before == {"unknown_tool": 2, "arguments": 2, "malformed": 1}
    assert call(session, "step", length=1).text.startswith("errors 4 "), "none of them was a step"


def test_turns_and_calls_are_limited(walk):
    pool = EnvironmentPool(walk, EnvironmentLimits(turns=2, calls=3))
    (session,), _ = begin(pool, [key()])
    many = [(session, "step", {"length": 1})] * 5
    assert [each.error for each in call_all(pool, many)] == [None, None, None, "turns", "turns"]
    assert call(session, "step", length=1).error is None
    last = call(session, "step", length=1)
    assert last.error == "turns" and "answer now" in last.text
    assert pool.errors["turns"] == 3
    pool.close()


TWO = """
class Base:
    def reset(self, **row):
        self.row = row
        return str(sorted(row))
class One(Base):
    def one(self) -> str:
        "Says one."
        return "1"
    async def get_reward(self): return 1.5
class Other(Base):
    def other(self) -> str:
        "Says two."
        return "2"

def together(completions, environments, answer, **kwargs):
    ranks = sorted(len(e.row["text"]) for e in environments)
    return [float(ranks.index(len(e.row["text"]))) if c != "none" else None
            for e, c, a in zip(environments, completions, answer)]
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "two.py"
    path.write_text(TWO)
    return path


def test_the_column_chooses_the_environment(two):
    pool = EnvironmentPool({"first": f"{two}:One", "second": f"{two}:Other"})
    rows = [{"environment": name, "x": 1} for name in ("second", "first")]
    sessions = pool.open(rows, [key(0), key(1)])
    assert [session.reset().result(60).text for session in sessions] == ["['x']", "['x']"]
    assert [call(session, "one").error for session in sessions] == ["unknown_tool", None]
    assert [session.reward().result(60).value for session in sessions] == [None, 1.5]
    with pytest.raises(ValueError, match="environment is 'third', which is none of the environments: first, second"):
        pool.open([{"environment": "third"}], [key(2)])
    pool.close()
    pool = EnvironmentPool(f"{two}:One")
    (session,) = pool.open([{"environment": "kept"}], [key()])
    assert session.reset().result(60).text == "['environment']"  # as in TRL: only a choice removes it
    pool.close()


def test_functions_that_want_environments_see_their_group(two):
    spec = f"{two}:together"
    pool = EnvironmentPool(f"{two}:One", functions={spec: {}})
    sessions = pool.open([{"text": "x" * n} for n in (3, 1, 2)], [key(sample) for sample in range(3)])
    for session in sessions:
        session.reset()
    samples = [{"response": response, "answer": "y"} for response in ("a", "none", "b")]
    scores = pool.score(spec, sessions, samples).result(60)
    assert [score.value for score in scores] == [2.0, None, 1.0]
    failed = pool.score(spec, sessions[:1], [{"response": "a"}]).result(60)
    assert "answer" in failed[0].failure
    others = pool.open([{"text": ""}], [key(task="other")])
    others[0].reset()
    pool.close()


def test_pictures_of_the_row_arrive(tmp_path):
    path = tmp_path / "sees.py"
    path.write_text("class Sees:\n    def reset(self, images, **row): return str(images[0].getpixel((3, 1)))\n")
    pool = EnvironmentPool(f"{path}:Sees")
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[1, 3] = 1, 2, 3
    (session,) = pool.open([{"images": [Image.fromarray(pixels)]}], [key()])
    assert session.reset().result(60).text == "(1, 2, 3)"
    pool.close()


WRONG = {
    "no file": (None, "there is no environment file"),
    "no class": ("x = 1", "has no environment Zoo"),
    "a function": ("def Zoo(): pass", "is no class"),
    "no reset": ("class Zoo: pass", "Zoo has no method reset"),
    "no docstring": ("class Zoo:\n    def reset(self): ...\n    def see(self): ...", "the tool see has no docstring"),
    "it raises": ("1 / 0", "ZeroDivisionError"),
    "it exits": ("raise SystemExit(5)", "SystemExit: 5"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_class_that_cannot_be_used_is_reported_at_the_start(tmp_path, case):
    source, message = WRONG[case]
    path = tmp_path / "zoo.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(StartError, match=message) as caught:
        EnvironmentPool(f"{path}:Zoo")
    assert str(path) in str(caught.value)


def test_sessions_are_used_between_reset_and_close(pool):
    (session,) = pool.open([{"word": "x"}], [key(task="life")])
    with pytest.raises(ValueError, match="after reset and before close"):
        session.reward()
    session.reset().result(60)
    with pytest.raises(ValueError, match="begins once"):
        session.reset()
    session.close()
    session.close()
    with pytest.raises(ValueError, match="after reset and before close"):
        call(session, "step", length=1)
    with pytest.raises(ValueError, match="the same key"):
        pool.open([{"word": "x"}] * 2, [key()] * 2)


def test_the_end_of_the_pool_is_the_end_of_its_processes(walk):
    pool = EnvironmentPool(walk)
    (session,), _ = begin(pool, [key()])
    process = int(call(session, "process").text)
    running = pool.call([(session, ToolCall("wait_and_step", {"seconds": 100.0}))])
    pool.close()
    assert running[0].result(60).error == "closed" and not is_alive(process)
    assert pool.call([(session, ToolCall("step", {"length": 1}))])[0].result(60).error == "closed"
    forgotten = EnvironmentPool(walk)
    (session,), _ = begin(forgotten, [key()])
    process = int(call(session, "process").text)
    del forgotten, session
    gc.collect()
    assert not is_alive(process)


def test_nothing_heavy_is_loaded(tmp_path):
    """Processes are many and start often: they load neither torch nor transformers, and neither does the room."""
    path = tmp_path / "light.py"
    path.write_text("import sys\nclass Light:\n    def reset(self, **row): return str(sys.modules.keys() & "
                    "{'torch', 'transformers', 'trl', 'ray'})\n")  # fmt: skip
    pool = EnvironmentPool(f"{path}:Light")
    assert begin(pool, [key()])[1] == ["set()"]
    pool.close()
    program = "import sys, mtrl.environments.pool; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=os.environ).returncode == 0


# ------------------------------------------------------------------------------------------------- messages, by hand
LIMITS = EnvironmentLimits(images=2, image_pixels=100, text_characters=50)


def test_a_reply_arrives_unchanged():
    picture = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    reply = decode_reply(encode_reply(Reply(3, ("a ü 图", picture, "b"), None, 0.5)), LIMITS)
    assert reply.content[::2] == ("a ü 图", "b") and reply.seconds == 0.5 and reply.number == 3
    np.testing.assert_array_equal(reply.content[1], picture)
    assert decode_reply(encode_reply(Reply(1, ("half \ud800",))), LIMITS).content == ("half ?",)


def test_the_largest_allowed_reply_is_an_allowed_message():
    limits = EnvironmentLimits()
    side = int(limits.image_pixels**0.5)
    content = ("\ud83d" * limits.text_characters, *[np.zeros((side, side, 3), np.uint8)] * limits.images)
    assert len(encode_reply(Reply(1, content))) <= limits.message_bytes


@pytest.mark.parametrize(
    "message",
    [
        b"", b"x" * 7, b"\xff" * 100, encode_reply(Reply(1, ("a",))) + b"x", encode_reply(Reply(1, ("a",)))[:-1],
        encode_reply(Reply(0)), encode_reply(Reply(1, ("x" * 100_000,))), encode_reply(Reply(1, (), "strange")),
        encode_reply(Reply(1, (np.zeros((11, 10, 3), np.uint8),))),
        encode_reply(Reply(1, (np.zeros((1, 1, 3), np.uint8),) * 3)),
        encode_reply(Reply(1)).replace(b'"content": []', b'"content": [[99999999999, 99999999999]]'),
        encode_reply(Reply(1, values=[[float("nan"), {}, None]])), encode_reply(Reply(1, values=[["1", {}, None]])),
    ],
)  # fmt: skip
def test_other_messages_are_rejected(message):
    with pytest.raises(WorkerLost, match="invalid message"):
        decode_reply(message, LIMITS)


@pytest.mark.parametrize("message", [b"", b"[]", b'{"tools": {"x": 1}, "error": "", "contained": true}'])
def test_other_starts_are_rejected(message):
    with pytest.raises(WorkerLost, match="invalid message"):
        decode_start(message)


def test_return_values_become_content_as_in_trl():
    picture = Image.new("RGB", (3, 2), "red")
    blocks = [{"type": "text", "text": "a"}, {"type": "image", "image": picture}]
    text, image = read_content(blocks, LIMITS)
    assert text == "a" and image.shape == (2, 3, 3) and image[0, 0].tolist() == [255, 0, 0]
    for value in (None, 1.5, {"a": [1]}, [1, "b"], (1, 2), "plain", []):
        assert read_content(value, LIMITS) == (str(value),)
    assert read_content([{"type": "image", "image": np.zeros((2, 2, 3), np.uint8)}], LIMITS)[0].shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x" * 51, "51 characters; at most 50"), ([{"type": "text", "text": "x" * 26}] * 2, "52 characters"),
        ([{"type": "image", "image": Image.new("L", (2, 2))}] * 3, "3 images; at most 2"),
        ([{"type": "image", "image": Image.new("1", (20_000, 10))}], "20000 x 10 pixels; at most 100"),
        ([{"type": "image", "image": np.zeros((2, 2, 3))}], "uint8"), ([{"type": "image", "image": "x"}], "uint8"),
        ([{"type": "video"}], "something else"), ([{"type": "text", "text": "a"}, 3], "something else"),
    ],
)  # fmt: skip
def test_results_over_a_limit_or_of_another_kind_are_errors(value, message):
    with pytest.raises((ValueError, TypeError), match=message):
        read_content(value, LIMITS)


def test_keys():
    assert RolloutKey(1, 2, "a", 0).at(1) != RolloutKey(1, 2, "a", 1).at(1) != RolloutKey(1, 2, "a", 1).at(2)
