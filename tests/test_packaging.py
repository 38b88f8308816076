"""An installation contains every imported library and every file next to the code."""

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sources import ROOT, SOURCES, nodes, parse

from mtrl.utils.embedded_models import MODELS, NOT_INSTALLED, UNMADE

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MOST_BYTES = 3_000_000
DISTRIBUTIONS = {
    "PIL": "pillow",
    "yaml": "pyyaml",
    "mlflow": "mlflow-skinny",
}  # where a module is called otherwise than its distribution


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s\[<>=!~;]", requirement)[0].lower() for requirement in requirements}


CORE = names(PROJECT["project"]["dependencies"])
EXTRAS = names(
    [name for extra, found in PROJECT["project"]["optional-dependencies"].items() if extra != "dev" for name in found]
)


def imported(module: str) -> set[tuple[str, bool]]:
    """Distributions that a module imports, and whether at its top, where the import always happens."""
    at_top, found = set(parse(module).body), set()
    for node in nodes(module):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        roots = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"mtrl"}
        found |= {(DISTRIBUTIONS.get(root, root.replace("_", "-").lower()), node in at_top) for root in roots}
    return found


def test_imported_libraries_are_declared():
    """A library of an extra may only be imported where it is requested: in a function, or in a module that is."""
    tops = [node for module in SOURCES for node in parse(module).body if isinstance(node, ast.ImportFrom)]
    at_top = {name for node in tops for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))}
    for module in SOURCES:
        distributions = imported(module)
        undeclared = {name for name, _ in distributions} - CORE - EXTRAS
        assert not undeclared, f"{module} imports {undeclared}, which pyproject.toml does not declare"
        needed = {name for name, is_at_top in distributions if is_at_top} - CORE
        assert not needed or module not in at_top, f"{module}: {needed} of an extra would be needed by everybody"


def test_declared_libraries_are_imported():
    unused = CORE - {name for module in SOURCES for name, _ in imported(module)}
    assert not unused


def test_every_file_next_to_the_code_is_packaged():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["mtrl"]
    packaged = {path for pattern in patterns for path in (ROOT / "mtrl").glob(pattern)}
    files = {path for path in (ROOT / "mtrl").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files - set(SOURCES.values()) <= packaged


def test_every_file_of_the_embedded_models_is_packaged():
    folder = ROOT / "embedded" / "mtrl_embedded"
    patterns = tomllib.loads((ROOT / "embedded/pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {path for pattern in patterns["mtrl_embedded"] for path in folder.glob(pattern)}
    files = {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files == packaged | {folder / "__init__.py"}
    assert {path.parent.name for path in files if path.suffix == ".safetensors"} == {*MODELS} - {*UNMADE}


def test_the_wheel_stays_small():
    """It is a compressed archive of the folder: weights belong into a package of their own."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (ROOT / "mtrl").rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path)
    assert len(packed.getvalue()) < MOST_BYTES


@pytest.mark.slow  # a minute
def test_the_wheels_are_complete(tmp_path):
    """Both are built and unpacked. There the package finds its files, and trains once the second is there too."""
    sources, wheels, site = tmp_path / "sources", tmp_path / "wheels", tmp_path / "site"
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for name in ("mtrl", "embedded"):
        built = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        shutil.copytree(ROOT / name, sources / name, ignore=built)

    def install(project: Path) -> Path:
        build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(project)]
        subprocess.run([sys.executable, "-m", *build], check=True, capture_output=True)
        wheel = max(wheels.glob("*.whl"), key=lambda path: path.stat().st_mtime)
        zipfile.ZipFile(wheel).extractall(site)
        return wheel

    def mtrl(*words: str) -> subprocess.CompletedProcess[str]:
        alone = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
        start = f"{alone}sys.path.insert(0, {str(site)!r}); from mtrl.cli import main; sys.exit(main(sys.argv[1:]))"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, "-c", start, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert install(sources).stat().st_size < MOST_BYTES
    assert "experiments/zoo/dapo.yaml" in mtrl("config", "--list").stdout
    small = (
        "training.max_steps=1", "training.val_before_train=false", "training.val_freq=-1",
        "dataset.rollout_batch_size=2", "worker.actor.global_batch_size=2", "worker.rollout.n=2",
    )  # fmt: skip
    missing = mtrl("train", *small)
    assert missing.returncode == 2 and NOT_INSTALLED in missing.stderr
    install(sources / "embedded")
    assert mtrl("train", *small).returncode == 0


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_images_copy_files_and_install_extras_that_exist(name):
    """They are linted but not built here (docker/)."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    copied = {file for line in re.findall(r"(?m)^COPY (.*) \S+$", text) for file in line.split()}
    assert {"mtrl", "embedded", "pyproject.toml"} <= copied and all((ROOT / file).exists() for file in copied)
    assert copied <= set(re.findall(r"(?m)^!(.*)", (ROOT / ".dockerignore").read_text()))
    (extras,) = re.findall(r"\.\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    pinned = set(re.findall(r"torch==\S+", text))
    assert pinned <= set((ROOT / "constraints.txt").read_text().splitlines())


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["project"]["version"], PROJECT["project"]["license"])
    assert citation["keywords"] == PROJECT["project"]["keywords"]


FREE = {"mtrl", "setuptools", "fastapi"}  # fastapi: vLLM needs an older one


def test_everything_that_setup_installs_has_a_pinned_version():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    assert not required("mtrl", frozenset({"dev"})) - pinned - FREE, "add them to constraints.txt"


@cache
def required(name: str, extras: frozenset[str] = frozenset()) -> frozenset[str]:
    """A distribution and all that it needs, as far as they are installed."""
    found = {canonicalize_name(name)}
    with suppress(PackageNotFoundError):
        for text in requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": each}) for each in (*extras, "")):
                inner = frozenset(needed.extras)
                found |= required(needed.name, inner) if (needed.name, inner) != (name, extras) else set()
        return frozenset(found)
    return frozenset()


def test_libraries_with_known_holes_are_not_accepted():
    assert {"jinja2>=3.1.6", "pillow>=12.1.1"} <= set(PROJECT["project"]["dependencies"])
