"""Paths in a YAML are relative to the file if they exist there, else as typed; overrides to the working directory."""

import pytest
from config_helpers import write

from mtrl.checkpoint.run_directory import CONFIG, RunDirectory
from mtrl.config import load_config, to_yaml
from mtrl.config.packaged import CONFIG_DIR
from mtrl.config.tree import known_leaves
from mtrl.training.resume import check_same_run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A YAML with its neighbours; the working directory is another one."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for place in (home / "data" / "sub", home / "zoo", home / "accuracy", elsewhere):
        place.mkdir(parents=True)
    for name in ("prompt.jinja", "a.jsonl", "b@2.jsonl", "mine.py", "c,d.jsonl", "rollouts.jsonl"):
        (home / name).touch()
    monkeypatch.chdir(elsewhere)
    return home


def get_value(config, key):
    for name in key.split("."):
        config = getattr(config, name)
    return config


def nested(key, text):
    """`a: {b: text}`"""
    *sections, name = key.split(".")
    return "".join(f"{section}: {{" for section in sections) + f"{name}: {text}" + "}" * len(sections)


FOUND = [
    ("dataset.format_prompt", "prompt.jinja", "{home}/prompt.jinja"),
    ("dataset.format_prompt", "./data/../prompt.jinja", "{home}/prompt.jinja"),
    ("dataset.image_dir", "data/sub", "{home}/data/sub"),
    ("dataset.train_files", "a.jsonl", "{home}/a.jsonl"),
    ("dataset.train_files", "'c,d.jsonl'", "{home}/c,d.jsonl"),
    ("dataset.train_files", "data@test", "{home}/data@test"),
    ("dataset.val_files", "'a.jsonl, org/name@test, b@2.jsonl'", "{home}/a.jsonl,org/name@test,{home}/b@2.jsonl"),
    ("worker.reward.reward_fn_path", "mine.py", "{home}/mine.py"),
    ("worker.reward.functions", "[accuracy, mine.py:score]", ("accuracy", "{home}/mine.py:score")),
    ("optimization.credit", "[mine.py:Rule, {name: mine.py:Rule, file: mine.py}]",
     ("{home}/mine.py:Rule", {"name": "{home}/mine.py:Rule", "file": "mine.py"})),
    ("optimization.signals", "[mine.py:Signal]", ("{home}/mine.py:Signal",)),
    ("optimization.loss_terms", "[papo, mine.py:Term]", ("papo", "{home}/mine.py:Term")),
    ("optimization.advantage_estimator", "mine.py:Estimator", "{home}/mine.py:Estimator"),
    ("optimization.policy_loss", "{name: mine.py:Loss}", {"name": "{home}/mine.py:Loss"}),
    ("training.logger", "[console, mine.py:Logger]", ("console", "{home}/mine.py:Logger")),
    ("worker.rollout.name", "mine.py:Engine", "{home}/mine.py:Engine"),
    ("worker.rollout.environment", "mine.py:Tools", "{home}/mine.py:Tools"),
    ("worker.rollout.environment", "{crop: mine.py:Crop}", {"crop": "{home}/mine.py:Crop"}),
    ("worker.actor.model.family", "mine.py:Family", "{home}/mine.py:Family"),
]  # fmt: skip
AS_TYPED = [
    ("dataset.format_prompt", "missing.jinja"),
    ("dataset.format_prompt", "~/prompt.jinja"),
    ("dataset.image_dir", "/"),
    ("dataset.train_files", "zoo@train"),
    ("dataset.train_files", "org/name@test"),
    ("dataset.val_files", "'missing.jsonl, other'"),
    ("dataset.system_prompt", "prompt.jinja"),
    ("training.output_dir", "data"),
    ("worker.reward.reward_fn_path", "package.mine:score"),
]


def filled(value, home):
    if isinstance(value, tuple):
        return tuple(filled(item, home) for item in value)
    if isinstance(value, dict):
        return {name: filled(item, home) for name, item in value.items()}
    return value.replace("{home}", str(home))


@pytest.mark.parametrize("key, written, kept", FOUND)
def test_paths_next_to_the_file_come_first(key, written, kept, folder):
    config = load_config(write(folder, nested(key, written)))
    assert get_value(config, key) == filled(kept, folder)


@pytest.mark.parametrize("key, written", AS_TYPED)
def test_all_else_stays_as_typed(key, written, folder):
    assert get_value(load_config(write(folder, nested(key, written))), key) == written.strip("'")


def test_a_name_is_not_a_folder_next_to_the_file(folder):
    config = load_config(write(folder, "worker: {reward: {functions: [accuracy]}}"))
    assert config.worker.reward.functions == ("accuracy",)


def test_every_key_that_names_files_is_tried_above():
    assert {key for key, leaf in known_leaves().items() if leaf.path_kind} == {key for key, _, _ in FOUND}


def test_a_relative_name_of_the_file_itself_makes_absolute_paths_too(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    write(folder, "dataset: {format_prompt: prompt.jinja}")
    assert load_config("home/run.yaml").dataset.format_prompt == str(folder / "prompt.jinja")


def test_overrides_are_relative_to_the_working_directory(folder):
    path = write(folder, "dataset: {format_prompt: prompt.jinja}")
    assert load_config(path, ["dataset.format_prompt=prompt.jinja"]).dataset.format_prompt == "prompt.jinja"
    assert load_config(path, {"dataset.image_dir": "data"}).dataset.image_dir == "data"


def test_a_template_that_is_nowhere_else_may_be_one_of_the_package(folder):
    name = "experiments/think_answer.jinja"
    path, packaged = write(folder, f"dataset: {{format_prompt: {name}, image_dir: experiments}}"), CONFIG_DIR / name
    assert load_config(path).dataset.format_prompt == str(packaged)
    assert load_config(None, [f"dataset.format_prompt={name}"]).dataset.format_prompt == str(packaged)
    assert load_config(path).dataset.image_dir == "experiments", "only templates are packaged"
    here, beside = folder.parent / "elsewhere" / name, folder / name
    for place, kept in ((here, name), (beside, str(beside))):
        place.parent.mkdir()
        place.touch()
        assert load_config(path).dataset.format_prompt == kept


def test_a_reference_to_another_key_has_its_value(folder):
    path = write(folder, "dataset: {train_files: a.jsonl, val_files: '${dataset.train_files}'}")
    assert load_config(path).dataset.val_files == str(folder / "a.jsonl")
    assert load_config(path, ["dataset.train_files=a.jsonl"]).dataset.val_files == "a.jsonl"


def test_a_folder_with_signs_of_the_configuration_in_its_name(folder):
    for name in ("with,comma", "with${sign}"):
        odd = folder / name
        odd.mkdir()
        for file in ("a.jsonl", "b.jsonl"):
            (odd / file).touch()
        assert (
            load_config(write(odd, "dataset: {train_files: 'a.jsonl,b.jsonl'}")).dataset.train_files
            == "a.jsonl,b.jsonl"
        )


def test_the_configuration_of_a_run_means_the_same_files_and_compares_equal(folder):
    """Also where the run's own directory has a file of the name that was typed."""
    given = write(folder, "dataset: {format_prompt: prompt.jinja, train_files: other.jsonl, val_files: rollouts.jsonl}")
    config = load_config(given, ["dataset.train_files=rollouts.jsonl"])
    with RunDirectory(folder / "run") as directory:
        directory.record(to_yaml(config))
        (directory.path / "rollouts.jsonl").touch()
    with RunDirectory(folder / "run") as directory:
        check_same_run(directory, config, fresh=False)
    again = load_config(folder / "run" / CONFIG, saved=True)
    assert again == config and again.dataset.train_files == "rollouts.jsonl"
    assert again.dataset.val_files == str(folder / "rollouts.jsonl")
