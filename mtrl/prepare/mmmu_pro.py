"""MMMU-Pro: the same 1,730 questions with 4 options, with 10, and as pictures of the page.

Options are a list written as text. `<image 1>` to `<image 7>` in questions and options each refer to a column. The
configuration `vision` has no text: question and options are in its one picture, so the output has no options either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtrl.data.row_settings import RowError
from mtrl.prepare.questions import DatasetConverter, RowHeader, SourceQuestion, TableReader
from mtrl.prepare.tables import check_columns, open_table
from mtrl.prepare.texts import check_options, option_letter, parse_options, place_marks

NAME, HUB, SPLIT = "mmmu-pro", "MMMU/MMMU_Pro", "test"
CONFIGS = {"4": "standard (4 options)", "10": "standard (10 options)", "vision": "vision"}
IMAGES = tuple(f"image_{number}" for number in range(1, 8))
VISION_PROMPT = "<image>Answer the question in the image."


def open_reader(source: str, split: str, variants: Sequence[str]) -> TableReader:
    converters = []
    for variant in variants:
        table = open_table(source, split, CONFIGS[variant])
        text = ("id", "options", "answer") if variant == "vision" else ("id", "question", "options", "answer")
        images = ("image",) if variant == "vision" else IMAGES
        check_columns(table, (*text, *images[:1]), f"MMMU-Pro ({CONFIGS[variant]})")
        images = tuple(column for column in images if column in table.columns)
        converters.append(MmmuProConverter(table, text, images, variant))
    return TableReader(NAME, converters)


@dataclass(frozen=True)
class MmmuProConverter(DatasetConverter):
    variant: str

    def key(self, row: dict[str, Any], number: int) -> str:
        return str(row["id"])

    def header(self, row: dict[str, Any], number: int) -> RowHeader:
        option_letter(row["answer"], check_options(parse_options(row["options"])))
        key = self.key(row, number)
        return RowHeader(key, f"{NAME}-{self.variant}/{key}", f"{NAME}/{key}")

    def question(self, row: dict[str, Any], number: int) -> SourceQuestion:
        header, source, directory = self.header(row, number), f"{NAME}-{self.variant}", self.table.directory
        options = parse_options(row["options"])
        answer = option_letter(row["answer"], options)
        images = {i: row[column] for i, column in enumerate(self.image_columns, 1) if row[column] is not None}
        if not images:
            raise RowError("it has no image")
        prompt, shown = VISION_PROMPT, list(images.values())
        if self.variant != "vision":
            prompt, options, shown = place_marks(str(row["question"]).strip(), options, images)
        listed = None if self.variant == "vision" else options
        return SourceQuestion(header.id, header.question, prompt, answer, listed, shown, source, directory)
