"""An installation contains every imported library and every file next to the code."""

import ast
import re
import sys
import tomllib
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sources import ROOT, SOURCES, nodes, parse

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
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
