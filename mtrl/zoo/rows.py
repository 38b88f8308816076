"""The embedded task as a data source: rows made when they are asked for, the same for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrl.zoo.task import Split, make_question, row

SIZES: dict[Split, int] = {"train": 2000, "validation": 200, "test": 1000}
MODEL_DIRECTORY = Path(__file__).parent / "model"
CONFIG_FILE = Path(__file__).parent / "zoo.yaml"
TASK_VERSION = 1  # raise it when the same index gives another question


class ZooRows:
    """One split of the embedded task."""

    directory = Path(".")

    def __init__(self, split: Split) -> None:
        if split not in SIZES:
            raise ValueError(f"the embedded task has no split {split!r}; it has {', '.join(SIZES)}")
        self.split: Split = split
        self.name = f"embedded task, {split}"
        self.fingerprint = f"zoo{TASK_VERSION}-{split}"
        self.stamp = [self.fingerprint, SIZES[split]]

    def __len__(self) -> int:
        return SIZES[self.split]

    def read(self, index: int) -> dict[str, Any]:
        return row(make_question(self.split, index))

    def row_number(self, index: int) -> int:
        return index + 1
