"""Images of the output: the dataset's bytes embedded in the shards, or paths of files."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from mtrl.data.media import make_medium, read_size
from mtrl.data.row_settings import RowError
from mtrl.types import Medium
from mtrl.utils.files import atomic_write

Storage = Literal["embed", "paths"]
ENDINGS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif"}
FOLDER = "images"


def store_image(value: Any, directory: Path, out: Path, storage: Storage) -> dict[str, Any]:
    """Return the value of the column, {bytes, path}; raise RowError for a missing or damaged image."""
    if value is None:
        raise RowError("it has no image")
    medium = make_medium(value, directory)
    read_size(medium)
    if storage == "paths" and isinstance(medium.source, str):
        return {"bytes": None, "path": os.path.relpath(medium.source, out / "split")}  # relative to a shard
    data = _read_bytes(medium)
    if storage == "paths":
        return {"bytes": None, "path": f"../{_write_file(data, out)}"}
    name = value.get("path") if isinstance(value, dict) else medium.source if isinstance(medium.source, str) else None
    return {"bytes": data, "path": os.path.basename(name) if isinstance(name, str) else None}


def _read_bytes(medium: Medium) -> bytes:
    if isinstance(medium.source, bytes):
        return medium.source
    if isinstance(medium.source, str):
        return Path(medium.source).read_bytes()
    assert isinstance(medium.source, Image.Image)
    data = io.BytesIO()
    medium.source.save(data, "PNG")
    return data.getvalue()


def _write_file(data: bytes, out: Path) -> str:
    """Write a file named by its content, so that an image of several rows is stored once."""
    with Image.open(io.BytesIO(data)) as image:
        ending = ENDINGS.get(image.format or "", "img")
    name = hashlib.blake2b(data, digest_size=16).hexdigest()
    path = f"{FOLDER}/{name[:2]}/{name}.{ending}"
    if not (out / path).exists():
        with atomic_write(out / path) as file:
            file.write(data)
    return path
