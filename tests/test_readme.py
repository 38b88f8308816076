"""The commands of the README run, and the statements of CONTRIBUTING about the code are true."""

import re
from pathlib import Path

import pytest
from reading_walk import read_lines, report, walk

from mtrl.config import load_config
from mtrl.embedded.embedded_rows import SIZES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
CONFIGURATIONS = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_examples_run(code, tmp_path, monkeypatch, few_rows):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SIZES, "validation", 8)  # it validates three times
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_configurations_can_be_loaded(text, tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIGURATIONS[0])
    (tmp_path / "own.yaml").write_text(text)
    config = load_config(tmp_path / "own.yaml")
    assert config.worker.actor.model.model_path == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert config.optimization.enable_perception_filtering is (text != CONFIGURATIONS[0]), "plain, then with credit"


def test_rooms_in_contributing_are_those_of_the_package():
    tree = CONTRIBUTING.split("## Rooms")[1].split("```")[1]
    named = set(re.findall(r"^  (\w+)(?:/|\.py) ", tree, re.MULTILINE))
    rooms = {path.stem for path in (ROOT / "mtrl").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert named == {room for room in rooms if not room.startswith("_")} | {"configs"}


def test_every_module_has_a_docstring():
    silent = [
        path for path in (ROOT / "mtrl").rglob("*.py") if path.stat().st_size and '"""' not in path.read_text()[:4]
    ]
    assert not silent, f"without a docstring: {silent}"


def test_the_way_from_the_loop_to_the_gradient_is_short():
    """At most 14 files and 1,600 lines on the path, and CONTRIBUTING prints the list."""
    met = walk()
    lines = {module: read_lines(module, names) for module, names in met.items()}
    assert len(lines) <= 14 and sum(lines.values()) <= 1600, lines
    files = [line.split()[0] for line in report().splitlines()[:-1]]
    printed = CONTRIBUTING.split("## From the loop to the gradient")[1].split("```")[1]
    assert re.findall(r"^(\S+\.py)", printed, re.MULTILINE) == files, "run python tests/reading_walk.py"


def test_the_walks_lead_through_files_that_exist():
    paths = re.findall(r"`(\w+/[\w/]+\.py|\w+\.py)`", CONTRIBUTING.split("## Two more walks")[1])
    paths = [path for path in paths if not path.startswith("tests/")]
    assert paths and not [path for path in paths if not (ROOT / "mtrl" / path).is_file()]
