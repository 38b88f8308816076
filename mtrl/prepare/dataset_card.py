"""The card of a prepared dataset: its contents, the rows left out and why, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtrl.prepare.shards import SKIPPED, Journal

SCHEMA_NOTE = """## Columns

| | |
|---|---|
| `id` | of the row |
| `question_id` | of the question: rows with the same one ask the same and are never in two splits |
| `prompt` | the question, with `<image>` for each image; options may contain it too |
| `answer` | the letter of the right option |
| `options` | in the order of their letters; null if they are only in the picture |
| `images` | `bytes`, or a `path` relative to the folder of the shard, in the order of the marks |
| `source` | the dataset of the row |

The prompt does not list the options: a format prompt does (`dataset.format_prompt`), as in the experiments."""


def render_card(title: str, journal: Journal, left_out: Mapping[str, int], questions: int, notes: list[str]) -> str:
    counts, settings = journal.counts, journal.settings
    splits = sorted(counts["rows"])
    head = ["---", "configs:", "- config_name: default", "  data_files:"]
    head += [line for split in splits for line in (f"  - split: {split}", f"    path: {split}/*.parquet")]
    lines = [*head, "---", "", f"# {title}", ""]
    lines += [f"{sum(counts['rows'].values()):,} rows of {questions:,} questions, prepared by `mtrl prepare`.", ""]
    lines += [*notes, ""] if notes else []
    sources = sorted({key.partition("/")[2] for key in counts["sources"]})
    lines += [f"| source | {' | '.join(splits)} |", f"|---|{'---|' * len(splits)}"]
    for source in sources:
        cells = (f"{counts['sources'].get(f'{split}/{source}', 0):,}" for split in splits)
        lines.append(f"| {source} | {' | '.join(cells)} |")
    lines += ["", "| source | options: rows | images: rows |", "|---|---|---|"]
    for source in sources:
        lines.append(f"| {source} | {_histogram(counts['options'], source)} | {_histogram(counts['images'], source)} |")
    lines += ["", "![samples](samples.png)", "", "## Left out", ""]
    reasons = [f"- {count:,} rows: {reason}" for reason, count in sorted(left_out.items())]
    reasons += [f"- {count:,} rows (listed in `{SKIPPED}`): {why}" for why, count in sorted(counts["skipped"].items())]
    lines += [*(reasons or ["Nothing."]), "", SCHEMA_NOTE, "", "## How it was made", ""]
    lines += [f"- {key}: {_format_value(value)}" for key, value in settings.items() if key not in ("stamp", "version")]
    lines += ["", "The rows are those of the datasets named above, under their licenses.", ""]
    return "\n".join(lines)


def _histogram(counts: Mapping[str, int], source: str) -> str:
    """
    >>> _histogram({"a/4": 3, "a/10": 1, "b/2": 7}, "a")
    '4: 3, 10: 1'
    """
    values = [(key.rpartition("/")[2], count) for key, count in counts.items() if key.rpartition("/")[0] == source]
    values.sort(key=lambda each: (not each[0].isdigit(), int(each[0]) if each[0].isdigit() else 0))
    return ", ".join(f"{value}: {count:,}" for value, count in values)


def _format_value(value: Any) -> str:
    return "-" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
