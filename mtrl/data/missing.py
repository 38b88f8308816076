"""What rows hold and nobody reads, or lack and a reward wants: said at the scan, before a run learns without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtrl.data.columns import image_column, is_truth, reach
from mtrl.data.lengths import BESIDE, MARKED, UNREAD, SourceScan
from mtrl.data.prompts import TaskBuilder
from mtrl.data.row_settings import DataSettings, RowError
from mtrl.data.sources import DataSource

GOES_ON = "To go on all the same: dataset.on_missing=warn."


@dataclass(frozen=True)
class Noted:
    """What the scan noted of the rows of a dataset."""

    sources: Sequence[DataSource]
    scans: Sequence[SourceScan]
    builder: TaskBuilder

    def missing(self, truth_for: Sequence[str] = ()) -> list[str]:
        """A sentence for each thing that `dataset.on_missing` decides about. `truth_for`: rewards that want a truth."""
        told, total, settings = [], sum(map(len, self.sources)), self.builder.settings
        if found := self._first(UNREAD):
            count, place, column = found
            told.append(
                f"the column {column!r} holds images that nobody reads, in {count} of {total} rows without other "
                f"images ({place} is the first); set dataset.image_key={column}"
            )
        if found := self._first(MARKED):
            count, place, _ = found
            told.append(
                f"{count} of {total} prompts have an <image> or <video> that is taken for text, since their rows hold "
                f"no medium ({place} is the first); set dataset.image_key to the column of the images"
            )
        if truth_for and not has_truth(self.sources, settings):
            told.append(no_truth(self.sources, settings, truth_for))
        return told

    def beside(self) -> str | None:
        """Images beside those that are read are no fault, since a reward may want them; but it is said."""
        found = self._first(BESIDE)
        if found is None:
            return None
        count, _, column = found
        return f"the column {column!r} holds images too, in {count} rows, for the rewards alone (dataset.image_key)"

    def _first(self, what: int) -> tuple[int, str, str | None] | None:
        """How many rows have this note, the first of them, and its column of images."""
        count = sum(int((scan.note == what).sum()) for scan in self.scans)
        for source, scan in zip(self.sources, self.scans, strict=True):
            for row in np.flatnonzero(scan.note == what).tolist():
                task = self.builder.build(source, row)
                return count, task.origin, image_column(task.columns or {})
        return None


def has_truth(sources: Sequence[DataSource], settings: DataSettings) -> bool:
    """Whether some row has one; most often the first does, so little is read."""
    for source in sources:
        for index in range(len(source)):
            try:
                row = source.read(index)
            except RowError:
                continue
            if is_truth(reach(row, settings.answer_key)) or is_truth(row.get("label_idx")):
                return True
    return False


def no_truth(sources: Sequence[DataSource], settings: DataSettings, truth_for: Sequence[str]) -> str:
    wanting = " and ".join(truth_for)
    try:
        names = ", ".join(sorted(map(str, sources[0].read(0))))
    except (RowError, IndexError):
        names = "none that can be read"
    return (
        f"no row has an answer in the column {settings.answer_key!r}, and the reward {wanting} wants one; set "
        f"dataset.answer_key to the column that holds it (the first row has {names}), or take other rewards"
    )
