"""What the README shows must run, and its file tree must be true."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_examples_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


def test_every_module_has_a_line_in_the_file_tree():
    tree = README.split("## File tree")[1].split("```")[1]
    for path in sorted((ROOT / "mtrl").rglob("*.py")):
        room, name = path.parent.name, path.stem
        if name.startswith("__"):
            continue
        assert re.search(rf"\b{name}\b|\b{room}/ ", tree), f"{path.relative_to(ROOT)} is not in the README's file tree"
