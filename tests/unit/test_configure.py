"""Which settings lie under a run's own: the embedded task's with no file, no model and no data, else the defaults."""

import shlex

import pytest

import mtrl
from mtrl import cli
from mtrl.commands.demo import PLAIN_GRPO
from mtrl.commands.load_arguments import load_evaluation_config
from mtrl.compose.algorithm import make_credit_rules
from mtrl.compose.policy import model_path
from mtrl.compose.run import configure
from mtrl.config import ConfigError, take_file
from mtrl.embedded.embedded_rows import CONFIG_FILE, CONFIG_FILES
from mtrl.utils.embedded_models import MODELS

MODEL, DATA = "worker.actor.model.model_path", "dataset.train_files"
ONE_REWARD = {"worker.reward.functions": ["accuracy"]}  # the weights in zoo.yaml are for two


def test_the_advice_for_plain_grpo_leaves_no_credit_rule_on():
    program, command, *words = shlex.split(PLAIN_GRPO)
    file, overrides = take_file(words)
    config, embedded = configure(file, overrides)
    assert (program, command, file, embedded) == ("mtrl", "train", None, CONFIG_FILE)
    assert make_credit_rules(config) == ()
    assert make_credit_rules(configure(None, [])[0]), "otherwise the advice would have no effect"


@pytest.mark.parametrize(
    "given", [{MODEL: "x"}, {DATA: "f"}, {MODEL: "x", DATA: "f"}, {"dataset": {"train_files": "f"}}]
)
def test_with_a_model_or_data_the_settings_of_the_embedded_task_are_ignored(given):
    config, embedded = configure(None, given | ONE_REWARD)
    assert not embedded and (config.worker.reward.weights, config.dataset.rollout_batch_size) == (None, 256)


@pytest.mark.parametrize("given", [{}, {MODEL: None}, {DATA: ""}, {DATA: "", MODEL: None}])
def test_without_them_they_lie_under_the_overrides(given):
    config, embedded = configure(None, given | {"training.max_steps": 3})
    assert embedded and (config.training.max_steps, config.worker.reward.weights) == (3, (1.0, 0.2))


@pytest.mark.parametrize(
    "given", [{MODEL: "scenes"}, {DATA: "scenes@train"}, {DATA: "scenes-blank@train", MODEL: "scenes"}]
)
def test_the_settings_of_scenes_lie_under_its_model_and_its_data(given):
    config, embedded = configure(None, given)
    assert embedded == CONFIG_FILES["scenes"] and config.dataset.max_response_length == 208
    assert config.worker.actor.model.model_path == "scenes" and model_path(config) == str(MODELS["scenes"])
    assert (config.dataset.train_files, config.dataset.val_files) == (
        given.get(DATA, "scenes@train"),
        "scenes@validation",
    )
    assert make_credit_rules(config) == (), "plain GRPO, to which an experiment adds its rules"


@pytest.mark.parametrize(
    "given", [{MODEL: "x", DATA: "scenes@train"}, {MODEL: "scenes", DATA: "f"}, {DATA: "scenes.jsonl"}]
)
def test_with_another_model_or_other_data_they_do_not(given):
    assert configure(None, given)[1] is None


def test_a_model_to_evaluate_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "scenes", MODELS["zoo"])
    monkeypatch.chdir(tmp_path)
    config = load_evaluation_config("scenes", [])
    assert (
        config.worker.actor.model.model_path == str(MODELS["zoo"]) and config.dataset.val_files == "scenes@validation"
    )
    assert load_evaluation_config(str(MODELS["zoo"]), []).dataset.max_response_length == 24
    (tmp_path / "scenes").mkdir()
    assert load_evaluation_config("scenes", []).worker.actor.model.model_path == "scenes", "a folder that is there"


def test_on_the_command_line(tmp_path, capsys):
    """The message names the actual problem: there is no such model."""
    words = [f"{MODEL}=./nowhere", f"{DATA}=zoo@train", "worker.reward.functions=[accuracy]"]
    assert cli.main(["train", *words, f"training.output_dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "nowhere is no checkpoint" in said and "weights" not in said


def test_from_python():
    trainer = mtrl.Trainer(model="x", data="f", **ONE_REWARD)
    assert trainer.config.reward_functions == ("accuracy",) and trainer.config.worker.reward.weights is None


def test_an_error_in_an_override_is_reported_once():
    with pytest.raises(ConfigError) as caught:
        configure(None, [f"{MODEL}=x", "no.such_key=1", "loose"])
    assert len(caught.value.errors) == 2
