"""The task `lookagain`: patterns that only a zoom shows, fair questions in separate splits, the teacher."""

import hashlib
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mtrl.commands.load_arguments import load_evaluation_config
from mtrl.compose.run import configure
from mtrl.compose.task_source import open_data_sources
from mtrl.compose.tool_gain import Answers, compare
from mtrl.embedded.embedded_rows import ALIASES, CONFIG_FILES, packaged_config
from mtrl.embedded.look_again import HALF, KINDS, PATTERNS, SIDE, make_question
from mtrl.embedded.look_again_tools import BlankLookAgain, LookAgain
from mtrl.environments.contract import load_environment
from mtrl.environments.tool_calls import parse_tool_calls
from mtrl.rewards.builtin import accuracy
from pretraining.evaluation import parse_answer
from pretraining.look_again_teacher import PLACE_RATE, READ_RATE, TOOL_RATE, ZOOM_RATE, demonstrations, find_box

COUNT = 300


@pytest.fixture(scope="module")
def questions():
    return [make_question("train", index) for index in range(2 * COUNT)]


def zoom(question, thing, environment=LookAgain):
    tools = environment()
    tools.reset(images=[question.image], image_sizes=[[HALF, HALF]])
    (shown,) = tools.zoom(list(find_box(thing)))
    return shown["image"]


def first_look(picture):
    return picture.resize((HALF, HALF), Image.Resampling.BICUBIC)


# -------------------------------------------------------------------------------------------------------- the pictures
def test_other_patterns_are_the_same_picture_at_the_first_look():
    """Within what rounding makes: two steps of brightness, in few pixels. At full resolution they are far apart."""
    for index in range(6):
        question = make_question("train", index)
        pictures = [
            replace(question, things=tuple(thing._replace(pattern=pattern) for thing in question.things)).image
            for pattern in PATTERNS
        ]
        looks = np.stack([np.asarray(first_look(picture), int) for picture in pictures])
        assert np.ptp(looks, axis=0).max() <= 2 and np.ptp(looks, axis=0).mean() < 0.2
        details = np.stack([np.asarray(picture, int) for picture in pictures])
        assert np.ptp(details, axis=0).max() >= 40


def test_a_classifier_needs_the_zoom(questions):
    """The same regression, fitted to the quarter in question: at chance on what the first look has of it, and certain
    on what the tool shows."""
    labels = np.array([PATTERNS.index(question.value) for question in questions])
    looks = [first_look(question.image).crop(find_box(question.asked)) for question in questions]
    zooms = [zoom(question, question.asked) for question in questions]
    chance = 1 / len(PATTERNS)
    assert abs(classify(looks, labels) - chance) < 4 * (chance * (1 - chance) / COUNT) ** 0.5
    assert classify(zooms, labels) > 0.99


def classify(pictures, labels):
    """The accuracy on the second half of a ridge regression that is fitted to the first half."""
    pixels = np.stack([np.asarray(picture, float).mean(-1).ravel() for picture in pictures])
    pixels = (pixels - pixels[:COUNT].mean(0)) / pixels.std()
    kernel = pixels @ pixels[:COUNT].T
    weights = np.linalg.solve(kernel[:COUNT] + COUNT * np.eye(COUNT), np.eye(len(PATTERNS))[labels[:COUNT]])
    return np.mean((kernel[COUNT:] @ weights).argmax(1) == labels[COUNT:])


def test_a_zoom_into_a_quarter_shows_its_pixels(questions):
    question = questions[0]
    pixels = np.asarray(question.image)
    assert pixels.shape == (SIDE, SIDE, 3)
    for place, thing in enumerate(question.things):
        top, left = HALF * (place // 2), HALF * (place % 2)
        np.testing.assert_array_equal(zoom(question, thing), pixels[top : top + HALF, left : left + HALF])
        grey = np.asarray(zoom(question, thing, BlankLookAgain))
        assert grey.shape == (HALF, HALF, 3) and np.ptp(grey) == 0


# ------------------------------------------------------------------------------------------------------- the questions
def test_the_text_alone_is_worth_a_quarter(questions):
    fair = COUNT / 2 + 4 * (2 * COUNT * 3 / 16) ** 0.5
    for property in ("value", "answer"):
        assert max(Counter(getattr(question, property) for question in questions).values()) < fair
    for question in questions[:50]:
        assert sorted(question.options) == sorted(PATTERNS) and question.options["ABCD".index(question.answer)]
        named = [thing for thing in question.things if question.subject.split()[1] in thing.drawn]
        assert named == [question.asked], "the question means one thing"
        assert find_box(question.asked) in [(0, 0, 28, 28), (28, 0, 56, 28), (0, 28, 28, 56), (28, 28, 56, 56)]
    assert {question.kind for question in questions} == {*KINDS} and {q.level for q in questions} == {1, 2, 3}


def test_splits_share_no_layout(questions):
    """Of the smaller splits each layout has one owner, by its hash."""
    layouts = {question.things for question in questions}
    others = [make_question(split, index).things for split in ("validation", "test") for index in range(COUNT)]
    assert len({*others}) == len(others) and not layouts & {*others}


def test_rows_by_name():
    (train,), (alias,), (blank,) = (
        open_data_sources(name, "train") for name in ("lookagain@train", "zoo@lookagain", "lookagain-blank@train")
    )
    assert len(train) == len(alias) and train.fingerprint == alias.fingerprint != blank.fingerprint
    seen, unseen = train.read(3), blank.read(3)
    assert seen == alias.read(3) and seen.pop("environment") == "sharp" and unseen.pop("environment") == "blank"
    assert seen == unseen and seen["images"][0].size == (SIDE, SIDE)
    assert [packaged_config(name) for name in (*ALIASES, "lookagain-blank@test")] == 2 * [CONFIG_FILES["lookagain"]]


@pytest.mark.parametrize(
    "given",
    [{"worker.actor.model.model_path": "lookagain"}, {"dataset.train_files": "zoo@lookagain"},
     {"dataset.train_files": "lookagain-blank@train"}],
)  # fmt: skip
def test_the_settings_that_come_with_it(given):
    config, embedded = configure(None, given)
    assert embedded == CONFIG_FILES["lookagain"] and config.dataset.max_pixels == HALF**2
    environments = config.worker.rollout.environment
    named = {name: load_environment(spec) for name, spec in environments.items()}
    assert named == {"sharp": LookAgain, "blank": BlankLookAgain}
    assert config.worker.actor.model.model_path == "lookagain" and config.dataset.val_files == "lookagain@validation"


def test_its_model_has_its_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_evaluation_config("lookagain", []).worker.rollout.max_turns == 2


def test_the_test_questions_are_the_same_for_ever():
    """A change of the task makes old results incomparable: this hash, its version and the model must then change."""
    asked = [make_question("test", index) for index in range(0, 1000, 20)]
    lines = [f"{q.kind}|{q.level}|{q.things}|{q.prompt}|{q.answer}|{demonstrations(q)}" for q in asked]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == "05e600ef3e0da21c"


# --------------------------------------------------------------------------------------------------------- the teacher
def test_the_teacher_has_the_skill_and_seldom_uses_it(questions):
    taught = [(question, *demonstrations(question)) for question in questions]
    zooms = [(question, look) for question, look in taught if look.first]
    habits = [look for _, look in taught if look.has_tool and not look.first]
    error = 4 * (0.25 / COUNT) ** 0.5
    assert abs(np.mean([look.has_tool for *_, look in taught]) - TOOL_RATE) < error
    choices = sum(look.teaches_choice for _, look in zooms)
    assert abs(choices / (choices + len(habits)) - ZOOM_RATE) < error
    right = [look for question, look in zooms if look.box == find_box(question.asked)]
    assert abs(len(right) / len(zooms) - PLACE_RATE) < error
    correct = [parse_answer(look.text, question) == question.answer for question, look in zooms if look in right]
    assert abs(np.mean(correct) - READ_RATE) < error
    assert all(look.has_tool for _, look in zooms)


def test_its_calls_and_answers_can_be_read(questions):
    for question in questions[:100]:
        (look,) = demonstrations(question)
        if look.first:
            (call,) = parse_tool_calls(look.first)
            assert (call.name, call.arguments) == ("zoom", {"box": [*look.box]})
            (thing,) = [thing for thing in question.things if find_box(thing) == look.box]
            assert look.first.startswith(f"<think>I look: {question.subject} is at the {thing.place}</think>")
        value = re.search(r"(?:I see|it is often) (\w+)<", look.text)[1]
        sample = {"response": f"{look.first}\n{look.text}", "ground_truth": question.answer, **question.columns}
        assert accuracy(sample) == float(value == question.value)


# ---------------------------------------------------------------------------------------------- what the tool is worth
def test_gain_and_harm_by_hand():
    """Four questions with one response each, and one that no reward applies to."""
    metrics = {"val/tools/calls": 0.8, "val/tools/failure_frequency": 0.25}
    tools = Answers({"a": 1.0, "b": 1.0, "c": 0.0, "d": 1.0, "e": torch.nan}, metrics=metrics)
    without = Answers({"a": 0.0, "b": 1.0, "c": 1.0, "d": 0.0, "e": torch.nan}, [True, False, False, False, False])
    blank = Answers({"a": 0.0, "b": 1.0, "c": 0.0, "d": 0.0, "e": torch.nan})
    gain = compare(tools, without, blank)
    assert (gain.questions, gain.with_tools, gain.without, gain.blank) == (4, 0.75, 0.5, 0.25)
    assert (gain.gain, gain.harm, gain.calls, gain.errors, gain.unanswered) == (0.5, 0.25, 0.8, 0.25, 0.2)


def test_gain_and_harm_of_several_responses():
    tools = Answers({"a": 0.5}, metrics={"val/tools/calls": 0.0})
    gain = compare(tools, Answers({"a": 0.25}, [False, False]), Answers({"a": 0.0}))
    assert (gain.gain, gain.harm) == (0.375, 0.125) and gain.gain - gain.harm == gain.with_tools - gain.without
