"""Files of other projects for tests of `mtrl convert`, and readers of the result."""

from pathlib import Path

from mtrl.config import load_config
from mtrl.config.foreign_config import convert

OTHERS = Path(__file__).parents[1] / "data" / "others"
EASYR1, VERL, TRL = OTHERS / "easyr1.yaml", OTHERS / "verl_grpo.yaml", OTHERS / "trl_grpo.py"


def loaded(converted, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(converted.yaml())
    return load_config(path, saved=True)


def message(converted, *kinds):
    """{their key: message} of the lines of some kinds."""
    lines = [line.text for line in converted.lines if line.kind in kinds]
    return {line.split(" = ")[0].split(": ")[0]: line for line in lines}


def leaves(tree, prefix=""):
    for name, value in tree.items():
        inside = isinstance(value, dict) and value
        yield from leaves(value, f"{prefix}{name}.") if inside else [f"{prefix}{name}"]


def script(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(text)
    return convert(path)


def convert_text(tmp_path, text):
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    return convert(path)
