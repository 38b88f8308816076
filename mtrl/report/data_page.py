"""The report of `mtrl data`: the contents of the files, prompts as the model sees them, and rows that are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
from PIL import Image

from mtrl.data.arrow import ArrowRows, GroupedRows
from mtrl.data.cache import DiskCache
from mtrl.data.columns import RenamedColumns, inspect_columns
from mtrl.data.dataset import Dataset, scan_dataset
from mtrl.data.lengths import GOOD
from mtrl.data.media import WITH_ARTICLE, limit_side
from mtrl.data.missing import ScanNotes
from mtrl.data.row_settings import BadRow, DataSettings, DataSource, RowError, group_by_cause
from mtrl.data.sampler import PromptLoader
from mtrl.data.sources import JsonlSource, RowList
from mtrl.data.tars import TarRows
from mtrl.data.video import target_sizes
from mtrl.protocols import PromptEncoder
from mtrl.report.markdown_text import shorten
from mtrl.types import VISION_POOL, Prompt, Task, content_text

SAMPLES = 3
CONTAINERS: dict[type, str] = {
    JsonlSource: "JSONL",
    GroupedRows: "Parquet",
    ArrowRows: "Arrow, as datasets saves it",
    TarRows: "WebDataset",
    RowList: "a list",
}
COLUMN_ROWS = 100  # rows of each source that are read for the column types
VALUE_CHARS = 100  # shown of an answer or another column


class ReadableEncoder(PromptEncoder, Protocol):
    """An encoder that can also return its text."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str: ...

    def decode_tokens(self, ids: Sequence[int]) -> list[str]: ...


def run(
    data: str | Sequence[DataSource],
    settings: DataSettings,
    encoder: ReadableEncoder | None,
    stream: TextIO,
    *,
    cache_dir: Path | None = None,
    answer_rewards: Sequence[str] = (),
) -> int:
    """Print the report. Return 0 if every row can be used, 1 if some cannot or a run would refuse the data."""
    dataset = scan_dataset(data, settings, encoder, cache_dir=cache_dir)
    missing = ScanNotes(dataset.sources, dataset.scans, dataset.builder).missing(answer_rewards)
    prompts = _samples(dataset, encoder)
    sections = [
        _files(dataset),
        _formats(dataset.sources, DiskCache(cache_dir)),
        _columns(dataset.sources),
        _lengths(dataset, encoder),
        _images(dataset, encoder, prompts),
        _videos(dataset),
        _bad_rows(dataset),
        ["Missing", *(f"  {line}" for line in missing)] if missing else [],
        *(_sample(number, sample, encoder) for number, sample in enumerate(prompts, 1)),
    ]
    print("\n\n".join("\n".join(section) for section in sections if section), file=stream)
    return 1 if dataset.bad_rows or (missing and settings.on_missing == "error") else 0


def _files(dataset: Dataset) -> list[str]:
    counts, settings = dataset.counts, dataset.settings
    lines = ["Rows", *(f"  {len(source):>9,}  {source.name}" for source in dataset.sources)]
    lines += [f"  {counts.total:>9,}  in all", f"  {counts.used:>9,}  to train on"]
    if counts.bad:
        lines.append(f"  {counts.bad:>9,}  cannot be used (below)")
    limit = settings.max_image_side or 0
    for kind, name in WITH_ARTICLE.items() if counts.too_big else ():
        if rows := sum(len(scan.rows_over(limit, kind)) for scan in dataset.scans):
            lines.append(f"  {rows:>9,}  left out: {name} over dataset.max_image_side={limit}")
    return lines


def _formats(sources: Sequence[DataSource], cache: DiskCache) -> list[str]:
    """One line for each combination of column format and kind of file."""
    formats: Counter[str] = Counter()
    for source in sources:
        source = source.source if isinstance(source, RenamedColumns) else source
        kind = next((name for kind, name in CONTAINERS.items() if isinstance(source, kind)), "rows")
        if isinstance(source, TarRows):
            kind += f" ({', '.join(f'.{field}' for field in source.fields[:8])})"
        formats[f"{inspect_columns(source, cache).format}, in {kind}"] += 1
    several = sum(formats.values()) > 1
    return ["Format", *(f"  {name} ({count} files)" if several else f"  {name}" for name, count in formats.items())]


def _columns(sources: Sequence[DataSource]) -> list[str]:
    types: dict[str, Counter[str]] = {}
    read_as: dict[str, str] = {}
    count = 0
    for source in sources:
        if isinstance(source, RenamedColumns):  # list the columns under their names in the file
            for theirs in source.names.values():
                both = " and ".join(ours for ours, name in source.names.items() if name == theirs)
                read_as[theirs] = f", read as {both}"
            source = source.source
        for index in range(min(len(source), COLUMN_ROWS)):
            try:
                row = source.read(index)
            except RowError:
                continue  # the list of bad rows has it
            count += 1
            for name, value in row.items():
                types.setdefault(str(name), Counter())[_type_name(value)] += 1
    lines = [f"Columns (of the first {count} rows)"]
    for name, kinds in types.items():
        missing = count - sum(kinds.values())
        absent = f" (not in {missing} rows)" if missing else ""
        lines.append(f"  {name}: {', '.join(kind for kind, _ in kinds.most_common())}{absent}{read_as.pop(name, '')}")
    return [*lines, *(f"  {name}{alias}" for name, alias in read_as.items())]  # fields inside a struct


def _lengths(dataset: Dataset, encoder: ReadableEncoder | None) -> list[str]:
    if encoder is None:
        return ["Prompt lengths", "  need a tokenizer: set worker.actor.model.model_path=<model>"]
    lengths = np.concatenate([scan.length[scan.length >= 0] for scan in dataset.scans])
    settings = dataset.settings
    if not len(lengths):
        return ["Prompt lengths", "  no row could be measured"]
    over = int((lengths > settings.max_prompt_length).sum())
    fate = "left out" if settings.filter_overlong_prompts else "refused (dataset.filter_overlong_prompts is off)"
    return [
        "Prompt lengths (tokens, images and videos expanded)",
        f"  {_spread(lengths)}",
        f"  over dataset.max_prompt_length={settings.max_prompt_length}: {over:,} of {len(lengths):,} "
        f"({over / len(lengths):.1%}), {fate}",
    ]


def _images(dataset: Dataset, encoder: ReadableEncoder | None, prompts: Sequence[Prompt | Task | BadRow]) -> list[str]:
    sizes = [scan.sizes_of("image") for scan in dataset.scans]
    if not any(map(len, sizes)):
        return ["Images", "  none"]
    lines = ["Images", *_sizes(sizes)]
    density = _tokens_per_pixel(prompts)
    if encoder is None or density is None:
        is_mixed = any(isinstance(prompt, Prompt) and prompt.media for prompt in prompts)  # images beside videos
        hint = "  tokens need a vision-language model: set worker.actor.model.model_path=<model>"
        return lines if is_mixed else [*lines, hint]
    usable = np.concatenate(
        [each[scan.state[each[:, 0]] == GOOD] for scan, each in zip(dataset.scans, sizes, strict=True)]
    )
    distinct, times = np.unique(usable[:, 1:3], axis=0, return_counts=True)
    tokens = []
    for height, width in distinct.tolist():
        limited = limit_side((height, width), dataset.settings.max_image_side)
        ((height, width),) = target_sizes(encoder, [limited])
        tokens.append(round(density * height * width))
    return [*lines, f"  tokens  {_spread(np.repeat(tokens, times))}"]


def _videos(dataset: Dataset) -> list[str]:
    sizes = [scan.sizes_of("video") for scan in dataset.scans]
    frames = np.concatenate(sizes)[:, 3]
    return ["Videos", *_sizes(sizes), f"  frames shown  {_spread(frames)}"] if len(frames) else []


def _sizes(by_source: Sequence[np.ndarray]) -> list[str]:
    """The number of media and of their rows, and the spread of their sizes."""
    sizes, rows = np.concatenate(by_source), sum(len(np.unique(each[:, 0])) for each in by_source)
    count = f"  {len(sizes):,} in {rows:,} rows"
    return [count, f"  width   {_spread(sizes[:, 2])}", f"  height  {_spread(sizes[:, 1])}"]


def _tokens_per_pixel(prompts: Sequence[Prompt | Task | BadRow]) -> float | None:
    """Tokens per pixel, from the first encoded image: models see whole numbers of tokens, so one image is enough."""
    for prompt in prompts:
        if isinstance(prompt, Prompt) and prompt.media and all(image.ndim == 3 for image in prompt.media):
            pixels = sum(image.shape[0] * image.shape[1] for image in prompt.media)
            return float((prompt.token_pool == VISION_POOL).sum()) / pixels
    return None


def _bad_rows(dataset: Dataset) -> list[str]:
    if not dataset.bad_rows:
        return ["Bad rows", "  none"]
    return [f"Bad rows ({len(dataset.bad_rows):,})", *(f"  {line}" for line in group_by_cause(dataset.bad_rows))]


def _samples(dataset: Dataset, encoder: ReadableEncoder | None) -> list[Prompt | Task | BadRow]:
    """The first, the middle and the last row; if these have no media, one with media replaces the middle one."""
    if not len(dataset):
        return []
    positions = [0, len(dataset) // 2, len(dataset) - 1]
    visual = np.flatnonzero(dataset.pixels)
    if len(visual) and not dataset.pixels[positions].any():
        positions[1] = int(visual[0])
    loader = PromptLoader(dataset, encoder) if encoder is not None else None
    return [loader.load(index) if loader else dataset.task(index) for index in sorted(set(positions))[:SAMPLES]]


def _sample(number: int, sample: Prompt | Task | BadRow, encoder: ReadableEncoder | None) -> list[str]:
    if isinstance(sample, BadRow):
        return [f"Sample {number}: {sample}"]
    task = sample.task if isinstance(sample, Prompt) else sample
    lines = [f"Sample {number}: {task.origin} (id {task.id})"]
    if isinstance(sample, Prompt):
        assert encoder is not None
        lines += [f"  | {line}" for line in _as_model_sees(sample, encoder).splitlines()]
    else:
        lines += [f"  | {message['role']}: {content_text(message['content'])}" for message in task.messages]
    columns = [("answer", task.answer), *(task.columns or {}).items()]
    return [*lines, *(f"  {name}: {shorten(repr(value), VALUE_CHARS)}" for name, value in columns)]


def _as_model_sees(prompt: Prompt, encoder: ReadableEncoder) -> str:
    """The templated text, with the pads of each medium written as one pad and a count."""
    text = encoder.render(prompt.task.messages)
    vision = (prompt.token_pool == VISION_POOL).tolist()
    if not any(vision):
        return text
    if any(medium.kind == "video" for medium in prompt.task.media):  # timestamps separate its pads
        counted = [(token, len(list(run))) for token, run in groupby(encoder.decode_tokens(prompt.ids.tolist()))]
        return "".join(f"{token} × {count}" if count > 2 else token * count for token, count in counted)
    (pad,) = encoder.decode_tokens([int(prompt.ids[vision.index(True)])])
    runs = "".join("v" if is_vision else " " for is_vision in vision).split()
    first, *rest = text.split(pad)
    return first + "".join(f"{pad} × {len(run)}{piece}" for run, piece in zip(runs, rest, strict=False))


def _type_name(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        inner = sorted({_type_name(item) for item in value})
        return f"list of {' or '.join(inner)}" if inner else "empty list"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(map(str, value))) + "}"
    names = {"NoneType": "null", "str": "text", "int": "number", "float": "number", "bool": "true/false"}
    return "image" if isinstance(value, Image.Image) else names.get(type(value).__name__, type(value).__name__)


def _spread(values: np.ndarray) -> str:
    low, middle, high, most = np.percentile(values, [0, 50, 90, 100])
    return f"min {low:,.0f}   median {middle:,.0f}   p90 {high:,.0f}   max {most:,.0f}"
