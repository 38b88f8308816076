"""A few real rows on the whole way, from file to tokens: what `mtrl doctor` tries before it says that a run can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mtrl.data.cache import DiskCache
from mtrl.data.columns import with_known_columns
from mtrl.data.dataset import scan_dataset
from mtrl.data.missing import Noted, has_truth, no_truth
from mtrl.data.row_settings import BadRow, DataSettings
from mtrl.data.sampler import PromptLoader
from mtrl.data.sources import DataSource
from mtrl.protocols import PromptEncoder

MOST_FILES = 8  # of a directory with more, the first ones are tried


class SomeRows:
    """The first, the middle and the last row of a source."""

    stamp = None  # three rows need no cache

    def __init__(self, source: DataSource) -> None:
        self.source, self.rows = source, sorted({0, len(source) // 2, len(source) - 1})
        self.name, self.fingerprint, self.directory = source.name, source.fingerprint, source.directory

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> dict[str, Any]:
        return self.source.read(self.rows[index])

    def row_number(self, index: int) -> int:
        return self.source.row_number(self.rows[index])


class TriedRows(NamedTuple):
    rows: int
    problems: list[str]  # the run would be refused
    notes: list[str]  # it would go on without these


def try_rows(
    sources: Sequence[DataSource], settings: DataSettings, encoder: PromptEncoder | None, truth_for: Sequence[str] = ()
) -> TriedRows:
    """Reads, templates and, where there is an encoder, encodes; the pixels too."""
    named = with_known_columns([source for source in sources if len(source)][:MOST_FILES], settings, DiskCache())
    dataset = scan_dataset([SomeRows(source) for source in named], settings, encoder, workers=1)
    bad = [str(row) for row in dataset.bad_rows]
    if encoder is not None:
        loader = PromptLoader(dataset, encoder)
        bad += [str(found) for found in map(loader.load, range(len(dataset))) if isinstance(found, BadRow)]
    missing = Noted(dataset.sources, dataset.scans, dataset.builder).missing()
    if truth_for and not has_truth(named, settings):
        missing.append(no_truth(named, settings, truth_for))
    refused = [(bad, settings.on_bad_row != "skip"), (missing, settings.on_missing == "error")]
    problems = [line for lines, ends in refused for line in lines if ends]
    notes = [line for lines, ends in refused for line in lines if not ends]
    return TriedRows(dataset.counts.total, problems, notes)
