"""Which responses a list shows: of a range of steps, filtered and sorted by their numbers, a page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from mtrl.tracking.blocks import DamagedRecord
from mtrl.view.rollout_store import SORTED_BY, Json, RolloutStore

MOST_ROWS = 200  # of a page


@dataclass(frozen=True)
class Query:
    first: int | None = None  # steps; None: from the beginning, to the end
    last: int | None = None
    sort: str = "step"  # or one of SORTED_BY
    descending: bool = False
    least: Mapping[str, float] = field(default_factory=dict)  # of a number, by name
    most: Mapping[str, float] = field(default_factory=dict)
    page: int = 0
    size: int = 50

    def __post_init__(self) -> None:
        if self.sort != "step" and self.sort not in SORTED_BY:
            raise ValueError(f"sort: one of step, {', '.join(SORTED_BY)}")
        if not 1 <= self.size <= MOST_ROWS or self.page < 0:
            raise ValueError(f"size: 1 to {MOST_ROWS}; page: 0 or more")


def select(book: RolloutStore, query: Query) -> Json:
    """{"total", "rows"}: how many responses there are, and the rows of the page."""
    steps, places, keys = gather(book, query)
    order = np.arange(len(steps))
    if query.sort != "step":
        known = ~np.isnan(keys)
        by_key = np.argsort(-keys[known] if query.descending else keys[known], kind="stable")
        order = np.concatenate([order[known][by_key], order[~known]])  # what has no such number comes last
    elif query.descending:
        order = np.lexsort((places, -steps))
    shown = order[query.page * query.size : (query.page + 1) * query.size]
    chosen = [(int(steps[i]), int(places[i])) for i in shown]
    return {"total": len(order), "page": query.page, "size": query.size, "rows": query_rows(book, chosen)}


def gather(book: RolloutStore, query: Query) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(step, place, number to sort by) of every response that passes the filters."""
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for step, count in list(book.steps().items()):
        if (query.first is not None and step < query.first) or (query.last is not None and step > query.last):
            continue
        if query.sort == "step" and not query.least and not query.most:
            found.append((np.full(count, step), np.arange(count), np.zeros(count)))
            continue
        try:
            page = book.page(step)
        except (DamagedRecord, KeyError, OSError):
            continue  # the book says so
        passes = np.ones(page.count, dtype=bool)
        absent = np.full(page.count, np.nan)
        for name, bound in query.least.items():
            passes &= page.numbers.get(name, absent) >= bound
        for name, bound in query.most.items():
            passes &= page.numbers.get(name, absent) <= bound
        (places,) = passes.nonzero()
        keys = page.numbers.get(query.sort, absent)[places]
        found.append((np.full(len(places), step), places, keys))
    if not found:
        return np.zeros(0, dtype=int), np.zeros(0, dtype=int), np.zeros(0)
    steps, places, keys = (np.concatenate(column) for column in zip(*found, strict=True))
    return steps, places, keys


def query_rows(book: RolloutStore, chosen: Sequence[tuple[int, int]]) -> list[Json]:
    """Their rows, in this order; each step is opened once."""
    rows: dict[tuple[int, int], Json] = {}
    for step, group in groupby(sorted(chosen), key=lambda each: each[0]):
        places = [place for _, place in group]
        try:
            rows |= {(step, place): row for place, row in zip(places, book.rows(step, places), strict=True)}
        except (DamagedRecord, KeyError, OSError):
            continue
    return [rows[each] for each in chosen if each in rows]
