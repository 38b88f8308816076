"""A-OKVQA: HuggingFaceM4/A-OKVQA with its images, or the authors' JSON with the images of COCO 2017."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.prepare.questions import DatasetConverter, RowHeader, SourceQuestion, TableReader
from mtrl.prepare.tables import check_columns, open_table
from mtrl.prepare.texts import check_options, option_letter, parse_options

NAME, HUB, SPLIT = "aokvqa", "HuggingFaceM4/A-OKVQA", "train"
TEXT = ("question_id", "question", "choices", "correct_choice_idx")
COCO = {"train": "train2017", "val": "val2017", "validation": "val2017", "test": "test2017"}


def open_reader(source: str, split: str, image_dir: str | None = None) -> TableReader:
    annotations = Path(source).expanduser() / f"aokvqa_v1p0_{'val' if split == 'validation' else split}.json"
    table = open_table(str(annotations) if annotations.is_file() else source, split)
    image = "image_id" if "image" not in table.columns and "image_id" in table.columns else "image"
    check_columns(table, (*TEXT, image), "A-OKVQA")
    directory = Path(image_dir).expanduser() if image_dir else table.directory
    return TableReader(NAME, [AokvqaConverter(table, TEXT, (image,), directory, COCO.get(split, split))])


@dataclass(frozen=True)
class AokvqaConverter(DatasetConverter):
    """The image column is `image`, or `image_id` with COCO's image numbers."""

    directory: Path
    coco_folder: str  # the split's folder

    def key(self, row: dict[str, Any], number: int) -> str:
        return str(row["question_id"])

    def header(self, row: dict[str, Any], number: int) -> RowHeader:
        option_letter(row["correct_choice_idx"], check_options(parse_options(row["choices"])))
        key = self.key(row, number)
        return RowHeader(key, f"{NAME}/{key}", f"{NAME}/{key}")

    def question(self, row: dict[str, Any], number: int) -> SourceQuestion:
        header, options = self.header(row, number), parse_options(row["choices"])
        answer = option_letter(row["correct_choice_idx"], options)
        prompt = f"<image>{str(row['question']).strip()}"
        image = row["image"] if self.image_columns == ("image",) else self._coco_path(row["image_id"])
        return SourceQuestion(header.id, header.question, prompt, answer, options, [image], NAME, self.directory)

    def _coco_path(self, number: Any) -> str:
        name = f"{int(number):012d}.jpg"
        return name if (self.directory / name).exists() else f"{self.coco_folder}/{name}"
