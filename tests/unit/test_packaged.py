"""Packaged configurations can be named wherever a file is expected."""

import hashlib
import json
from operator import attrgetter
from pathlib import Path

import pytest
from config_helpers import get_errors

from mtrl.cli import main
from mtrl.config import load_config
from mtrl.config.packaged import CONFIG_DIR, packaged_configs
from mtrl.config.tree import known_leaves


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", packaged_configs())
def test_each_loads_by_its_name_with_and_without_yaml(name):
    config = load_config(name)
    assert config == load_config(name.removesuffix(".yaml")) == load_config(CONFIG_DIR / name)
    assert config.training.project_name in ("experiments", "cards", "study")


@pytest.mark.parametrize("name", ["mtrl:tprl_full", "mtrl:experiments/tprl_full", "mtrl:tprl_full.yaml"])
def test_the_short_form_needs_no_folder(name):
    assert load_config(name) == load_config("experiments/tprl_full")
    assert load_config(name.replace("tprl_full", "zoo/tprl_full")) == load_config("experiments/zoo/tprl_full")


def test_a_wrong_short_form_gets_the_near_ones():
    (error,) = get_errors("mtrl:tprl_ful")
    assert "did you mean the packaged experiments/tprl_full.yaml or experiments/zoo/tprl_full.yaml" in error


def test_an_existing_file_wins(elsewhere):
    mine = elsewhere / "experiments" / "dapo.yaml"
    mine.parent.mkdir()
    mine.write_text("dataset: {seed: 7}")
    assert load_config("experiments/dapo.yaml").dataset.seed == 7
    assert load_config("experiments/dapo").dataset.seed == 42, "there is no file of that name here"
    assert get_errors("experiments") == ["experiments: cannot read the file: Is a directory"]


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            "experiments/zoo/tprl_ful.yaml",
            "; did you mean the packaged experiments/zoo/tprl_full.yaml or experiments/tprl_full.yaml",
        ),
        ("vppo", "; did you mean the packaged experiments/vppo.yaml or experiments/zoo/vppo.yaml?"),
        ("../experiments/dapo.yaml", "; did you mean the packaged experiments/dapo.yaml"),
        ("run.yaml", "; mtrl config --list shows the packaged configurations"),
    ],
)
def test_a_wrong_name_gets_the_near_ones(wrong, message):
    (error,) = get_errors(wrong)
    assert error.startswith(f"{wrong}: cannot read the file: No such file or directory{message}")


def test_a_whole_path_is_no_name_of_the_package(elsewhere):
    (error,) = get_errors(elsewhere / "dapo.yaml")
    assert error.endswith("No such file or directory")


def test_the_list_names_each_with_its_first_line(capsys):
    assert main(["config", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(packaged_configs())]] == list(packaged_configs())
    assert all(len(line.split()) > 4 for line in lines[: len(packaged_configs())])
    assert str(CONFIG_DIR) in lines[-1]


def test_the_command_line_takes_the_name(capsys):
    assert main(["config", "experiments/zoo/tprl_full", "dataset.seed=5"]) == 0
    assert "experiment_name: zoo-tprl_full" in capsys.readouterr().out


def test_resolved_values_are_those_of_the_files_before_they_inherited():
    """Hashes of all values that are not defaults, made when every file spelled out all of its keys."""
    hashes = json.loads((Path(__file__).parents[1] / "data/resolved_configs.json").read_text())
    for name, expected in hashes.items():
        path = CONFIG_DIR.parent / name if name.startswith("embedded/") else CONFIG_DIR / name
        config = load_config(path)
        values = {key: attrgetter(key)(config) for key in known_leaves()}
        changed = {key: value for key, value in values.items() if value != known_leaves()[key].default}
        text = json.dumps(changed).replace(str(CONFIG_DIR), "")
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == expected, name
    assert set(packaged_configs()) - set(hashes) == {"scaled_down.yaml"}


def test_packaged_files_are_short():
    """They inherit instead of repeating each other: 3,272 lines before."""
    files = [*packaged_configs().values(), *(CONFIG_DIR.parent / "embedded").glob("*.yaml")]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 1000
