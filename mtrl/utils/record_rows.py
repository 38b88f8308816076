"""Rows of records: picking some, and joining records into one.

A record is a frozen dataclass whose tensors and tuples have a row for each response; records may stand inside records.
One that needs more care than that (`Rollouts`, whose rows point at prompts) has `rows` and `join` of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")


def as_index(rows: Tensor) -> Tensor:
    """Row numbers, from row numbers or from a bool for each row."""
    return rows.nonzero().flatten() if rows.dtype == torch.bool else rows


def take_rows(record: Record, index: Tensor) -> Record:
    """The record with every field indexed."""
    index = as_index(index)
    return replace(record, **{f.name: _picked(getattr(record, f.name), index) for f in fields(record)})  # type: ignore


def first_rows(record: Any, count: int) -> Any:
    """So many rows of the record, where it has as many; -1: all."""
    return record.rows(torch.arange(len(record) if count < 0 else min(count, len(record))))


def _picked(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, Mapping):
        return {name: _picked(each, index) for name, each in value.items()}
    if isinstance(value, tuple) and value:
        return tuple(value[i] for i in index.tolist())
    if is_dataclass(value):
        return value.rows(index) if hasattr(value, "rows") else take_rows(value, index)
    return value


def join_rows(records: Sequence[Record]) -> Record:
    """One record of all rows. Narrower tensors are padded with 0 (what stands off the mask is nobody's); a field that
    one of the records lacks, the whole lacks too."""
    columns = {f.name: [getattr(each, f.name) for each in records] for f in fields(records[0])}  # type: ignore[arg-type]
    tensors = next((column for column in columns.values() if isinstance(column[0], Tensor)), [])
    counts = [len(tensor) for tensor in tensors]  # rows of each record
    return replace(records[0], **{name: _joined(column, counts) for name, column in columns.items()})  # type: ignore


def _joined(values: Sequence[Any], counts: Sequence[int]) -> Any:
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, Tensor):
        width = max(value.shape[1] for value in values) if first.ndim > 1 else 0
        return torch.cat([_widened(value, width) for value in values])
    if isinstance(first, Mapping):  # parts of the reward: one that a record does not know applies to none of its rows
        absent = [torch.full((count,), torch.nan) for count in counts]
        names = dict.fromkeys(name for value in values for name in value)
        return {name: torch.cat([v.get(name, nan) for v, nan in zip(values, absent, strict=True)]) for name in names}
    if isinstance(first, tuple):
        return tuple(each for value in values for each in value)
    assert is_dataclass(first), f"cannot join {type(first).__name__}"
    return type(first).join(values) if hasattr(first, "join") else join_rows(values)  # type: ignore[union-attr]


def _widened(value: Tensor, width: int) -> Tensor:
    """The tensor padded with zeros to `width` columns, where it has columns at all."""
    if value.ndim < 2 or value.shape[1] == width:
        return value
    return torch.cat([value, value.new_zeros(len(value), width - value.shape[1], *value.shape[2:])], dim=1)
