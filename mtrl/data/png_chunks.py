"""Chunks of a PNG that Pillow does not report, or only after it has decoded the pixels."""

from __future__ import annotations

import os
import zlib
from typing import BinaryIO

SIGNATURE = b"\x89PNG\r\n\x1a\n"
WANTED = (b"sBIT", b"eXIf", b"iTXt")
XMP = b"XML:com.adobe.xmp\0"
MAX_CHUNK = 1 << 20  # bytes of a chunk that are read
MAX_CHUNKS = 100_000


def read_png_chunks(data: BinaryIO) -> dict[bytes, bytes] | None:
    """Return the first chunk of each wanted name, wherever it is; of iTXt only XMP, decompressed. Pixels are skipped.
    A damaged file gives the chunks before the damage; None if it is no PNG."""
    position = data.tell()
    chunks: dict[bytes, bytes] = {}
    try:
        length = data.seek(0, os.SEEK_END)
        data.seek(0)
        if data.read(8) != SIGNATURE:
            return None
        for _ in range(MAX_CHUNKS):
            head = data.read(8)
            size, name = int.from_bytes(head[:4], "big"), head[4:]
            start = data.tell()
            if len(head) < 8 or name == b"IEND" or start + size > length:
                break
            if name in WANTED and name not in chunks and size <= MAX_CHUNK:
                body = data.read(size)
                content = _read_xmp(body) if name == b"iTXt" else body
                if content is not None:
                    chunks[name] = content
            data.seek(start + size + 4)
    finally:
        data.seek(position)
    return chunks


def _read_xmp(body: bytes) -> bytes | None:
    """Return the XMP of an iTXt chunk: keyword, compression flag and method, language, translated keyword, text."""
    if not body.startswith(XMP) or len(body) < len(XMP) + 2:
        return None
    is_compressed, rest = body[len(XMP)], body[len(XMP) + 2 :]
    text = rest.split(b"\0", 2)[-1]
    if not is_compressed:
        return text
    try:
        return zlib.decompressobj().decompress(text, MAX_CHUNK)
    except zlib.error:
        return None
