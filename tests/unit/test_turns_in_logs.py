"""Responses of several turns in the metrics, the logs and the record: what an environment said, at its place."""

import io
import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from helpers import fake_experience, fake_rollouts, fake_turn, with_turns
from PIL import Image
from view_helpers import make_step, picture, recorded

from mtrl.algorithms.metrics import step_metrics, tool_metrics
from mtrl.models.turns import encoded_prompts
from mtrl.tracking.blocks import RECORD_DIR, DamagedRecord
from mtrl.tracking.feed import make_training_samples
from mtrl.tracking.jsonl import read_rows
from mtrl.tracking.markdown import LogPaths, MarkdownLogs, without_pixels
from mtrl.tracking.run_files import RunFiles
from mtrl.tracking.streams import pack_response, unpack_response
from mtrl.training.validation import add_scores
from mtrl.types import Signals
from mtrl.view.foreign_rollouts import JsonlRollouts
from mtrl.view.response_html import view_responses
from mtrl.view.shared_view import collect_responses

SMALL, WIDE = picture(60), np.zeros((2, 8, 3), dtype=np.uint8)


def decode(ids):
    return " ".join(f"t{i}" for i in ids)


def conversations(images=(SMALL, WIDE)):
    """Rows of 2, 1 and 2 tokens: one turn, a message and another turn; one turn; a turn that a message ends."""
    shown = fake_turn(1, "enlarged:", *images, tools=("zoom", ""), errors=1, waited=0.25)
    last = fake_turn(2, "`7`", tools=("calculator",), waited=0.75)
    return with_turns(make_step(), [shown], None, [last])


# -------------------------------------------------------------------------------------------------------------- metrics
def test_metrics_of_turns_by_hand():
    metrics = step_metrics(conversations(), cut=False)
    assert {name: x for name, x in metrics.items() if name.startswith("tools/")} == pytest.approx({
        "tools/turns": 4 / 3,  # 2, 1 and 1: nothing is written after the last message
        "tools/calls": 1.0,  # 2, 0 and 1
        "tools/failure_frequency": 1 / 3,  # of three calls
        "tools/images": 2 / 3,
        "tools/tokens": (11 + 0 + 3) / 3,  # 1 + 2 + 8, and 1 + 2
        "tools/waited_mean": 0.5, "tools/waited_max": 0.75,
    })  # fmt: skip


def test_metrics_of_turns_apply_only_where_there_is_an_environment():
    assert tool_metrics(make_step().rollouts) == {}
    without_calls = tool_metrics(with_turns(make_step(), [], None, []).rollouts)
    assert without_calls == {"tools/turns": 1.0, "tools/calls": 0.0, "tools/images": 0.0, "tools/tokens": 0.0}


def test_a_validation_counts_every_call_once_over_its_batches():
    scores = defaultdict(list)
    for step in (conversations(), with_turns(make_step(), [], [], [])):
        add_scores(scores, step.rollouts, step.rewards, Signals())
    assert scores["tools/failure_frequency"] == [1, 0, 0] and scores["tools/calls"] == [2, 0, 1, 0, 0, 0]
    assert "tools/waited_max" not in scores, "a mean over batches would not be the longest"


# ----------------------------------------------------------------------------------------------------------------- logs
def test_a_row_has_the_turns_in_order(tmp_path):
    files = RunFiles(tmp_path, decode=decode)
    files.rollouts(1, conversations())
    first, second, third = read_rows(tmp_path / "rollouts.jsonl")
    assert first["response"] == "row 0" and first["tokens"] == 2, "its own words and tokens"
    digests = first["response_turns"][1].pop("images")
    assert len(digests) == len(set(digests)) == 2, "two pictures"
    assert first["response_turns"] == [
        {"role": "assistant", "content": "t0"},
        {"role": "tool", "content": "enlarged:<image><image>", "tools": ["zoom", ""], "errors": 1, "tokens": 11,
         "seconds": 0.25},
        {"role": "assistant", "content": "t1"},
    ]  # fmt: skip
    assert [turn["content"] for turn in third["response_turns"]] == ["t200 t201", "`7`"]
    assert "response_turns" not in second


def test_rows_of_one_turn_are_those_without_an_environment(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 5.0)
    step = make_step()
    for name, each in (("a", step), ("b", with_turns(step, [], None, []))):
        RunFiles(tmp_path / name).rollouts(1, each)
    assert (tmp_path / "a/rollouts.jsonl").read_bytes() == (tmp_path / "b/rollouts.jsonl").read_bytes()


def test_the_viewer_shows_the_turns_of_rows_without_a_record(tmp_path):
    RunFiles(tmp_path, decode=decode).rollouts(1, conversations())
    store = JsonlRollouts(tmp_path, rotating=tmp_path / "rollouts.jsonl")
    store.refresh()
    assert store.response(1, 0)["text"] == "t0\nenlarged:<image><image>\nt1"
    assert store.response(1, 1)["text"] == "row 1" and store.response(1, 0)["parts"] == {"accuracy": 1.0}


def test_the_markdown_log_has_the_turns_in_order(tmp_path):
    logs = MarkdownLogs(LogPaths.make(tmp_path), lambda ids: [f"t{i}" for i in ids], decode_text=decode)
    logs.rollouts(1, conversations())
    logs.close()
    (page,) = (path.read_text() for path in tmp_path.glob("rollout_results_*.md"))
    facts = "environment: zoom, unreadable call; 1 failed; 11 tokens; 0.25 s"
    turns = f"completion\n\n```\nt0\n```\n\n{facts}\n\n```\nenlarged:<image><image>\n```\n\ncompletion\n\n```\nt1\n```"
    assert turns in page and "completion\n\n```\nrow 1\n```\n\nsolution" in page
    assert "environment: calculator; 3 tokens; 0.75 s\n\n```\n`7`\n```\n\nsolution" in page


def test_names_of_tools_are_no_markup(tmp_path):
    turn = fake_turn(1, "Tool not found.", tools=("# a\n```\n[x](http://evil)",), errors=1)
    logs = MarkdownLogs(LogPaths.make(tmp_path), lambda ids: [""] * len(ids), decode_text=decode)
    logs.rollouts(1, with_turns(fake_experience(fake_rollouts([2])), [turn]))
    logs.close()
    (page,) = (path.read_text() for path in tmp_path.glob("rollout_results_*.md"))
    assert "environment: \\# a \\`\\`\\` \\[x\\](http://evil); 1 failed" in page


def test_a_log_keeps_no_pixels_in_memory():
    kept = without_pixels(conversations().rollouts)
    assert not any(prompt.media or prompt.task.media for prompt in encoded_prompts(kept))
    assert kept.observations[0].turns[0].message.task.text == "enlarged:<image><image>" and kept.observations[1] is None


def test_loggers_get_the_conversation():
    samples = make_training_samples(conversations(), decode)
    facts = "[zoom, unreadable call; 1 failed; 11 tokens; 0.25 s]"
    assert samples[0].response == f"t0\n{facts}\nenlarged:<image><image>\nt1" and samples[1].response == "row 1"


# --------------------------------------------------------------------------------------------------------------- record
def test_the_record_has_the_messages_and_their_images(tmp_path):
    store = recorded(tmp_path, conversations())
    first, second, third = (store.response(1, row) for row in range(3))
    (message,) = first["messages"]
    keys = message.pop("images")
    assert message == {"after": 1, "content": "enlarged:<image><image>", "tools": ["zoom", ""], "errors": 1,
                       "tokens": 11, "seconds": 0.25}  # fmt: skip
    shown = [np.asarray(Image.open(io.BytesIO(store.image(1, key)))) for key in keys]
    assert (shown[0] == SMALL).all() and (shown[1] == WIDE).all()
    assert first["pieces"] == ["t0 ", "t1 "] and first["streams"]["dependency"] == [0, 0.25], "its own tokens alone"
    assert second["messages"] == [] and [each["after"] for each in third["messages"]] == [2]
    assert len(first["prompt"]["images"]) == 1, "those of the prompt"


def test_a_response_of_one_turn_is_packed_as_before(tmp_path):
    streams = {"ids": np.array([1, 2])}
    assert pack_response("ab", ["a", "b"], streams, []) == pack_response("ab", ["a", "b"], streams)
    assert b"messages" not in pack_response("ab", ["a", "b"], streams)
    assert unpack_response(pack_response("ab", ["a", "b"], streams))["messages"] == [], "an earlier record"


MESSAGE = {"after": 1, "content": "x", "tools": [], "errors": 0, "tokens": 2, "seconds": 0.5, "images": []}


@pytest.mark.parametrize(
    "messages",
    [
        [{}], [3], [MESSAGE | {"after": -1}], [MESSAGE | {"after": 2}, MESSAGE], [MESSAGE | {"after": None}],
        [MESSAGE | {"tokens": "many"}], [MESSAGE | {"tools": 3}], [MESSAGE | {"errors": 1e999}],
    ],
)  # fmt: skip
def test_damaged_messages_are_refused(messages):
    assert unpack_response(pack_response("x", ["x"], {}, [MESSAGE]))["messages"] == [MESSAGE]
    with pytest.raises(DamagedRecord):
        unpack_response(pack_response("x", ["x"], {}, messages))


def test_a_report_contains_the_images_of_messages(tmp_path):
    images = {}
    (first, *_) = collect_responses(recorded(tmp_path, conversations()), 3, images)
    assert set(first["messages"][0]["images"]) <= images.keys()
    assert json.dumps(images).count("data:image/png") == len(images) == 5, "of 10, 5 and 20, and two shown"


def test_a_notebook_shows_messages_between_the_tokens(tmp_path):
    markup = replace(conversations().rollouts.observations[0].turns[0], tools=("<b>",))
    step = conversations()
    recorded(tmp_path / RECORD_DIR, with_turns(step, [markup], None, [fake_turn(2, "<script>")]))
    html = view_responses(tmp_path, step=1, row=0)._repr_html_()
    order = [html.index(text) for text in (">t0 </span>", "&lt;b&gt;; 1 failed", "enlarged:", ">t1 </span>")]
    assert order == sorted(order) and html.count('alt="image of the message"') == 2
    assert html.count('alt="image of the prompt"') == 2, "and its perturbed view"
    last = view_responses(tmp_path, step=1, row=2)._repr_html_()
    assert last.index(">t201 </span>") < last.index("&lt;script&gt;") and "<script>" not in last
