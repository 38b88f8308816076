"""Read, template and encode a few real rows, as `mtrl doctor` does before a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mtrl.data.cache import DiskCache
from mtrl.data.columns import apply_column_aliases
from mtrl.data.dataset import scan_dataset
from mtrl.data.missing import ScanNotes, has_answers, missing_answers_message
from mtrl.data.row_settings import BadRow, DataSettings, DataSource
from mtrl.data.sampler import PromptLoader
from mtrl.protocols import PromptEncoder

MAX_FILES = 8  # only the first files of a larger directory are checked


class SampleRows(DataSource):
    """The first, the middle and the last row of a source."""

    stamp = None  # no cache for three rows

    def __init__(self, source: DataSource) -> None:
        self.source, self.rows = source, sorted({0, len(source) // 2, len(source) - 1})
        self.name, self.fingerprint, self.directory = source.name, source.fingerprint, source.directory

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> dict[str, Any]:
        return self.source.read(self.rows[index])

    def row_number(self, index: int) -> int:
        return self.source.row_number(self.rows[index])


class RowCheck(NamedTuple):
    rows: int
    problems: list[str]  # the run would not start
    notes: list[str]  # the run would start without these


def check_sample_rows(
    sources: Sequence[DataSource],
    settings: DataSettings,
    encoder: PromptEncoder | None,
    answer_rewards: Sequence[str] = (),
) -> RowCheck:
    """Check rows of each source; with an encoder, also decode and encode them."""
    named = apply_column_aliases([source for source in sources if len(source)][:MAX_FILES], settings, DiskCache())
    dataset = scan_dataset([SampleRows(source) for source in named], settings, encoder, workers=1)
    bad = [str(row) for row in dataset.bad_rows]
    if encoder is not None:
        loader = PromptLoader(dataset, encoder)
        bad += [str(result) for result in map(loader.load, range(len(dataset))) if isinstance(result, BadRow)]
    missing = ScanNotes(dataset.sources, dataset.scans, dataset.builder).missing()
    if answer_rewards and not has_answers(named, settings):
        missing.append(missing_answers_message(named, settings, answer_rewards))
    problems: list[str] = []
    notes: list[str] = []
    for messages, is_error in ((bad, settings.on_bad_row != "skip"), (missing, settings.on_missing == "error")):
        (problems if is_error else notes).extend(messages)
    return RowCheck(dataset.counts.total, problems, notes)
