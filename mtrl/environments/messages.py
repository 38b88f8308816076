"""Messages between the trainer and a process of environments. Requests are pickles. Replies are JSON and the bytes of
pixels, so nothing in them is ever run; one that is not exactly the reply to an open request is rejected.

Imports nothing heavy.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mtrl.environments.records import ERROR_KINDS, Block, EnvironmentLimits, ErrorKind, ToolSet
from mtrl.sandbox.frames import INVALID, WorkerLost
from mtrl.sandbox.plain_text import sanitize_tail

LENGTH = struct.Struct("!Q")  # of the JSON; the pixels follow
IMAGE = "an image must be a PIL image or an array [height, width, 3] of uint8, not empty"
MAX_ERROR = 2_000  # characters of an exception that the model reads

Verb = Literal["reset", "call", "get_reward", "score", "close"]


@dataclass(frozen=True)
class WorkerSetup:
    """The first message to a process."""

    environments: Mapping[str, str]  # the class of each name
    functions: Mapping[str, tuple[str, Mapping[str, Any]]]  # reward functions that want environments, and keywords
    limits: EnvironmentLimits
    memory_bytes: int


@dataclass(frozen=True)
class Request:
    verb: Verb
    sessions: tuple[int, ...]
    key: tuple[int | str, ...]
    name: str = ""  # of the environment's class, the tool or the function
    arguments: Any = None  # the row, the arguments or the samples
    number: int = 0
    asynchronous: bool = False


@dataclass(frozen=True)
class Reply:
    number: int
    content: tuple[Block, ...] = ()
    error: ErrorKind | None = None
    seconds: float = 0.0
    values: list[Any] = field(default_factory=list)  # of rewards: [value, extras, failure] each


# ------------------------------------------------------------------------------------------------- in the process
class TooLarge(ValueError):
    """A result is over a limit."""


def read_content(result: Any, limits: EnvironmentLimits) -> tuple[Block, ...]:
    """The blocks of a tool's return value, as in TRL: a list of content blocks, or the text of anything else."""
    blocks = result if isinstance(result, list) and any(isinstance(each, Mapping) for each in result) else None
    content = (str(result),) if blocks is None else tuple(read_block(each, limits) for each in blocks)
    characters = sum(len(each) for each in content if isinstance(each, str))
    if characters > limits.text_characters:
        raise TooLarge(f"the result has {characters:,} characters; at most {limits.text_characters:,} can be shown")
    images = sum(not isinstance(each, str) for each in content)
    if images > limits.images:
        raise TooLarge(f"the result has {images:,} images; at most {limits.images} can be shown")
    return content


def read_block(block: Any, limits: EnvironmentLimits) -> Block:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return block["text"]
    if kind != "image" or "image" not in block:
        raise TypeError('the tool returned a list with something else than {"type": "text", "text": ..} and '
                        '{"type": "image", "image": ..}')  # fmt: skip
    image = block["image"]
    if not hasattr(image, "convert") and np.ndim(image) != 3:
        raise TypeError(IMAGE)
    width, height = image.size if hasattr(image, "convert") else np.shape(image)[1::-1]
    if width * height > limits.image_pixels:
        raise TooLarge(f"the image has {width} x {height} pixels; at most {limits.image_pixels:,} can be shown")
    pixels = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise TypeError(IMAGE)
    return pixels


def encode_reply(reply: Reply) -> bytes:
    content = [block if isinstance(block, str) else list(block.shape[:2]) for block in reply.content]
    fields = {"number": reply.number, "content": content, "error": reply.error, "seconds": reply.seconds,
              "values": reply.values}  # fmt: skip
    text = json.dumps(fields).encode()
    pixels = [np.ascontiguousarray(block).tobytes() for block in reply.content if not isinstance(block, str)]
    return b"".join((LENGTH.pack(len(text)), text, *pixels))


def encode_start(tools: Mapping[str, ToolSet], error: str, contained: bool) -> bytes:
    described = {name: [each.class_name, each.schemas, sorted(each.asynchronous), each.rewards]
                 for name, each in tools.items()}  # fmt: skip
    return json.dumps({"tools": described, "error": sanitize_tail(error), "contained": contained}).encode()


# --------------------------------------------------------------------------------------------------- in the trainer
def decode_start(message: bytes) -> tuple[dict[str, ToolSet], str, bool]:
    """The tools of each environment or an error, and whether all that the process starts will end with it."""
    try:
        fields = json.loads(message)
        tools = {
            name: ToolSet(str(class_name), tuple(schemas), frozenset(waits), rewards is True)
            for name, (class_name, schemas, waits, rewards) in fields["tools"].items()
        }
        assert all(isinstance(name, str) for each in tools.values() for name in each.names)
        return tools, sanitize_tail(fields["error"]), fields["contained"] is True
    except Exception:  # a process may send anything
        raise WorkerLost(INVALID) from None


def decode_reply(message: bytes, limits: EnvironmentLimits) -> Reply:
    try:
        (length,) = LENGTH.unpack_from(message)
        fields = json.loads(message[LENGTH.size : LENGTH.size + length])
        place, content = LENGTH.size + length, list[Block]()
        for block in fields["content"]:
            if isinstance(block, str):
                content.append(block.encode("utf-8", "replace").decode())  # half of a pair is no text for a tokenizer
                continue
            height, width = block
            count = 3 * check_count(height) * check_count(width)
            pixels = np.frombuffer(message, np.uint8, count, place).reshape(height, width, 3)
            content.append(pixels)
            place += count
        if place != len(message) or fields["error"] not in (None, *ERROR_KINDS):
            raise ValueError("something else")
        seconds = float(fields["seconds"])
        check_limits(content, limits)
        values = [check_value(*each) for each in fields["values"]]
        return Reply(check_count(fields["number"]), tuple(content), fields["error"], seconds, values)
    except Exception:
        raise WorkerLost(INVALID) from None


def check_count(value: Any) -> int:
    if type(value) is not int or value <= 0:
        raise ValueError("no number of anything")
    return value


def check_limits(content: list[Block], limits: EnvironmentLimits) -> None:
    """The process checks them too, and says which; this is for one that lies. An error may be longer than a text."""
    texts = [block for block in content if isinstance(block, str)]
    images = [block for block in content if not isinstance(block, str)]
    largest = max((block.shape[0] * block.shape[1] for block in images), default=0)
    too_long = sum(map(len, texts)) > limits.text_characters + 4 * MAX_ERROR
    if too_long or len(images) > limits.images or largest > limits.image_pixels:
        raise ValueError("over the limits")


def check_value(value: Any, extras: Any, failure: Any) -> list[Any]:
    from mtrl.rewards.outcomes import LARGEST, check_extras

    if failure is not None:
        return [None, {}, sanitize_tail(failure) or "no reason given"]
    check_extras(extras)
    if value is None:
        return [None, extras, None]
    if not isinstance(value, (int, float)) or not math.isfinite(value) or abs(value) > LARGEST:
        raise ValueError("no finite number")
    return [float(value), extras, None]
