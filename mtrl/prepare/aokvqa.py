"""A-OKVQA: as HuggingFaceM4/A-OKVQA holds it, with its images; or the authors' JSON beside the images of COCO 2017."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.prepare.questions import Head, SourceQuestion, TableReader
from mtrl.prepare.tables import Table, open_table, want_columns
from mtrl.prepare.texts import checked_options, option_letter, option_list

NAME, HUB, SPLIT = "aokvqa", "HuggingFaceM4/A-OKVQA", "train"
TEXT = ("question_id", "question", "choices", "correct_choice_idx")
COCO = {"train": "train2017", "val": "val2017", "validation": "val2017", "test": "test2017"}


def reader(where: str, split: str, image_dir: str | None = None) -> TableReader:
    folder = Path(where).expanduser()
    annotations = folder / f"aokvqa_v1p0_{'val' if split == 'validation' else split}.json"
    table = open_table(str(annotations) if annotations.is_file() else where, split)
    by_number = "image" not in table.columns and "image_id" in table.columns
    image = "image_id" if by_number else "image"
    want_columns(table, (*TEXT, image), "A-OKVQA")
    directory = Path(image_dir).expanduser() if image_dir else table.directory
    return TableReader(NAME, [(table, Converter(table, image, directory, COCO.get(split, split)))])


@dataclass(frozen=True)
class Converter:
    table: Table
    image: str  # the column: images themselves, or numbers of COCO
    directory: Path
    coco: str  # the folder of the split in COCO

    text = TEXT

    @property
    def columns(self) -> tuple[str, ...]:
        return (*TEXT, self.image)

    def key(self, row: dict[str, Any], number: int) -> str:
        return str(row["question_id"])

    def head(self, row: dict[str, Any], number: int) -> Head:
        options = checked_options(option_list(row["choices"]))
        option_letter(row["correct_choice_idx"], options)
        key = self.key(row, number)
        return Head(key, f"{NAME}/{key}", f"{NAME}/{key}")

    def question(self, row: dict[str, Any], number: int) -> SourceQuestion:
        head, options = self.head(row, number), option_list(row["choices"])
        answer = option_letter(row["correct_choice_idx"], options)
        prompt = f"<image>{str(row['question']).strip()}"
        image = row["image"] if self.image == "image" else self._coco_path(row["image_id"])
        return SourceQuestion(head.id, head.question, prompt, answer, options, [image], NAME, self.directory)

    def _coco_path(self, number: Any) -> str:
        name = f"{int(number):012d}.jpg"
        return name if (self.directory / name).exists() else f"{self.coco}/{name}"
