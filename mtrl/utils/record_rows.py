"""Select rows of records, join records into one, and map their tensors.

A record is a frozen dataclass whose tensors and tuples have one row per response; records may be nested. A record that
needs more care (`Rollouts`, whose rows point at prompts) has its own `rows` and `join`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")


def as_index(rows: Tensor) -> Tensor:
    """Row indices from row indices or from one bool per row."""
    return rows.nonzero().flatten() if rows.dtype == torch.bool else rows


def take_rows(record: Record, index: Tensor) -> Record:
    """The record with every field indexed."""
    index = as_index(index)
    return replace(record, **{f.name: _select(getattr(record, f.name), index) for f in fields(record)})  # type: ignore


def first_rows(record: Any, count: int) -> Any:
    """The first `count` rows of the record, or all it has; -1: all."""
    return record.rows(torch.arange(len(record) if count < 0 else min(count, len(record))))


def _select(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, Mapping):
        return {name: _select(each, index) for name, each in value.items()}
    if isinstance(value, tuple) and value:
        return tuple(value[i] for i in index.tolist())
    if is_dataclass(value):
        return value.rows(index) if hasattr(value, "rows") else take_rows(value, index)
    return value


def map_tensors(record: Record, function: Callable[[Tensor], Tensor]) -> Record:
    """The record with `function` applied to each of its tensors, those of nested records and mappings included."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if isinstance(value, Mapping):
            return {name: convert(each) for name, each in value.items()}
        return map_tensors(value, function) if is_dataclass(value) else value

    return replace(record, **{f.name: convert(getattr(record, f.name)) for f in fields(record)})  # type: ignore


def join_rows(records: Sequence[Record]) -> Record:
    """One record with all rows. Narrower tensors are padded with 0 (nobody reads values off the mask); a field that one
    record lacks is missing in the result."""
    columns = {f.name: [getattr(each, f.name) for each in records] for f in fields(records[0])}  # type: ignore[arg-type]
    with_rows = next((column for column in columns.values() if isinstance(column[0], Tensor)), [()] * len(records))
    counts = [len(values) for values in with_rows]  # rows of each record
    return replace(records[0], **{name: _concatenate(column, counts) for name, column in columns.items()})  # type: ignore


def _concatenate(values: Sequence[Any], counts: Sequence[int]) -> Any:
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, Tensor):
        width = max(value.shape[1] for value in values) if first.ndim > 1 else 0
        return torch.cat([_pad_columns(value, width) for value in values])
    if isinstance(first, Mapping):  # parts of the reward: a part that a record lacks applies to none of its rows
        names = dict.fromkeys(name for value in values for name in value)
        absent = [torch.full((count,), torch.nan) for count in counts]
        columns = {name: [v.get(name, nan) for v, nan in zip(values, absent, strict=True)] for name in names}
        return {name: _concatenate(column, counts) for name, column in columns.items()}
    if isinstance(first, tuple):
        return tuple(each for value in values for each in value)
    assert is_dataclass(first), f"cannot join {type(first).__name__}"
    return type(first).join(values) if hasattr(first, "join") else join_rows(values)  # type: ignore[union-attr]


def _pad_columns(value: Tensor, width: int) -> Tensor:
    """Pad a tensor that has columns with zeros to `width` of them."""
    if value.ndim < 2 or value.shape[1] == width:
        return value
    return torch.cat([value, value.new_zeros(len(value), width - value.shape[1], *value.shape[2:])], dim=1)
