"""One registry of reward names: the configuration, the factory and the commands all read it."""

import sys
from types import ModuleType

import pytest
from config_helpers import only_error

from mtrl.commands.installed import FEATURES
from mtrl.compose.reward_scorer import make_reward_function
from mtrl.config import ConfigError, load_config
from mtrl.config.tree import known_leaves
from mtrl.rewards.builtin_names import REWARDS, BuiltinReward, Library, is_builtin_name

SAMPLE = {"response": "<answer>7</answer>", "ground_truth": "7", "response_token_ids": [1, 2, 3, 4], "signals": {}}
GROUNDED = SAMPLE | {"signals": {"vgr_late": 0.25}}


@pytest.mark.parametrize("name", REWARDS)
def test_every_name_makes_a_reward(name):
    """The configuration accepts it, it declares whether it needs signals, and it returns rewards."""
    config = load_config(None, [f"worker.reward.functions=[{name}]"])
    logged, part = make_reward_function(config, name)
    try:
        (outcome,) = [future.result() for future in part.submit([GROUNDED])]
    finally:
        part.close()
    assert logged == name and ("attention_mass" in part.needs) == REWARDS[name].attention
    assert outcome.failure is None and isinstance(outcome.value, float), outcome


@pytest.mark.parametrize("name", REWARDS)
def test_settings_are_keys_of_the_configuration(name):
    assert set(REWARDS[name].settings) <= known_leaves().keys()


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("length", ["dataset.max_response_length=4", "worker.reward.soft_punish_cache=2"], -1.0),
        ("length", ["dataset.max_response_length=5", "worker.reward.soft_punish_cache=2"], -0.5),
        ("length", ["dataset.max_response_length=5", "worker.reward.soft_punish_cache=1"], 0.0),
    ],
)
def test_settings_arrive_in_their_order(name, overrides, expected):
    part = make_reward_function(load_config(None, overrides), name)[1]
    assert part.submit([SAMPLE])[0].result().value == expected


def test_a_line_in_the_registry_is_all_a_reward_needs(monkeypatch):
    module = ModuleType("made_up")
    module.tenth = lambda sample: 0.1
    monkeypatch.setitem(sys.modules, "made_up", module)
    refused = only_error("worker.reward.functions=[tenth]")
    assert "tenth is not a built-in reward" in refused and ", ".join(REWARDS) in refused
    monkeypatch.setitem(REWARDS, "tenth", BuiltinReward("made_up:tenth"))
    config = load_config(None, ["worker.reward.functions=[tenth]"])
    name, part = make_reward_function(config, "tenth")
    assert name == "tenth" and part.submit([SAMPLE])[0].result().value == 0.1


def test_a_missing_library_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(REWARDS, "far", BuiltinReward("made_up:far", library=Library("not_there", "pip install far")))
    with pytest.raises(ConfigError, match=r"far needs not_there; pip install far"):
        make_reward_function(load_config(None, []), "far")
    assert [feature.name for feature in FEATURES if feature.name.startswith("reward")] == ["reward `math`"]


def test_an_unknown_name_is_an_error_from_any_source():
    with pytest.raises(ConfigError, match=r"there is no reward acuracy; use a built-in \(accuracy, math"):
        make_reward_function(load_config(None, []), "acuracy")


@pytest.mark.parametrize("path", ["rewards.py", "rewards.py:score", "package.module:score", "folder/score", r"a\score"])
def test_a_path_is_no_name(path):
    assert is_builtin_name("score") and not is_builtin_name(path)
