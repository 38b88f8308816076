"""Prepared datasets in one, and any others with the default columns: rows of the same question stay together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.data.media import media_list
from mtrl.data.row_settings import DataError
from mtrl.prepare.questions import Head, SourceQuestion, TableReader
from mtrl.prepare.tables import Table, open_table, want_columns
from mtrl.prepare.texts import LeftOut

NAME = "merge"
JOURNAL = ".prepared.json"


def reader(places: Sequence[str]) -> TableReader:
    tables = []
    for place in places:
        name, _, split = place.rpartition("@") if "@" in place and not Path(place).exists() else (place, "", "")
        check_finished(Path(name).expanduser())
        table = open_table(name, split or None)
        want_columns(table, ("prompt", "answer"), "a prepared dataset")
        tables.append((table, Converter(table, Path(name).name)))
    return TableReader(NAME, tables)


def check_finished(folder: Path) -> None:
    journal = folder / JOURNAL
    if journal.is_file() and not json.loads(journal.read_text(encoding="utf-8")).get("complete"):
        raise DataError(f"{folder} was not prepared to its end; give that command again first, it goes on where it was")


@dataclass(frozen=True)
class Converter:
    table: Table
    source: str  # of rows that do not say

    @property
    def text(self) -> tuple[str, ...]:
        names = ("id", "question_id", "prompt", "answer", "options", "source")
        return tuple(name for name in names if name in self.table.columns)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.text, "images") if "images" in self.table.columns else self.text

    def key(self, row: dict[str, Any], number: int) -> str:
        return str(row["id"]) if row.get("id") is not None else f"{self.source}/{number}"

    def head(self, row: dict[str, Any], number: int) -> Head:
        for name in ("prompt", "answer"):
            if not isinstance(row[name], str) or not row[name].strip():
                raise LeftOut(f"it has no {name}")
        key = self.key(row, number)
        return Head(key, key, str(row.get("question_id") or key))

    def question(self, row: dict[str, Any], number: int) -> SourceQuestion:
        head, options, source = self.head(row, number), row.get("options"), row.get("source") or self.source
        images = media_list(row.get("images"))
        return SourceQuestion(
            head.id, head.question, row["prompt"], row["answer"], options, images, source, self.table.directory
        )
