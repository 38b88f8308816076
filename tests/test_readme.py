"""What the README shows must run, and its file tree must be true."""

import re
from pathlib import Path

import pytest

from mtrl.config import load_config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_examples_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))
def test_configurations_can_be_loaded(text, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert load_config(file).worker.actor.model.model_path == "Qwen/Qwen2.5-VL-3B-Instruct"


def test_every_module_has_a_line_in_the_file_tree():
    tree = README.split("## File tree")[1].split("```")[1]
    for path in sorted((ROOT / "mtrl").rglob("*.py")):
        room, name = path.parent.name, path.stem
        if name.startswith("__"):
            continue
        assert re.search(rf"\b{name}\b|\b{room}/ ", tree), f"{path.relative_to(ROOT)} is not in the README's file tree"
