"""What the README shows must run, and its file tree must be true."""

import re
from pathlib import Path

import pytest

from mtrl.config import load_config
from mtrl.embedded.embedded_rows import SIZES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_examples_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SIZES, "validation", 16)  # it validates three times
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))
def test_configurations_can_be_loaded(text, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert load_config(file).worker.actor.model.model_path == "Qwen/Qwen2.5-VL-3B-Instruct"


def rooms_of_the_tree():
    """{room: what the README says of it}; files of the package itself stand under their own name."""
    rooms, room = {}, ""
    for line in README.split("## File tree")[1].split("```")[1].splitlines():
        if head := re.match(r"  (\w+)(?:/|\.py) ", line):
            room = head[1]
        if line.startswith("  "):
            rooms[room] = rooms.get(room, "") + " " + line.removeprefix(f"  {room}")
    return rooms


def modules():
    return sorted(path.relative_to(ROOT / "mtrl") for path in (ROOT / "mtrl").rglob("*.py"))


@pytest.mark.parametrize("path", [path for path in modules() if not path.stem.startswith("__")], ids=str)
def test_every_module_is_named_in_the_file_tree(path):
    """In the lines of its own room, not just anywhere."""
    rooms, room = rooms_of_the_tree(), path.parts[0].removesuffix(".py")
    assert room in rooms, f"the README's file tree has no line for {room}"
    assert len(path.parts) == 1 or re.search(rf"\b{path.stem}\b", rooms[room]), f"{path} is not named there"


def test_the_file_tree_names_nothing_that_is_gone():
    there = {path.parts[0].removesuffix(".py") for path in modules()} | {"configs"}
    assert rooms_of_the_tree().keys() - {""} <= there


@pytest.mark.parametrize("path", re.findall(r"`(\w+/[\w/]+\.py|\w+\.py)`", CONTRIBUTING.split("## Three walks")[1]))
def test_the_walks_lead_through_files_that_exist(path):
    assert (ROOT / "mtrl" / path).is_file()
