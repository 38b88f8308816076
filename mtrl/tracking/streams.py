"""A response in the record: its text pieces and a number a token for each stream, small enough to keep many.

Floats are kept in two bytes, about three digits: enough to look at, not to compute with.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtrl.tracking.blocks import DamagedRecord, inflated

HEAD = struct.Struct("<I")  # bytes of the JSON that comes first
LARGEST = float(np.finfo(np.float16).max)
MAPS, MAP_SCALE = "maps", "map_scale"  # attention over the image: [tokens, image tokens] levels, and [tokens]
KINDS = {"ids": "<i4", "mask": "|u1", MAPS: "|u1", MAP_SCALE: "<f4"}  # every other stream is made of half floats
FLOAT = "<f2"


def pack_response(text: str, pieces: Sequence[str], streams: Mapping[str, np.ndarray]) -> bytes:
    """`streams`: arrays of [tokens] or [tokens, ..] by name."""
    arrays = {name: as_kept(name, array) for name, array in streams.items()}
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    said = json.dumps({"text": text, "pieces": list(pieces), "streams": shapes}, ensure_ascii=False)
    head = said.encode("utf-8", "replace")
    return zlib.compress(b"".join([HEAD.pack(len(head)), head, *(a.tobytes() for a in arrays.values())]), 4)


def as_kept(name: str, array: np.ndarray) -> np.ndarray:
    """The array as it is written; quick for one that is so already, as rows of a whole step are."""
    kind = np.dtype(KINDS.get(name, FLOAT))
    if name in KINDS or array.dtype == kind:
        return array.astype(kind, copy=False)
    return np.clip(array, -LARGEST, LARGEST).astype(FLOAT)  # NaN stays what it is


def unpack_response(data: bytes) -> dict[str, Any]:
    """{"text", "pieces", "streams": {name: array}}, or Damaged."""
    whole = inflated(data)
    try:
        (length,) = HEAD.unpack_from(whole)
        said = json.loads(whole[HEAD.size : HEAD.size + length])
        at, streams = HEAD.size + length, {}
        for name, shape in said["streams"].items():
            kind = np.dtype(KINDS.get(name, FLOAT))
            count = int(np.prod(shape, dtype=np.int64))
            streams[name] = np.frombuffer(whole, kind, count, at).reshape(shape)
            at += count * kind.itemsize
        return {"text": str(said["text"]), "pieces": [str(p) for p in said["pieces"]], "streams": streams}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, struct.error) as error:
        raise DamagedRecord("a response cannot be read") from error
