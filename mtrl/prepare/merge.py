"""Merge prepared datasets, and any others with the default columns; rows of the same question stay together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.data.media import media_list
from mtrl.data.row_settings import DataError
from mtrl.prepare.questions import DatasetConverter, RowHeader, SourceQuestion, TableReader
from mtrl.prepare.tables import check_columns, open_table
from mtrl.prepare.texts import SkipRow

NAME = "merge"
JOURNAL = ".prepared.json"
TEXT = ("id", "question_id", "prompt", "answer", "options", "source")


def open_reader(sources: Sequence[str]) -> TableReader:
    converters = []
    for source in sources:
        name, _, split = source.rpartition("@") if "@" in source and not Path(source).exists() else (source, "", "")
        check_complete(Path(name).expanduser())
        table = open_table(name, split or None)
        check_columns(table, ("prompt", "answer"), "a prepared dataset")
        text, images = (tuple(each for each in names if each in table.columns) for names in (TEXT, ("images",)))
        converters.append(MergeConverter(table, text, images, Path(name).name))
    return TableReader(NAME, converters)


def check_complete(folder: Path) -> None:
    journal = folder / JOURNAL
    if journal.is_file() and not json.loads(journal.read_text(encoding="utf-8")).get("complete"):
        raise DataError(f"{folder} is incomplete; run the command that prepares it again first, which resumes it")


@dataclass(frozen=True)
class MergeConverter(DatasetConverter):
    source: str  # for rows that do not name one

    def key(self, row: dict[str, Any], number: int) -> str:
        return str(row["id"]) if row.get("id") is not None else f"{self.source}/{number}"

    def header(self, row: dict[str, Any], number: int) -> RowHeader:
        for name in ("prompt", "answer"):
            if not isinstance(row[name], str) or not row[name].strip():
                raise SkipRow(f"it has no {name}")
        key = self.key(row, number)
        return RowHeader(key, key, str(row.get("question_id") or key))

    def question(self, row: dict[str, Any], number: int) -> SourceQuestion:
        return SourceQuestion(
            id=self.key(row, number),
            question_id=self.header(row, number).question,
            prompt=row["prompt"],
            answer=row["answer"],
            options=row.get("options"),
            images=media_list(row.get("images")),
            source=row.get("source") or self.source,
            directory=self.table.directory,
        )
