"""A response in the record: the text of its tokens, one number per token for each stream, and what an environment said
in between, compressed.

Floats are stored in two bytes, about three digits: enough to look at, not to compute with.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtrl.tracking.blocks import DamagedRecord, decompress
from mtrl.tracking.jsonl import parse_json

HEAD = struct.Struct("<I")  # size in bytes of the JSON that follows
LARGEST = float(np.finfo(np.float16).max)
EXTRA = "extra_"  # before the name of a user's signal
MAPS, MAP_SCALE = "maps", "map_scale"  # attention over the image: [tokens, image tokens] levels, and [tokens]
DTYPES = {
    "ids": "<i4",
    "mask": "|u1",
    "trained": "|u1",
    MAPS: "|u1",
    MAP_SCALE: "<f4",
}  # every other stream has half floats
FLOAT = "<f2"


def pack_response(
    text: str, pieces: Sequence[str], streams: Mapping[str, np.ndarray], messages: Sequence[Mapping[str, Any]] = ()
) -> bytes:
    """`streams`: arrays of [tokens] or [tokens, ..] by name. `messages` are as `read_message` returns them."""
    arrays = {name: to_stored_dtype(name, array) for name, array in streams.items()}
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    head: dict[str, Any] = {"text": text, "pieces": list(pieces), "streams": shapes}
    head |= {"messages": list(messages)} if messages else {}
    head_bytes = json.dumps(head, ensure_ascii=False).encode("utf-8", "replace")
    return zlib.compress(b"".join([HEAD.pack(len(head_bytes)), head_bytes, *(a.tobytes() for a in arrays.values())]), 4)


def to_stored_dtype(name: str, array: np.ndarray) -> np.ndarray:
    dtype = np.dtype(DTYPES.get(name, FLOAT))
    if name in DTYPES or array.dtype == dtype:
        return array.astype(dtype, copy=False)
    return np.clip(array, -LARGEST, LARGEST).astype(FLOAT)  # NaN stays NaN


def unpack_response(data: bytes) -> dict[str, Any]:
    """{"text", "pieces", "streams": {name: array}, "messages"}, or DamagedRecord."""
    whole = decompress(data)
    try:
        (length,) = HEAD.unpack_from(whole)
        head = parse_json(whole[HEAD.size : HEAD.size + length])
        offset, streams = HEAD.size + length, {}
        for name, shape in head["streams"].items():
            dtype = np.dtype(DTYPES.get(name, FLOAT))
            count = int(np.prod(shape, dtype=np.int64))
            streams[name] = np.frombuffer(whole, dtype, count, offset).reshape(shape)
            offset += count * dtype.itemsize
        messages = [read_message(message) for message in head.get("messages", [])]
        places = [0, *(message["after"] for message in messages)]
        if places != sorted(places):
            raise ValueError(places)
        pieces = [str(p) for p in head["pieces"]]
        return {"text": str(head["text"]), "pieces": pieces, "streams": streams, "messages": messages}
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, struct.error) as error:
        raise DamagedRecord("a response cannot be read") from error


def read_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of an environment after so many tokens of the response; `images` are keys of images of the step."""
    return {
        **{name: int(message[name]) for name in ("after", "errors", "tokens")},
        **{name: [str(each) for each in message[name]] for name in ("images", "tools")},
        "content": str(message["content"]),
        "seconds": float(message["seconds"]),
    }


def as_list(array: np.ndarray, digits: int) -> list[Any]:
    """Numbers for JSON: floats rounded to so many digits, None for NaN and infinity."""
    if array.dtype.kind in "iu":
        return array.tolist()
    return [float(f"{x:.{digits}g}") if ok else None for x, ok in zip(array.tolist(), np.isfinite(array), strict=True)]
