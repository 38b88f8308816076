"""The package's modules, each read and parsed once for all tests of the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted((ROOT / "mtrl").rglob("*.py"))}


@cache
def read(module: str) -> str:
    return SOURCES[module].read_text()


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(read(module))


@cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(parse(module)))


def count_lines(module: str) -> int:
    return len(read(module).splitlines())
