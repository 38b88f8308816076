"""Media that no key reads and answers that a reward needs: reported after the scan, before a run trains without
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtrl.data.columns import find_image_column, get_column, is_ground_truth
from mtrl.data.lengths import EXTRA_IMAGES, MARK_AS_TEXT, UNREAD_MEDIA, SourceScan
from mtrl.data.prompts import TaskBuilder
from mtrl.data.row_settings import DataSettings, DataSource, RowError
from mtrl.types import Task

CONTINUE_ANYWAY = "To continue anyway: dataset.on_missing=warn."


@dataclass(frozen=True)
class ScanNotes:
    """The notes of a scan about the rows of a dataset."""

    sources: Sequence[DataSource]
    scans: Sequence[SourceScan]
    builder: TaskBuilder

    def missing(self, answer_rewards: Sequence[str] = ()) -> list[str]:
        """Return a message for each problem that `dataset.on_missing` decides about. `answer_rewards`: rewards that
        need an answer."""
        messages, total, settings = [], sum(map(len, self.sources)), self.builder.settings
        for kind, note in UNREAD_MEDIA.items() if settings.on_unread_media == "error" else ():
            if found := self._find(note):
                count, source, task = found
                column = self.builder.find_unread_media(source, task.columns or {})[kind]
                messages.append(
                    f"{count} of {total} rows have {kind}s that no key reads, and no other media: the column "
                    f"{column!r} of {task.origin} is the first; set dataset.{kind}_key={column}, or "
                    "dataset.on_unread_media=ignore if the prompts do not need them"
                )
        for kind, note in MARK_AS_TEXT.items():
            if found := self._find(note):
                count, _, task = found
                messages.append(
                    f"{count} of {total} prompts have <{kind}> marks that are read as text, since their rows have no "
                    f"media ({task.origin} is the first); set dataset.{kind}_key to the column of the {kind}s"
                )
        if answer_rewards and not has_answers(self.sources, settings):
            messages.append(missing_answers_message(self.sources, settings, answer_rewards))
        return messages

    def extra_images(self) -> str | None:
        """Return a message about images that only rewards can read, which is no error."""
        if (note := self._find(EXTRA_IMAGES)) is None:
            return None
        count, _, task = note
        column = find_image_column(task.columns or {})
        return f"the column {column!r} holds more images, in {count} rows, for the rewards only (dataset.image_key)"

    def _find(self, note: int) -> tuple[int, DataSource, Task] | None:
        """Return the number of rows with this note, and the first of them with its source."""
        rows = [scan.rows_with_note(note) for scan in self.scans]
        for source, noted in zip(self.sources, rows, strict=True):
            if len(noted):
                return sum(map(len, rows)), source, self.builder.build(source, int(noted[0]))
        return None


def has_answers(sources: Sequence[DataSource], settings: DataSettings) -> bool:
    """Whether some row has an answer; usually the first does, so little is read."""
    for source in sources:
        for index in range(len(source)):
            try:
                row = source.read(index)
            except RowError:
                continue
            if is_ground_truth(get_column(row, settings.answer_key)) or is_ground_truth(row.get("label_idx")):
                return True
    return False


def missing_answers_message(
    sources: Sequence[DataSource], settings: DataSettings, answer_rewards: Sequence[str]
) -> str:
    rewards = " and ".join(answer_rewards)
    try:
        names = ", ".join(sorted(map(str, sources[0].read(0))))
    except (RowError, IndexError):
        names = "none that can be read"
    return (
        f"no row has an answer in the column {settings.answer_key!r}, and the reward {rewards} needs one; set "
        f"dataset.answer_key to the column that holds it (the first row has {names}), or use other rewards"
    )
