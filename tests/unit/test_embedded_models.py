"""The weights of the embedded models: found in the checkout or as a package, in one line if they are not installed, and
under the paths that older runs name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mtrl import cli
from mtrl.compose.policy import model_path
from mtrl.config import load_config
from mtrl.models.checkpoint_files import base_path
from mtrl.utils import embedded_models
from mtrl.utils.embedded_models import FOLDERS, MODELS, NOT_INSTALLED, UNMADE, find_weights

NAMED = "worker.actor.model.model_path"


@pytest.fixture
def not_installed(tmp_path, monkeypatch):
    for name in MODELS:
        monkeypatch.setitem(MODELS, name, tmp_path / "nowhere" / name)


@pytest.mark.parametrize(
    "command",
    [["demo"], ["train"], ["train", f"{NAMED}=scenes"], ["eval", "zoo"], ["train", "mtrl:zoo/grpo"], ["doctor"]],
)
def test_one_line_says_what_to_install(command, not_installed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 2
    said = capsys.readouterr()
    assert (said.err + said.out).count(NOT_INSTALLED) == 1


def test_its_task_can_be_seen_without_it(not_installed, capsys):
    assert cli.main(["data", "zoo@validation"]) == 0
    said = capsys.readouterr()
    assert f"note: prompts are not measured, since {NOT_INSTALLED}" in said.err and "200" in said.out


def test_an_installed_package_is_found_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded_models, "CHECKOUT", tmp_path / "nowhere")
    (tmp_path / "mtrl_embedded").mkdir()
    (tmp_path / "mtrl_embedded" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_weights() == tmp_path / "mtrl_embedded"


def test_a_checkout_reads_its_own_weights(tmp_path):
    """Two commits are compared in one environment, which has the package of a third."""
    (tmp_path / "mtrl_embedded").mkdir()
    (tmp_path / "mtrl_embedded" / "__init__.py").touch()
    checkout = Path(embedded_models.__file__).parents[2]
    code = "from mtrl.utils.embedded_models import find_weights as find; print(find())"
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": f"{tmp_path}:{checkout}"}, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(checkout / "embedded" / "mtrl_embedded")


@pytest.mark.parametrize(("end", "name"), [each for each in FOLDERS.items() if each[1] not in UNMADE])
def test_adapters_and_configurations_that_name_another_folder_of_it(end, name, tmp_path):
    """As a checkpoint from another machine does, or from a version that had the weights in the package mtrl."""
    elsewhere = f"/another/machine/site-packages/{end}"
    assert model_path(load_config(None, {NAMED: elsewhere})) == str(MODELS[name])
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": elsewhere}))
    assert base_path(tmp_path) == str(MODELS[name])


def test_a_folder_that_exists_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mtrl/embedded/model").mkdir(parents=True)
    assert model_path(load_config(None, {NAMED: "mtrl/embedded/model"})) == "mtrl/embedded/model"


def test_adapters_of_an_embedded_model_that_is_not_installed(not_installed, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/x/mtrl/embedded/model"}))
    with pytest.raises(ValueError, match="holds adapters of an embedded model; this embedded model is not installed"):
        base_path(tmp_path)
