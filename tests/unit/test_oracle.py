"""The oracle rule: from characters to tokens by hand, rows that it does not cover, and its function."""

import sys
from dataclasses import replace

import pytest
import torch
from helpers import fake_experience, fake_rollouts, same

from mtrl.algorithms.credit import assign
from mtrl.algorithms.credit.oracle import Oracle
from mtrl.algorithms.credit.registry import make_rule
from mtrl.algorithms.credit.rule import RunFacts
from mtrl.algorithms.credit.token_spans import token_spans
from mtrl.compose.algorithm import make_algorithm, make_credit_rules
from mtrl.config import ConfigError, load_config
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.scenes import causal_spans, make_question
from mtrl.embedded.task import make_question as zoo_question
from mtrl.models.families import load_encoder
from mtrl.rollout.responses import make_rollouts
from mtrl.tracking.record import TokenPieces
from mtrl.utils.plugins import PluginError
from pretraining.evaluation import make_task

KEY = (1, 2)
VOCABULARY = {1: "so the answer", 2: " is", 3: " red", 4: "<answer>", 5: "blue", 6: "</answer>", 7: "<|im_end|>"}


def words(ids):
    return [VOCABULARY[i] for i in ids]


def message(texts, ids, columns, visual=None):
    """Responses with these tokens, each to its own prompt, with these columns."""
    rollouts = fake_rollouts([len(row) for row in ids], group=range(len(ids)), visual=visual or [True] * len(ids))
    tokens = torch.zeros_like(rollouts.tokens)
    for row, numbers in enumerate(ids):
        tokens[row, : len(numbers)] = torch.tensor(numbers)
    prompts = [
        replace(prompt, task=replace(prompt.task, columns=each))
        for prompt, each in zip(rollouts.prompts, columns, strict=True)
    ]
    return fake_experience(
        replace(rollouts, tokens=tokens, text=tuple(texts), prompts=tuple(prompts)),
        advantage=torch.ones(tokens.shape),
    )


SCENE = {"task": "scenes", "kind": "colour"}
RESPONSE = "so the answer is red<answer>blue</answer>"
IDS = [1, 2, 3, 4, 5, 6, 7]


def test_the_tokens_that_hold_a_causal_character_count():
    rule = Oracle().bind(RunFacts(1, words))
    experience = message([RESPONSE, RESPONSE[:20]], [IDS, [1, 2, 3]], [SCENE, SCENE])
    expected = torch.tensor([[0, 0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0]], dtype=torch.bool)
    same(rule.apply(experience, KEY), expected)
    same(assign([rule], experience, KEY).keep_mask, expected & experience.rollouts.mask)


def test_it_does_not_speak_for_others():
    """In a row of another task, one without an image, and a response without decisive words, all tokens count."""
    silent = "well, well"
    VOCABULARY[8] = silent
    columns = [SCENE, {"task": "zoo"}, None, SCENE, SCENE]
    texts, ids = [RESPONSE] * 4 + [silent], [IDS] * 4 + [[8, 7]]
    experience = message(texts, ids, columns, visual=[True, True, True, False, True])
    rule = Oracle().bind(RunFacts(1, words))
    assert rule.applies_to(experience).tolist() == [True, False, False, False, False]
    select = assign([rule], experience, KEY).keep_mask
    assert select[0].sum() == 2
    same(select[1:], experience.rollouts.mask[1:])


def test_a_rule_without_a_tokenizer():
    with pytest.raises(AssertionError, match="bind was not called"):
        Oracle().apply(message([RESPONSE], [IDS], [SCENE]), KEY)


def test_character_positions_of_pieces():
    assert token_spans(["ab", "c"], "abc") == [(0, 2), (2, 3)]
    assert token_spans(["ab", "<|im_end|>"], "ab") == [(0, 2), (2, 2)], "the text leaves the end token out"
    assert token_spans(["a", "", "", "é", "b"], "aéb") == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]
    assert token_spans(["a", "", ""], "a") == [(0, 1), (1, 1), (1, 1)]
    assert token_spans([], "") == []
    with pytest.raises(ValueError, match="end after 1 of 3 characters"):
        token_spans(["a", "x"], "abc")


@pytest.mark.parametrize("text", ["so the answer is rot für é漢字🙂 and on", "🙂🙂", "a\ufffdb", "<think>I</think>é"])
def test_character_positions_with_a_byte_tokenizer(text):
    """Whatever a character is cut into, each of its tokens holds all of it, and all characters are held in order."""
    encoder = load_encoder(MODEL_DIRECTORY)
    ids = [*encoder.tokenizer(text)["input_ids"], encoder.stop_ids[0]]
    assert encoder.decode(ids) == text
    places = token_spans(TokenPieces(encoder.decode_tokens, encoder.decode)(ids), text)
    assert len(places) == len(ids) and places[-1] == (len(text), len(text))
    assert {c for start, end in places for c in range(start, end)} == set(range(len(text)))
    assert places == sorted(places)


def test_a_cut_character_at_the_end_of_a_response():
    encoder = load_encoder(MODEL_DIRECTORY)
    ids = encoder.tokenizer("so é")["input_ids"]
    cut = ids[:-1]
    assert len(ids) > len(cut) and encoder.decode(cut) == "so \ufffd"
    places = token_spans(TokenPieces(encoder.decode_tokens, encoder.decode)(cut), encoder.decode(cut))
    assert places[-1] == (3, 4)


def test_a_whole_response_of_the_task():
    """With a tokenizer of letters, the tokens that count spell the decisive words."""
    encoder = load_encoder(MODEL_DIRECTORY)
    question = make_question("train", 0)
    text = (
        "<think>besides, a small blue ring is at the top left. there is a small red ring.</think><answer>red</answer>"
    )
    ids = [*encoder.tokenizer(text)["input_ids"], encoder.stop_ids[0]]
    prompt = replace(fake_rollouts([1]).prompts[0], task=make_task(question))
    rollouts = make_rollouts(
        [prompt], [0], [ids], None, text=[encoder.decode(ids)], finish=["stop"], version=0, pad_id=encoder.pad_id
    )
    rule = Oracle().bind(RunFacts(1, TokenPieces(encoder.decode_tokens, encoder.decode)))
    (kept,) = rule.apply(fake_experience(rollouts), KEY)
    assert encoder.decode(torch.tensor(ids)[kept]).replace(" ", "") == "redred"
    assert [text[a:b] for a, b in causal_spans(question.columns, text)] == ["red", "red"]


# ------------------------------------------------------------------------------------------------------- its function
@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_function_of_the_users(tmp_path):
    path = tmp_path / "mine.py"
    told_all = "row['answer'] is None and row['id'] == 'p0'"
    path.write_text(f"def spans(row, response):\n    return [(0, 1)] if {told_all} else None\n")
    rule = make_rule({"name": "oracle", "spans": f"{path}:spans"}).bind(RunFacts(1, words))
    same(rule.apply(message([RESPONSE], [IDS], [None]), KEY), torch.tensor([[1, 0, 0, 0, 0, 0, 0]], dtype=torch.bool))


def test_invalid_functions(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1 / 0\n")
    for spec, said in (
        ("mtrl.embedded.scenes:nothing", "mtrl.embedded.scenes has no function of causal spans nothing"),
        ("mtrl.embedded.scenes:KINDS", "is no function"),
        (f"{broken}:f", "ZeroDivisionError"),
        ("no_such_module:f", "No module named"),
    ):
        with pytest.raises(PluginError, match=said):
            make_rule({"name": "oracle", "spans": spec})
    with pytest.raises(ConfigError, match=r"optimization\.credit: .*nothing"):
        make_credit_rules(
            load_config(None, {"optimization.credit": [{"name": "oracle", "spans": "mtrl.embedded.scenes:nothing"}]})
        )


def test_a_file_next_to_the_configuration_is_found(tmp_path):
    (tmp_path / "mine.py").write_text("def spans(row, response):\n    return None\n")
    (tmp_path / "run.yaml").write_text("optimization: {credit: [{name: oracle, spans: 'mine.py:spans'}]}\n")
    (spec,) = load_config(tmp_path / "run.yaml", []).optimization.credit
    assert spec["spans"] == f"{tmp_path}/mine.py:spans"


def test_nothing_to_shuffle():
    with pytest.raises(PluginError, match="reads no signal, so there is nothing to shuffle"):
        make_rule({"name": "shuffled", "rule": "oracle"})


def test_a_run_gives_its_rules_the_tokenizer():
    config = load_config(None, {"optimization.credit": ["oracle", "key_tokens"]})
    oracle, other = make_algorithm(config, 1, decode=words).credit
    assert oracle.decode is words and other == make_rule("key_tokens")
    assert make_algorithm(config, 1).credit[0].decode is None


def test_rows_of_the_other_embedded_task_are_not_covered():
    task = make_task(zoo_question("train", 0))
    assert causal_spans({**task.columns, "answer": task.answer}, RESPONSE) is None
