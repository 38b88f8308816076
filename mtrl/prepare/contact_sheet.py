"""A contact sheet of samples, to look at before a run."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from heapq import nsmallest
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from mtrl.data.media import decode, make_medium, read_size
from mtrl.prepare.select import stable_hash
from mtrl.prepare.tables import ParquetTable
from mtrl.utils.files import atomic_write

SAMPLES, COLUMNS = 12, 3
CELL_WIDTH, CELL_HEIGHT, IMAGE_HEIGHT = 440, 430, 230  # pixels
LINE_HEIGHT, LINE_CHARS = 16, 62


def sample_rows(shards: Sequence[Path], seed: int) -> list[dict[str, Any]]:
    """Select some rows by the seed and their ids alone."""
    table = ParquetTable(shards, str(shards[0].parent.parent))
    ids = enumerate(table.scan(["id"]))
    chosen = nsmallest(SAMPLES, ((stable_hash(f"sample:{seed}:{row['id']}"), index) for index, row in ids))
    return [next(table.scan(table.columns, index)) for _, index in chosen]


def draw_sheet(samples: Sequence[dict[str, Any]], directory: Path, path: Path) -> None:
    """Draw the rows; relative paths of their images start at `directory`."""
    lines = -(-len(samples) // COLUMNS)
    sheet = Image.new("RGB", (CELL_WIDTH * COLUMNS, max(1, CELL_HEIGHT * lines)), "white")
    font = ImageFont.load_default(13)
    for index, row in enumerate(samples):
        left, top = CELL_WIDTH * (index % COLUMNS), CELL_HEIGHT * (index // COLUMNS)
        _draw_images(sheet, row["images"], directory, left + 8, top + 8)
        draw = ImageDraw.Draw(sheet)
        for number, line in enumerate(_caption(row)):
            draw.text((left + 8, top + IMAGE_HEIGHT + 14 + LINE_HEIGHT * number), line, fill="black", font=font)
    with atomic_write(path) as out:
        sheet.save(out, "PNG", compress_level=1)


def _draw_images(sheet: Image.Image, images: Sequence[Any], directory: Path, left: int, top: int) -> None:
    max_width = (CELL_WIDTH - 16) // max(1, len(images))
    for number, value in enumerate(images):
        medium = make_medium(value, directory)
        height, width = read_size(medium, verify=False)
        scale = min((max_width - 4) / width, IMAGE_HEIGHT / height)
        size = max(1, round(height * scale)), max(1, round(width * scale))
        sheet.paste(Image.fromarray(decode(medium, size)), (left + number * max_width, top))


def _caption(row: dict[str, Any]) -> list[str]:
    title = f"{row['id']}  ({row['source']}, answer {row['answer']})"
    options = [f"{letter}. {option}" for letter, option in zip("ABCDEFGHIJ", row["options"] or (), strict=False)]
    lines = [title, *textwrap.wrap(row["prompt"], LINE_CHARS)[:4], *options]
    short = [line if len(line) <= LINE_CHARS else line[: LINE_CHARS - 3] + "..." for line in lines]
    return short[: (CELL_HEIGHT - IMAGE_HEIGHT - 20) // LINE_HEIGHT]
