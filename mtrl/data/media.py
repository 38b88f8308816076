"""Images: from the value in a row to RGB pixels at the size the model sees.

Sizes come from headers, without decoding. Pixels are decoded when a prompt is needed, rotated upright (EXIF, XMP),
converted to RGB (transparency over white, wide samples to 8 bits as `sample_range.py` says, the first frame of an
animation) and resized once, by PIL's bicubic filter. Both go through `_open`, so that the sizes agree.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from PIL import ExifTags, Image

from mtrl.data.png_chunks import read_png_chunks
from mtrl.data.row_settings import RowError, shorten
from mtrl.data.sample_range import check_colors, has_wide_gray, has_wide_samples, to_gray
from mtrl.types import Medium
from mtrl.utils.files import regular_file
from mtrl.utils.images import resize_image

MAX_PIXELS = 89_478_485  # per image: 256 MiB of RGB, where Pillow begins to warn of decompression bombs
# Formats that Pillow decodes itself; for others, such as EPS, it would run a program.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")

BASE64_TEXT = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0A")  # JPEG PNG GIF WebP BMP TIFF TIFF
IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"II*\0", b"MM\0*")  # WebP and BMP need a longer check
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
VIDEO_ENDINGS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv", ".ts")
IMAGE_COLUMNS = ("image", "images", "img", "imgs", "picture", "pictures")  # where a string may be a file name
TRANSPOSES = {  # by EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Size = tuple[int, int]  # height, width
Kind = Literal["image", "video"]
WITH_ARTICLE: dict[Kind, str] = {"image": "an image", "video": "a video"}


def media_list(value: Any) -> list[Any]:
    """Return the values of a media column, which holds nothing, one value or a list."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def looks_like_image(column: str, value: Any) -> bool:
    """Whether a value of this column is an image, judged without opening a file. File names count only in a column
    named for images: other columns of file names may be for a reward function.

    >>> looks_like_image("image", "cats/1.png"), looks_like_image("mask_file", "cats/1.png")
    (True, False)
    """
    if isinstance(value, (list, tuple)):
        return bool(value) and looks_like_image(column, value[0])
    if isinstance(value, dict):
        content, path = value.get("bytes"), value.get("path")
        if content is None and path is None and value.get("image") is not None:
            return looks_like_image("image", value["image"])
        return looks_like_image(column, content) or (isinstance(path, str) and path.lower().endswith(IMAGE_ENDINGS))
    if isinstance(value, (bytes, bytearray, memoryview)):
        start = bytes(value[:14])
        is_bmp = start[:2] == b"BM" and int.from_bytes(start[2:6], "little") == len(value)
        return start.startswith(IMAGE_STARTS) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP") or is_bmp
    if isinstance(value, str):
        if column.lower() not in IMAGE_COLUMNS:
            return value.startswith("data:image/")
        is_base64 = len(value) >= 64 and value.startswith(BASE64_STARTS)
        return is_base64 or value.startswith("data:image/") or value.lower().endswith(IMAGE_ENDINGS)
    return isinstance(value, Image.Image)


def looks_like_video(value: Any) -> bool:
    """Whether a value of a column named for videos is a video, judged without opening a file."""
    if isinstance(value, (list, tuple)):
        return bool(value) and looks_like_video(value[0])
    if isinstance(value, dict):
        return any(looks_like_video(value.get(name)) for name in ("bytes", "path", "video"))
    if isinstance(value, str):
        return value.startswith("data:video/") or value.lower().endswith(VIDEO_ENDINGS)
    return isinstance(value, (bytes, bytearray, memoryview)) and len(value) > 0


def make_medium(value: Any, directory: Path, kind: Kind = "image") -> Medium:
    """Convert a value of an image or video column to a path, bytes or a PIL image.

    >>> make_medium("cats/1.png", Path("/data"))
    Medium(kind='image', source='/data/cats/1.png')
    """
    name = WITH_ARTICLE[kind]
    if isinstance(value, dict):
        if value.get("bytes") is None and value.get("path") is None:
            if value.get(kind) is not None:  # verl's nested form
                return make_medium(value[kind], directory, kind)
            raise RowError(f"{name} is an object with {sorted(map(str, value))}, neither bytes nor a path")
        value = value["bytes"] if value.get("bytes") is not None else value["path"]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Medium(kind, bytes(value))
    if isinstance(value, Image.Image) and kind == "image":
        return Medium(kind, value)
    if isinstance(value, str) and not value.strip():
        raise RowError(f"{name} is an empty text; expected a path, bytes, base64 text or {{'bytes': ...}}")
    if isinstance(value, (str, os.PathLike)):
        return Medium(kind, _parse_text(os.fspath(value), directory, name))
    raise RowError(f"{name} is a {type(value).__name__}; expected a path, bytes, base64 text or {{'bytes': ...}}")


def read_size(medium: Medium, verify: bool = True) -> Size:
    """Return height and width of an upright image from its header. `verify` checks that the file is complete: by the
    marker at its end, or by decoding all pixels if there is none."""
    with _open(medium) as (image, data):
        width, height = image.size
        size = (width, height) if _is_on_its_side(image, data) else (height, width)
        if verify and has_wide_samples(image, data):  # only the samples show whether their range is known
            _decode_rgb(image, data, medium)
        elif verify and not _looks_complete(image.format, data):
            _load(image, medium)
        return size


def decode(medium: Medium, target: Size) -> np.ndarray:
    """Decode an image as RGB uint8 [H, W, 3] at the target (height, width)."""
    with _open(medium) as (image, data):
        transpose = TRANSPOSES.get(_orientation(image, data))
        upright = _decode_rgb(image, data, medium)
        upright = upright.transpose(transpose) if transpose is not None else upright
    return resize_image(upright, *target)


def limit_side(size: Size, max_side: int | None) -> Size:
    """Scale a size down so that its longer side is at most `max_side`.

    >>> limit_side((100, 400), 200)
    (50, 200)
    """
    if max_side is None or max(size) <= max_side:
        return size
    scale = max_side / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _parse_text(text: str, directory: Path, name: str) -> str | bytes:
    """Return a path, or the bytes of base64 text."""
    if text.startswith("data:"):
        kind, comma, payload = text.partition(",")
        if not comma or not kind.endswith(";base64"):
            raise RowError(f"{name} is a data: address without base64 ({shorten(text)})")
        return _decode_base64(payload, name)
    if text.startswith(("http://", "https://")):
        raise RowError(f"{name} is a web address ({shorten(text)}); download it and give its path")
    if len(text) >= 64 and text.startswith(BASE64_STARTS) and BASE64_TEXT.fullmatch(text):
        return _decode_base64(text, name)
    return os.path.join(directory, text.removeprefix("file://"))


def _decode_base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"{name} is damaged base64 text ({error})") from error


@contextmanager
def _open(medium: Medium) -> Iterator[tuple[Image.Image, BinaryIO]]:
    """Yield the image before decoding, and its bytes."""
    assert medium.kind == "image", "videos are read by `video.py`"
    with open_bytes(medium) as data:
        if data.seek(0, os.SEEK_END) == 0 and not isinstance(medium.source, Image.Image):
            raise RowError(f"{media_name(medium)} is empty")
        data.seek(0)
        image = medium.source if isinstance(medium.source, Image.Image) else _parse(medium, data)
        _check_size(image, medium)
        yield image, data


def _parse(medium: Medium, data: BinaryIO) -> Image.Image:
    try:
        return Image.open(data, formats=_known_formats())
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RowError(f"{media_name(medium)} is too large, perhaps a decompression bomb: {error}") from error
    except Image.UnidentifiedImageError as error:
        raise RowError(f"{media_name(medium)} is not an image of a known format") from error
    except Exception as error:  # Pillow's parsers raise anything on damaged headers
        raise RowError(f"{media_name(medium)} has a damaged header ({type(error).__name__}: {error})") from error


def open_bytes(medium: Medium) -> BinaryIO:
    if isinstance(medium.source, Image.Image):
        return io.BytesIO()
    if isinstance(medium.source, bytes):
        return io.BytesIO(medium.source)
    try:
        return regular_file(medium.source).open("rb")
    except FileNotFoundError as error:
        raise RowError(f"{media_name(medium)} does not exist") from error
    except (OSError, ValueError) as error:  # a pipe, no permission, a name too long, a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise RowError(f"{media_name(medium)} cannot be opened ({reason})") from error


def _decode_rgb(image: Image.Image, data: BinaryIO, medium: Medium) -> Image.Image:
    _load(image, medium)
    try:
        return _to_rgb(image, data)
    except (ValueError, OSError, MemoryError) as error:
        raise RowError(f"{media_name(medium)} (mode {image.mode}) cannot be made RGB: {error}") from error


def _load(image: Image.Image, medium: Medium) -> None:
    try:
        image.load()
    except Exception as error:  # Pillow's decoders raise anything on damaged pixels
        reason = str(error) or type(error).__name__
        raise RowError(f"{media_name(medium)} is truncated or damaged ({reason})") from error


def _check_size(image: Image.Image, medium: Medium) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise RowError(f"{media_name(medium)} has no pixels ({width} x {height})")
    if width * height > MAX_PIXELS:
        raise RowError(
            f"{media_name(medium)} is too large, perhaps a decompression bomb: {width} x {height} pixels, "
            f"more than {MAX_PIXELS:,}"
        )


def _orientation(image: Image.Image, data: BinaryIO) -> int:
    """Return how the decoded image must be turned. Pillow turns TIFF itself while it decodes."""
    return 1 if image.format == "TIFF" else _read_orientation(image, data)


def _is_on_its_side(image: Image.Image, data: BinaryIO) -> bool:
    """Whether width and height before decoding are exchanged; of a TIFF only if its XMP says so: Pillow reports the
    upright size if its own field does."""
    is_reported = image.format == "TIFF" and ExifTags.Base.Orientation in getattr(image, "tag_v2", {})
    return not is_reported and _read_orientation(image, data) in (5, 6, 7, 8)


def _read_orientation(image: Image.Image, data: BinaryIO) -> int:
    """Return the orientation that EXIF states, else XMP, without decoding."""
    try:
        if image.format == "PNG" and (chunks := read_png_chunks(data)) is not None:  # None: an image in memory
            if b"eXIf" in chunks:
                image.info.setdefault("exif", b"Exif\0\0" + chunks[b"eXIf"])
            if b"iTXt" in chunks:
                image.info.setdefault("XML:com.adobe.xmp", chunks[b"iTXt"].decode("utf-8", "replace"))
            exif = Image.Image.getexif(image)  # that of a PNG would decode the pixels, in search of later chunks
        else:
            exif = image.getexif()
        value = exif.get(ExifTags.Base.Orientation, 1)
    except Exception:  # the metadata are damaged; the pixels may be fine
        return 1
    return value if isinstance(value, int) else 1


def _looks_complete(format: str | None, data: BinaryIO) -> bool:
    """Whether the bytes end like a complete file of this format; if in doubt, False."""
    position = data.tell()
    length = data.seek(0, os.SEEK_END)
    data.seek(max(0, length - 32))
    tail = data.read()
    is_complete = False
    if format in ("JPEG", "MPO"):
        is_complete = b"\xff\xd9" in tail
    elif format == "PNG":
        is_complete = b"IEND" in tail
    elif format == "GIF":
        is_complete = tail.rstrip(b"\0").endswith(b";")
    elif format == "WEBP":
        data.seek(4)
        is_complete = int.from_bytes(data.read(4), "little") + 8 <= length
    data.seek(position)
    return is_complete


def _to_rgb(image: Image.Image, data: BinaryIO) -> Image.Image:
    if has_wide_gray(image):
        gray = np.clip(np.rint(to_gray(image, data)), 0, 255)
        return Image.fromarray(gray.astype(np.uint8)).convert("RGB")
    check_colors(image, data)
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        background = Image.new("RGB", rgba.size, (255, 255, 255))
        background.paste(rgba, mask=rgba.getchannel("A"))
        return background
    return image.convert("RGB")


@lru_cache(maxsize=1)
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def media_name(medium: Medium) -> str:
    if isinstance(medium.source, str):
        return f"the {medium.kind} {medium.source}"
    return f"{WITH_ARTICLE[medium.kind]} in the row"
