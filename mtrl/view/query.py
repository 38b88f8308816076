"""Queries for lists of responses: a range of steps, filtered, sorted, one page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from mtrl.tracking.blocks import DamagedRecord
from mtrl.view.rollout_store import SORTED_BY, Json, RolloutStore

MAX_ROWS = 200  # rows per page


@dataclass(frozen=True)
class Query:
    first_step: int | None = None  # None: no limit
    last_step: int | None = None
    sort: str = "step"  # or one of SORTED_BY
    descending: bool = False
    minimum: Mapping[str, float] = field(default_factory=dict)  # by name
    maximum: Mapping[str, float] = field(default_factory=dict)
    page: int = 0
    size: int = 50

    def __post_init__(self) -> None:
        if self.sort != "step" and self.sort not in SORTED_BY:
            raise ValueError(f"sort: one of step, {', '.join(SORTED_BY)}")
        if not 1 <= self.size <= MAX_ROWS or self.page < 0:
            raise ValueError(f"size: 1 to {MAX_ROWS}; page: 0 or more")


def select(store: RolloutStore, query: Query) -> Json:
    """The number of matching responses and the rows of the requested page."""
    steps, rows, keys = find_matches(store, query)
    order = np.arange(len(steps))
    if query.sort != "step":
        known = ~np.isnan(keys)
        by_key = np.argsort(-keys[known] if query.descending else keys[known], kind="stable")
        order = np.concatenate([order[known][by_key], order[~known]])  # responses without this number come last
    elif query.descending:
        order = np.lexsort((rows, -steps))
    if query.sort == "step":
        for step in np.unique(steps[order[query.page * query.size : (query.page + 1) * query.size]]):
            (places,) = (steps[order] == step).nonzero()
            has_signal = rows_with_signal(store, int(step))
            order[places] = sorted(order[places], key=lambda i: int(rows[i]) not in has_signal)
    page = order[query.page * query.size : (query.page + 1) * query.size]
    chosen = [(int(steps[i]), int(rows[i])) for i in page]
    return {"total": len(order), "page": query.page, "size": query.size, "rows": read_rows(store, chosen)}


def rows_with_signal(store: RolloutStore, step: int) -> set[int]:
    """The rows of groups whose rewards differ: the others teach nothing, so a step shows them last."""
    try:
        rows = store.rows(step, range(store.steps()[step]))
    except (DamagedRecord, KeyError, OSError):
        return set()
    rewards: dict[Any, set[Any]] = {}
    for row in rows:
        rewards.setdefault(row["group"], set()).add(row.get("reward"))
    return {row["row"] for row in rows if len(rewards[row["group"]]) > 1}


def find_matches(store: RolloutStore, query: Query) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(step, row, sort key) of every response that passes the filters."""
    matches = [(np.zeros(0, dtype=int), np.zeros(0, dtype=int), np.zeros(0))]
    for step, count in list(store.steps().items()):
        before = query.first_step is not None and step < query.first_step
        if before or (query.last_step is not None and step > query.last_step):
            continue
        if query.sort == "step" and not query.minimum and not query.maximum:
            matches.append((np.full(count, step), np.arange(count), np.zeros(count)))
            continue
        try:
            columns = store.columns(step)
        except (DamagedRecord, KeyError, OSError):
            continue  # the store reports it
        passes = np.ones(len(columns["reward"]), dtype=bool)
        for name, bound in query.minimum.items():
            passes &= columns[name] >= bound
        for name, bound in query.maximum.items():
            passes &= columns[name] <= bound
        (rows,) = passes.nonzero()
        keys = np.zeros(len(rows)) if query.sort == "step" else columns[query.sort][rows]
        matches.append((np.full(len(rows), step), rows, keys))
    steps, rows, keys = (np.concatenate(column) for column in zip(*matches, strict=True))
    return steps, rows, keys


def read_rows(store: RolloutStore, chosen: Sequence[tuple[int, int]]) -> list[Json]:
    """The rows of (step, row) pairs in their order; each step is opened once."""
    rows: dict[tuple[int, int], Json] = {}
    for step, pairs in groupby(sorted(chosen), key=lambda pair: pair[0]):
        indices = [row for _, row in pairs]
        try:
            rows |= {(step, row["row"]): row for row in store.rows(step, indices)}
        except (DamagedRecord, KeyError, OSError):
            continue
    return [rows[pair] for pair in chosen if pair in rows]
