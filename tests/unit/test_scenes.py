"""The task `scenes`: fair questions in separate splits, answers with marked decisive words, rows that never change."""

import hashlib
import re
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from mtrl.compose.task_source import EMBEDDED, open_data_sources
from mtrl.config import paths as places
from mtrl.embedded.embedded_rows import TASKS, packaged_config
from mtrl.embedded.scenes import (
    HELD_OUT,
    KINDS,
    PLACES,
    SHAPES,
    VALUES,
    causal_spans,
    make_question,
    walk,
)
from mtrl.models.tiny_tokenizer import tiny_tokenizer
from mtrl.rewards.builtin import accuracy, format
from pretraining.evaluation import CHANCE, parse_answer
from pretraining.examples import ADDED_TOKENS
from pretraining.pretrain import CURRICULA
from pretraining.scene_teacher import DEMONSTRATIONS, HABITS, OPPOSITE, demonstrations

COUNT = 250


@pytest.fixture(scope="module")
def questions():
    return {split: [make_question(split, i) for i in range(COUNT)] for split in ("train", "validation", "test")}


@pytest.fixture(scope="module")
def answers(questions):
    """Pairs of a question and the teacher's possible answers."""
    asked = [question for split in questions.values() for question in split[:60]]
    return [(question, way.text) for question in asked for way in demonstrations(question)]


def special_words(question, text):
    return [text[start:end] for start, end in causal_spans(question.columns, text)]


# ---------------------------------------------------------------------------------------------------------- questions
def meant(question, route):
    """The object that a route leads to, from the picture alone."""
    filled = {thing.cell: thing for thing in question.things}
    (start,) = [thing for thing in question.things if thing.look == route.reference]
    return filled[walk(start.cell, route.relations)[-1]]


def looked_up(question):
    ends = [meant(question, route) for route in question.routes]
    if question.kind == "shape":
        return ends[0].shape
    if question.kind == "count":
        return str(sum(thing.colour == ends[0].colour for thing in question.things))
    if question.kind == "comparison":
        assert {end.size for end in ends} == {"small", "large"}
        return next(end.colour for end in ends if end.size == "large")
    return ends[0].colour


def test_the_picture_determines_every_answer(questions):
    for question in (each for split in questions.values() for each in split):
        assert 6 <= len({thing.cell for thing in question.things}) == len(question.things) <= 8
        assert looked_up(question) == question.value == question.answer in VALUES[question.kind]
        assert all(OPPOSITE[a] != b for route in question.routes for a, b in pairwise(route.relations))
        named = [
            thing.look for thing in question.things if thing.look in [route.reference for route in question.routes]
        ]
        assert len(named) == len(question.routes), "each reference names one object"


def test_hops():
    prompts = {kind: make_question("train", place).prompt for place, kind in enumerate(KINDS)}
    assert prompts["chain"].count("the object") == 2 and prompts["comparison"].count("the one") == 2
    assert prompts["count"].startswith("How many objects have the colour of the object ")


def test_train_never_shows_the_pairs_that_are_held_out(questions):
    assert (
        len(HELD_OUT) == len({colour for colour, _ in HELD_OUT}) == len({shape for _, shape in HELD_OUT}) == len(SHAPES)
    )
    for split, asked in questions.items():
        shows = [any(thing.look in HELD_OUT for thing in question.things) for question in asked]
        assert all(shows) if split != "train" else not any(shows)
    about = [question.new for question in questions["test"]]
    assert 0.4 < np.mean(about) < 0.6, "half of the answers depend on such a pair, the others do not"


def test_splits_share_no_layout(questions):
    layouts = {
        split: {tuple((thing.cell, thing.size, *thing.look) for thing in question.things) for question in asked}
        for split, asked in questions.items()
    }
    assert not layouts["validation"] & layouts["test"] and not layouts["train"] & layouts["test"]
    assert all(len(found) == COUNT for found in layouts.values()), "no layout occurs twice"


def test_the_text_alone_is_worth_a_sixth():
    """The best guess from a question's text, learnt on some questions and tried on others."""
    train = [make_question("train", index) for index in range(2000)]
    result = {
        "kind": lambda q: q.kind,
        "relations": lambda q: (q.kind, tuple(route.relations for route in q.routes)),
        "named": lambda q: (q.kind, q.routes[0].reference),
        "colour": lambda q: (q.kind, q.routes[0].reference[0]),
    }
    for name, key in result.items():
        counts = defaultdict(Counter)
        for question in train[:1400]:
            counts[key(question)][question.value] += 1
        tried = [q for q in train[1400:] if counts[key(q)]]
        right = np.mean([counts[key(q)].most_common(1)[0][0] == q.value for q in tried])
        assert right < CHANCE + 4 * (CHANCE * (1 - CHANCE) / len(tried)) ** 0.5, (name, right)
    for kind in KINDS:
        values = Counter(q.value for q in train if q.kind == kind)
        assert len(values) == 6 and max(values.values()) < 400 * CHANCE + 4 * (400 * CHANCE) ** 0.5


# ------------------------------------------------------------------------------------------------------------ answers
def test_answers_have_the_format_and_correct_ones_are_rewarded(answers):
    right = []
    for question, text in answers:
        found = parse_answer(text, question)
        sample = {"response": text, "ground_truth": question.answer}
        assert found is not None and format(sample) == 1.0
        assert accuracy(sample) == float(found == question.answer)
        right.append(found == question.answer)
    assert 0.4 < np.mean(right) < 0.65, "the skill is there, and much goes wrong"


def test_every_word_is_a_token_and_answers_have_80_to_200(answers):
    curriculum = CURRICULA["scenes"]
    tokenizer = tiny_tokenizer(True, curriculum.vocabulary_text(), ADDED_TOKENS, curriculum.model_shape["vocabulary"])
    assert len(tokenizer) < curriculum.model_shape["vocabulary"], "otherwise words would be split"
    for question, text in answers[:150]:
        ids = tokenizer(text)["input_ids"]
        assert 80 <= len(ids) + 1 <= 200 < curriculum.max_new_tokens
        assert len(ids) <= len(re.findall(r"</?\w+>|\w+|[.,]| (?=\d)", text))
        assert len(tokenizer(question.prompt)["input_ids"]) <= 40
        assert tokenizer.decode(ids) == text


def test_demonstrations_are_drawn_by_separate_keys(questions):
    question = questions["train"][3]
    ways = demonstrations(question)
    assert [way.text for way in ways] == [way.text for way in demonstrations(question)]
    assert len({way.text for way in ways}) == DEMONSTRATIONS
    assert sum(way.probability for way in ways) == pytest.approx(1)


# ------------------------------------------------------------------------------------------------------- causal spans
def test_decisive_words_by_kind_of_question():
    there = (
        "<think>now, it is calm. I find the red ring at the top left. besides, a small blue cross is at the top right."
        " below it is the middle left. there is a small green square.{}</think><answer>{}</answer>"
    )
    place = ["find", "top left", "middle left"]
    for kind, rest, value, decides in (
        ("colour", " so the answer is green.", "green", [*place, "green", "green", "green"]),
        ("shape", " so the answer is square.", "square", [*place, "square", "square", "square"]),
        ("count", " I count top left, middle left, so 2. so the answer is 2.", "2",
         [*place, "green", "top left, middle left", "2", "2", "2"]),
        ("comparison", " so the answer is green.", "blue", [*place, "small", "green", "green", "blue"]),
    ):  # fmt: skip
        text = there.format(rest, value)
        assert [text[a:b] for a, b in causal_spans({"task": "scenes", "kind": kind}, text)] == decides
    guess = "<think>hmm, this is odd. I guess it is red.</think><answer>red</answer>"
    assert [guess[a:b] for a, b in causal_spans({"task": "scenes", "kind": "chain"}, guess)] == ["guess", "red", "red"]


def test_spans_of_damaged_responses():
    row = {"task": "scenes", "kind": "colour"}
    for text, decides in (
        ("<answer> red", ["red"]),
        ("<answer></answer>", None),
        ("red", None),
        ("", None),
        ("I find the red ring at the top", None),
        ("I find the red ring at the top left", ["find", "top left"]),
        ("<answer>red</answer><answer>very blue</answer>", ["red", "very blue"]),
    ):
        spans = causal_spans(row, text)
        assert (None if spans is None else [text[a:b] for a, b in spans]) == decides, text


def test_the_answer_follows_from_the_decisive_words(answers):
    """Two answers of the teacher to one question that agree in all causal words agree in the answer."""
    by_words = defaultdict(set)
    for question, text in answers:
        words = special_words(question, text)
        assert words[-1] == words[-2] == parse_answer(text, question)
        by_words[question.split, question.index, tuple(words[:-2])].add(words[-1])
        marked = "".join(words)
        assert not any(word in marked for word in ("besides", "anyway", "calm", "odd"))
        assert len(words) <= 12 and (words[0] == "guess") == (len(words) == 3)
    assert all(len(values) == 1 for values in by_words.values())


def test_most_of_an_answer_is_not_decisive(answers):
    share = [sum(map(len, special_words(question, text))) / len(text) for question, text in answers]
    assert np.mean(share) < 0.12


def test_habits_are_answers():
    assert all(HABITS[kind] in VALUES[kind] for kind in KINDS) and len(PLACES) == 9


# --------------------------------------------------------------------------------------------------------------- rows
def test_rows_by_name():
    assert places.EMBEDDED == EMBEDDED == tuple(f"{name}@" for name in TASKS)
    (test,), (blank,) = open_data_sources("scenes@test", "train"), open_data_sources("scenes-blank@test", "train")
    assert len(test) == len(blank) == 2000 and len({test.fingerprint, blank.fingerprint}) == 2
    seen, unseen = test.read(7), blank.read(7)
    assert {key: seen[key] for key in seen if key != "images"} == {
        key: unseen[key] for key in unseen if key != "images"
    }
    assert np.ptp(np.asarray(unseen["images"][0])) == 0 < np.ptp(np.asarray(seen["images"][0]))
    assert seen["images"][0].size == unseen["images"][0].size == (84, 84)
    with pytest.raises(ValueError, match=r"scenes has no split 'tset'; it has train, validation, test"):
        open_data_sources("scenes@tset", "train")
    assert (
        packaged_config("scenes-blank@train")
        == packaged_config("scenes@test")
        != packaged_config("zoo@test")
        != packaged_config("x@test")
    )


def test_the_test_questions_are_the_same_for_ever():
    """A change of the task makes old results incomparable: this hash, its version and the model must then change."""
    asked = [make_question("test", index) for index in range(0, 2000, 20)]
    lines = [f"{q.kind}|{q.things}|{q.prompt}|{q.answer}|{demonstrations(q)[0].text}" for q in asked]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == "610a6a6db1ded672"


PICTURES = [[191.1, 182.8, 173.6], [208.7, 189.5, 195.3], [208.6, 196.4, 197.7]]


def test_the_pictures_are_the_same_for_ever():
    """Mean colours of three pictures; other versions of Pillow may round an edge otherwise."""
    found = [np.asarray(make_question("test", index).image).mean((0, 1)) for index in (0, 1, 1999)]
    np.testing.assert_allclose(found, PICTURES, atol=0.5)
