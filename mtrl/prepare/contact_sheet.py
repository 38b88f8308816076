"""A sheet of samples: what a person should look at before a run."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from heapq import nsmallest
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
from PIL import Image, ImageDraw, ImageFont

from mtrl.data.cache import replacing
from mtrl.data.media import decode, image_medium, read_size
from mtrl.prepare.select import stable_hash
from mtrl.prepare.tables import ParquetTable

SAMPLES, ACROSS = 12, 3
WIDTH, PICTURE, HEIGHT = 440, 230, 430  # pixels of a cell, and of the pictures in it
LINE, LETTERS_A_LINE = 16, 62


def sample_rows(shards: Sequence[Path], seed: int) -> list[tuple[Path, dict[str, Any]]]:
    """Some rows, by the seed and their ids alone."""
    places = (
        (stable_hash(f"sample:{seed}:{row['id']}"), number, index)
        for number, shard in enumerate(shards)
        for index, row in enumerate(ParquetTable([shard], str(shard)).scan(["id"]))
    )
    return [(shards[number].parent, _row(shards[number], index)) for _, number, index in nsmallest(SAMPLES, places)]


def _row(shard: Path, index: int) -> dict[str, Any]:
    file = pq.ParquetFile(shard)
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if index < rows:
            return dict(file.read_row_group(group, use_threads=False).slice(index, 1).to_pylist()[0])
        index -= rows
    raise IndexError(index)


def draw_sheet(samples: Sequence[tuple[Path, dict[str, Any]]], path: Path) -> None:
    down = -(-len(samples) // ACROSS)
    sheet = Image.new("RGB", (WIDTH * ACROSS, max(1, HEIGHT * down)), "white")
    font = ImageFont.load_default(13)
    for at, (directory, row) in enumerate(samples):
        left, top = WIDTH * (at % ACROSS), HEIGHT * (at // ACROSS)
        _draw_pictures(sheet, row["images"], directory, left + 8, top + 8)
        draw = ImageDraw.Draw(sheet)
        for number, line in enumerate(_lines(row)):
            draw.text((left + 8, top + PICTURE + 14 + LINE * number), line, fill="black", font=font)
    with replacing(path) as out:
        sheet.save(out, "PNG", compress_level=1)


def _draw_pictures(sheet: Image.Image, images: Sequence[Any], directory: Path, left: int, top: int) -> None:
    width = (WIDTH - 16) // max(1, len(images))
    for number, value in enumerate(images):
        medium = image_medium(value, directory)
        high, wide = read_size(medium, verify=False)
        scale = min((width - 4) / wide, PICTURE / high)
        size = max(1, round(high * scale)), max(1, round(wide * scale))
        sheet.paste(Image.fromarray(decode(medium, size)), (left + number * width, top))


def _lines(row: dict[str, Any]) -> list[str]:
    head = [f"{row['id']}  ({row['source']}, answer {row['answer']})"]
    options = [f"{letter}. {option}" for letter, option in zip("ABCDEFGHIJ", row["options"] or (), strict=False)]
    texts = [*head, *textwrap.wrap(row["prompt"], LETTERS_A_LINE)[:4], *options]
    room = (HEIGHT - PICTURE - 20) // LINE
    short = [text if len(text) <= LETTERS_A_LINE else text[: LETTERS_A_LINE - 3] + "..." for text in texts]
    return short[:room]
