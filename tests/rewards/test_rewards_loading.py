"""Which function a name of the configuration refers to, and the error if there is none."""

import pytest
from helpers import close
from reward_helpers import named, score

from mtrl.compose.reward_scorer import build_scorer
from mtrl.config import load_config

TWO = "def one(data): return 1.0\ndef two(data): return 2.0\n"
FINDS = {
    "file and name": (TWO, "{path}:two", "two", 2.0),
    "reward_function first": (TWO + "def reward_function(data): return 3.0\n", "{path}", "rewards_of_mine", 3.0),
    "then compute_score": (TWO + "def compute_score(data): return 4.0\n", "{path}", "rewards_of_mine", 4.0),
    "then the only one": ("from math import sqrt\ndef _hidden(d): ...\ndef my(data): return 5.0\n", "{path}",
                          "rewards_of_mine", 5.0),
    "neighbours can be imported": ("from neighbour import VALUE\ndef my(data): return VALUE\n", "{path}:my", "my", 6.0),
}  # fmt: skip


@pytest.mark.parametrize("case", FINDS)
def test_finds(tmp_path, case):
    source, spec, name, value = FINDS[case]
    named(tmp_path, "VALUE = 6.0\n", "neighbour.py")
    names, rewards = score(spec.format(path=named(tmp_path, source)))
    assert names == [name]
    close(rewards.total, [value])


def test_module_and_name(tmp_path, monkeypatch):
    named(tmp_path, TWO, "scores_of_mine.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names, rewards = score("scores_of_mine:two")
    assert names == ["two"]
    close(rewards.total, [2])
    assert score("os.path:isfile")[1].failed.tolist() == [True]  # found, and fails only on its sample


def test_a_file_may_be_called_like_a_module_of_python(tmp_path):
    """EasyR1's own is called math.py."""
    source = "import math, random\ndef reward_function(data): return math.sqrt(4.0)\n"
    names, rewards = score(str(named(tmp_path, source, "math.py")))
    assert names == ["math"] and not rewards.failed.any()
    close(rewards.total, [2])


def test_a_file_next_to_it_does_not_hide_a_python_module(tmp_path, monkeypatch):
    named(tmp_path, "raise SystemExit('not me')", "random.py")
    monkeypatch.chdir(tmp_path)
    close(score(str(named(tmp_path, "import random\ndef f(data): return float(random.random() < 2)\n")))[1].total, [1])


def test_reward_fn_path_stands_alone(tmp_path):
    config = load_config(None, {"worker.reward.reward_fn_path": f"{named(tmp_path, TWO)}:one"})
    scorer = build_scorer(config, 10)
    assert list(scorer.functions) == ["one"]
    scorer.close()


NOT_FOUND = {
    "no file": (None, "{path}:one", "there is no reward file"),
    "no function": (TWO, "{path}:three", "has no function 'three'; it has one, two"),
    "which of two": (TWO, "{path}", "which function .* It has one, two; write .*:NAME"),
    "none at all": ("x = 1\n", "{path}", "It has none"),
    "syntax error": ("def f(data:\n", "{path}:f", "SyntaxError"),
    "import error": ("import no_such_thing\ndef f(data): ...\n", "{path}:f", "No module named 'no_such_thing'"),
    "exits when imported": ("raise SystemExit(5)\n", "{path}:f", "SystemExit: 5"),
    "no module": (None, "no_such_package.module:f", "No module named 'no_such_package'"),
    "no parameter for the data": ("def f(): ...\n", "{path}:f", "called as f\\(data\\), .*: too many positional"),
    "verl's form for many": (
        "def f(data_sources, solution_strs): ...\n", "{path}:f", "missing a required argument: 'solution_strs'"
    ),
    "an unknown REWARD_TYPE": ("REWARD_TYPE = 'both'\ndef f(data): ...\n", "{path}:f", "'batch' or 'sequential'"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_FOUND)
def test_functions_that_cannot_be_loaded_are_reported_at_the_start(tmp_path, case):
    source, spec, message = NOT_FOUND[case]
    path = tmp_path / "rewards_of_mine.py" if source is None else named(tmp_path, source)
    with pytest.raises(ValueError, match=message) as caught:
        score(spec.format(path=path))
    assert str(path) in str(caught.value) or "no_such_package" in str(caught.value)
