"""What an installation gets: every library that is imported, and every file beside the code."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted((ROOT / "mtrl").rglob("*.py"))
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


def imported(path: Path) -> set[tuple[str, bool]]:
    """Distributions that a file imports, and whether at its top, where the import happens in any case."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            modules = [word.value for word in node.args if isinstance(word, ast.Constant)]
        roots = {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"mtrl"}
        found |= {(DISTRIBUTIONS.get(root, root.replace("_", "-").lower()), node in tree.body) for root in roots}
    return found


def imported_at_top_by_another(path: Path) -> bool:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    tops = [node for source in SOURCES for node in ast.parse(source.read_text()).body]
    froms = [node for node in tops if isinstance(node, ast.ImportFrom)]
    return any(module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)) for node in froms)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_is_imported_is_declared(path):
    """A library of an extra may only be imported where it is asked for: in a function, or in a module that is."""
    found = imported(path)
    assert {name for name, _ in found} <= CORE | EXTRAS, "a dependency that pyproject.toml does not declare"
    needed = {name for name, at_top in found if at_top} - CORE
    assert not needed or not imported_at_top_by_another(path), f"{needed} of an extra would be needed by everybody"


def test_what_is_declared_is_imported():
    unused = CORE - {name for path in SOURCES for name, _ in imported(path)}
    assert not unused


def test_every_file_beside_the_code_is_packaged():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["mtrl"]
    packaged = {path for pattern in patterns for path in (ROOT / "mtrl").glob(pattern)}
    files = {path for path in (ROOT / "mtrl").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files - set(SOURCES) <= packaged
