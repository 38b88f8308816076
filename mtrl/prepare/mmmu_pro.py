"""MMMU-Pro: the same 1,730 questions with 4 options, with 10, and as pictures of the page.

Options are a list written as text. `<image 1>` to `<image 7>` stand in questions and in options, each for a column. The
configuration `vision` has no text: question and options are in its one picture, so no options are written out either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtrl.data.row_settings import RowError
from mtrl.prepare.questions import Head, SourceQuestion, TableReader
from mtrl.prepare.tables import Table, open_table, want_columns
from mtrl.prepare.texts import checked_options, option_letter, option_list, place_marks

NAME, HUB, SPLIT = "mmmu-pro", "MMMU/MMMU_Pro", "test"
CONFIGS = {"4": "standard (4 options)", "10": "standard (10 options)", "vision": "vision"}
IMAGES = tuple(f"image_{number}" for number in range(1, 8))
VISION_PROMPT = "<image>Answer the question in the image."


def reader(where: str, split: str, variants: Sequence[str]) -> TableReader:
    tables = []
    for variant in variants:
        table = open_table(where, split, CONFIGS[variant])
        text = ("id", "options", "answer") if variant == "vision" else ("id", "question", "options", "answer")
        images = ("image",) if variant == "vision" else IMAGES
        want_columns(table, (*text, *images[:1]), f"MMMU-Pro ({CONFIGS[variant]})")
        found = tuple(column for column in images if column in table.columns)
        tables.append((table, Converter(table, variant, text, found)))
    return TableReader(NAME, tables)


@dataclass(frozen=True)
class Converter:
    table: Table
    variant: str
    text: tuple[str, ...]
    images: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.text, *self.images)

    def key(self, row: dict[str, Any], number: int) -> str:
        return str(row["id"])

    def head(self, row: dict[str, Any], number: int) -> Head:
        option_letter(row["answer"], checked_options(option_list(row["options"])))
        key = self.key(row, number)
        return Head(key, f"{NAME}-{self.variant}/{key}", f"{NAME}/{key}")

    def question(self, row: dict[str, Any], number: int) -> SourceQuestion:
        head, options = self.head(row, number), option_list(row["options"])
        answer, source = option_letter(row["answer"], options), f"{NAME}-{self.variant}"
        images = {at: row[column] for at, column in enumerate(self.images, 1) if row[column] is not None}
        if not images:
            raise RowError("it has no image")
        if self.variant == "vision":
            shown = list(images.values())
            return SourceQuestion(
                head.id, head.question, VISION_PROMPT, answer, None, shown, source, self.table.directory
            )
        prompt, options, shown = place_marks(str(row["question"]).strip(), options, images)
        return SourceQuestion(head.id, head.question, prompt, answer, options, shown, source, self.table.directory)
