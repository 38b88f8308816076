"""The commands of the tutorial pages run, and what the pages quote is what the programs print."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from sources import ROOT, SOURCES, parse

import mtrl
from mtrl.bench.shapes import write_files
from mtrl.cli import main
from mtrl.config import load_config
from mtrl.tracking.jsonl import read_rows

DOCS = ROOT / "docs"
SERVER = "a server"
NOT_HERE = ("needs a GPU", "needs the network")
BLOCK = re.compile(r"(?:^<!-- ([\w ]+) -->\n)?^```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    mark: str  # the HTML comment above it
    language: str
    file: str  # the name under which a reader saves it
    text: str


def read_blocks(page: str) -> list[Block]:
    return [Block(*match) for match in BLOCK.findall((DOCS / page).read_text())]


def save_files(page: str) -> None:
    for block in read_blocks(page):
        if block.file:
            Path(block.file).write_text(block.text)


# ------------------------------------------------------------------------------------------------------------ commands
def run_commands(page: str) -> None:
    """Follow the page in the working directory, with the commands of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    save_files(page)
    for block in read_blocks(page):
        if block.language == "bash" and block.mark == SERVER:
            visit(block.text, environment)
        elif block.language == "bash" and block.mark not in NOT_HERE:
            command = ["bash", "-euxo", "pipefail", "-c", block.text]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{page}: {block.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def visit(command: str, environment: dict[str, str]) -> None:
    """Start the server, open the page at the address that it prints, and end it."""
    words = [*shlex.split(command), "--no-browser", "--port", "0"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            (address,) = re.findall(r"http://\S+", server.stdout.readline())
            assert b"<html" in urlopen(address).read()
        finally:
            server.terminate()


@pytest.mark.slow  # a minute on two cores
def test_the_start_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_commands("index.md")


@pytest.mark.slow  # five minutes on two cores
def test_the_tutorial_runs(tmp_path, monkeypatch):
    """And what it says about its results is so."""
    monkeypatch.chdir(tmp_path)
    run_commands("tutorial.md")
    accuracy = [
        row["val/avg@1"] for row in read_rows(Path("outputs/tutorial/shapes/metrics.jsonl")) if "val/avg@1" in row
    ]
    assert 0.2 < accuracy[0] < 0.45 and accuracy[-1] > 0.9
    cosine = re.findall(r"^\| credit \| ([\d.]+) \|", Path("comparison/comparison.md").read_text(), re.MULTILINE)[-1]
    assert float(cosine) > 0.999, "the last table is that of the gradients"
    assert json.loads(Path("my_model/config.json").read_text())["model_type"] == "qwen2_5_vl"


@pytest.mark.parametrize("page", ["index.md", "tutorial.md", "first_real_run.md"])
def test_marks_are_known(page):
    """A mark with a mistake would run a command that needs a GPU, or skip one that does not."""
    assert {block.mark for block in read_blocks(page)} <= {"", SERVER, *NOT_HERE}
    assert not [block for block in read_blocks(page) if block.mark and block.language != "bash"]


# ------------------------------------------------------------------------------------------------- the first real run
@pytest.fixture
def first_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_files("first_real_run.md")


def test_the_first_run_is_plain_grpo(first_run):
    config = load_config("run.yaml")
    assert config.worker.actor.model.model_path == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert config.optimization.advantage_estimator == "grpo" and config.optimization.disable_divergence
    assert not config.optimization.enable_perception_filtering and not config.optimization.enable_trajectory_reweighting


@pytest.mark.slow  # half a minute
def test_the_memory_of_the_first_run(first_run, capsys):
    """The configuration of the page with the shape of its model, which has no weights here."""
    write_files(Path("model"), "3b")
    main(["doctor", "run.yaml", "--gpu", "80", "worker.actor.model.model_path=model"])
    (quoted,) = [block.text for block in read_blocks("first_real_run.md") if "million parameters" in block.text]
    printed = capsys.readouterr().out
    assert quoted in printed
    assert "; 3 checkpoints of 41.96 GiB" in printed


# ---------------------------------------------------------------------------------------------------------- moving
@pytest.mark.parametrize(("theirs", "status"), [("train_trl.py", 1), ("easyr1.yaml", 0), ("verl.yaml", 0)])
def test_conversions_are_those_of_the_page(theirs, status, tmp_path, monkeypatch, capsys):
    """After a file of theirs come the command, its output, and the lines of its report that need a look."""
    monkeypatch.chdir(tmp_path)
    save_files("moving.md")
    blocks = read_blocks("moving.md")
    first = next(place for place, block in enumerate(blocks) if block.file == theirs)
    command, result, report = (block.text for block in blocks[first + 1 : first + 4])
    assert command == f"mtrl convert {theirs} > run.yaml\n"
    assert main(["convert", theirs]) == status
    printed = capsys.readouterr()
    assert printed.out == result
    starts = ("another meaning", "no counterpart", "could not be read") if status else ("their default",)
    assert report.splitlines() == [line for line in printed.err.splitlines() if line.startswith(starts)]


# --------------------------------------------------------------------------------------------------- troubleshooting
def test_symptoms_are_the_words_of_the_program():
    """Every quoted piece of a message is part of a text in the code. Commands and settings are no messages."""
    page = re.sub(r"```.*?```", "", (DOCS / "troubleshooting.md").read_text(), flags=re.DOTALL)
    quoted = re.findall(r"`([^`]+)`", page)
    messages = [piece for piece in quoted if " " in piece and not re.match(r"mtrl |ray |async |[\w.]+: \S+$", piece)]
    assert len(messages) > 40
    texts = {
        node.value
        for module in SOURCES
        for node in ast.walk(parse(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not [piece for piece in messages if not any(piece.replace("\n", " ") in text for text in texts)]


# ---------------------------------------------------------------------------------------------------------- the site
def list_pages(nav) -> list[str]:
    return (
        [nav]
        if isinstance(nav, str)
        else [page for part in nav for page in list_pages(part if isinstance(nav, list) else nav[part])]
    )


def test_the_navigation_has_every_page_once():
    pages = list_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    here = [page for page in pages if (DOCS / page).exists()]
    assert sorted(here) == sorted(path.name for path in DOCS.glob("*.md"))


def test_the_api_page_has_every_public_name():
    shown = re.findall(r"^::: mtrl\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(set(mtrl.__all__) - {"__version__"})
