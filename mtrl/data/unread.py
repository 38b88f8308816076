"""Media in columns that no key reads, found by their content: under whatever name, a run must not train without them.

A row is judged only if it has no image and no video otherwise. If it has, a column of file names beside them, such as
`source_file`, is metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from itertools import islice
from pathlib import PurePath
from typing import Any

from mtrl.data.media import BASE64_STARTS, IMAGE_ENDINGS, VIDEO_ENDINGS, Kind, looks_like_image

MAX_DEPTH = 4  # structs in structs, as in `extra_info.media.path`
MAX_ITEMS = 8  # values of a list that are looked at
MAX_NAME_CHARS = 4096  # the longest path that a system takes
# Endings that mean an image or a video even if MTRL cannot decode it. A .ts is more often TypeScript than a video.
ENDINGS: dict[Kind, tuple[str, ...]] = {
    "image": (*IMAGE_ENDINGS, ".jpe", ".jfif", ".heic", ".heif", ".svg", ".apng", ".jxl", ".j2k", ".pgm", ".pbm",
              ".pnm", ".dib", ".dcm"),
    "video": (*(ending for ending in VIDEO_ENDINGS if ending != ".ts"), ".3gp", ".m2ts", ".mts"),
}  # fmt: skip
NO_FILE_NAME = re.compile(r'[\n\r\t<>|"*]')
WEB_ADDRESS = re.compile(r"(?:https?|s3|gs|hf)://[^\s]+", re.IGNORECASE)
NAMED_FOR: dict[Kind, re.Pattern[str]] = {  # words in the name of a column; web addresses often have no ending
    "image": re.compile(r"(?:^|[_\W])(?:image|img|picture|photo|figure)s?(?:$|[_\W])", re.IGNORECASE),
    "video": re.compile(r"(?:^|[_\W])(?:video|clip)s?(?:$|[_\W])", re.IGNORECASE),
}


def find_unread_media(columns: Mapping[str, Any], read: Set[str] = frozenset()) -> dict[Kind, str]:
    """Return the first column with images and the first with videos, as a key takes them: a dotted name reaches into
    structs. `read`: the columns that a key reads.

    >>> find_unread_media({"level": 3, "shot": "cats/1.png", "mask": "cats/2.png"})
    {'image': 'shot'}
    >>> find_unread_media({"question": "What is in cat.png", "meta": {"clip": "a.mp4"}}, read={"question"})
    {'video': 'meta.clip'}
    """
    found: dict[Kind, str] = {}
    for kind, column in _find(columns, "", read, 0):
        found.setdefault(kind, column)
    return found


def _find(columns: Mapping[str, Any], prefix: str, read: Set[str], depth: int) -> Iterator[tuple[Kind, str]]:
    for name, value in columns.items():
        column = f"{prefix}{name}"
        if column in read:
            continue
        if kind := media_kind(column, value):
            yield kind, column
        elif isinstance(value, Mapping) and depth < MAX_DEPTH:
            yield from _find(value, f"{column}.", read, depth + 1)


def media_kind(column: str, value: Any) -> Kind | None:
    """Return what a value of this column is, judged without opening a file.

    >>> media_kind("page", "https://example.org/1.JPG?size=2"), media_kind("notes", "nothing to see")
    ('image', None)
    """
    if isinstance(value, (list, tuple)):
        items = (item for each in value[:MAX_ITEMS] for item in (each if isinstance(each, (list, tuple)) else [each]))
        return next((kind for item in islice(items, MAX_ITEMS) if (kind := _item_kind(column, item))), None)
    if isinstance(value, Mapping) and not {"bytes", "path"} & value.keys():
        return None  # a struct: its fields have names of their own
    return _item_kind(column, value)


def _item_kind(column: str, value: Any) -> Kind | None:
    """As `media_kind`, of one value; the fields of a struct in a list have no name that a key could take."""
    if isinstance(value, Mapping):
        return next((kind for field in value.values() if (kind := _plain_kind(column, field))), None)
    return _plain_kind(column, value)


def _plain_kind(column: str, value: Any) -> Kind | None:
    if isinstance(value, (str, PurePath)):
        return _text_kind(column, str(value))
    if isinstance(value, Mapping):
        return None
    if looks_like_image(column, value):
        return "image"
    if isinstance(value, (bytes, bytearray, memoryview)):
        if _starts_like_video(bytes(value[:12])):
            return "video"
        return _ending_kind(f".{column}") if value else None  # a member of a tar is called after its ending
    return None


def _text_kind(column: str, text: str) -> Kind | None:
    for kind in ENDINGS:
        if text.startswith(f"data:{kind}/"):
            return kind
    if len(text) >= 64 and text.startswith(BASE64_STARTS) and not re.search(r"\s", text[:64]):
        return "image"
    text = text.strip()
    if len(text) > MAX_NAME_CHARS:
        return None
    if WEB_ADDRESS.fullmatch(text):
        named = next((kind for kind, pattern in NAMED_FOR.items() if pattern.search(column)), None)
        return _ending_kind(re.split(r"[?#]", text)[0]) or named
    return None if NO_FILE_NAME.search(text) else _ending_kind(text)


def _ending_kind(name: str) -> Kind | None:
    return next((kind for kind, endings in ENDINGS.items() if name.lower().endswith(endings)), None)


def _starts_like_video(start: bytes) -> bool:
    """MP4 and MOV, Matroska and WebM, AVI, MPEG, FLV."""
    is_avi = start[:4] == b"RIFF" and start[8:12] == b"AVI "
    return start[4:8] == b"ftyp" or is_avi or start.startswith((b"\x1aE\xdf\xa3", b"\x00\x00\x01\xba", b"FLV\x01"))
