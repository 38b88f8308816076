"""Pairwise covers: a few combinations of several dimensions in which every pair of values occurs.

The modules of a folder marked `pytestmark = pytest.mark.pairwise("family", "route")` form one product. Its dimensions
are the tests, the named parameters, which tests share, and any other parameter of a single test. Each pair of values
that occurs in the product is run at least once. `pytest --every-combination` runs the whole product.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

Cell = tuple[Hashable, Hashable]  # a dimension and its value


def cover(rows: Sequence[Sequence[Cell]]) -> list[int]:
    """Indices of rows, in order, that together hold every pair of cells that occurs in a row; greedy, deterministic."""
    pairs = [set(combinations(sorted(row, key=repr), 2)) or {tuple(row)} for row in rows]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def cells(item: Any, shared: Sequence[str]) -> list[Cell]:
    """The cells of a test. Shared values are compared by their repr, other values by identity."""
    test, values = item.nodeid.partition("[")[0], item.callspec.params if hasattr(item, "callspec") else {}
    own = ((name, repr(value)) if name in shared else ((test, name), id(value)) for name, value in values.items())
    return [("test", test), *own]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-combination", action="store_true", help="run whole products instead of pairwise covers")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pairwise(*names): run a pairwise cover of tests and parameters (pairwise.py)")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--every-combination"):
        return
    products: dict[tuple[Path, tuple[str, ...]], list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("pairwise"):
            products.setdefault((item.path.parent, mark.args), []).append(item)
    deselected = set()
    for (_, shared), tests in products.items():
        deselected |= set(tests) - {tests[index] for index in cover([cells(item, shared) for item in tests])}
    if deselected:
        config.hook.pytest_deselected(items=[item for item in items if item in deselected])
        items[:] = [item for item in items if item not in deselected]
