"""Small fakes for tests of `mtrl.data`."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mtrl.types import NO_POOL, TEXT_POOL, VISION_POOL, Prompt, Task

PAD, START = 1, 2


class FakeEncoder:
    """One token a character, one a 28-pixel square of an image. A fake: it follows the protocol, and no model."""

    forbidden_ids = (PAD,)

    def __init__(self, name: str = "fake", unit: int = 28) -> None:
        self.name, self.unit, self.calls = name, unit, 0

    def fingerprint(self) -> str:
        return f"{self.name}:{self.unit}"

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        if max(height, width) > 50 * min(height, width):
            raise ValueError("the aspect ratio is over 50")
        return tuple(max(self.unit, round(side / self.unit) * self.unit) for side in (height, width))  # type: ignore

    def length(self, task: Task, sizes: Sequence[tuple[int, int]]) -> int:
        self.calls += 1
        tokens = [self._tokens(*self.target_size(*size)) for size in sizes]
        return len(self._ids(task, tokens))

    def encode(self, task: Task, media: Sequence[np.ndarray]) -> Prompt:
        ids = torch.tensor(self._ids(task, [self._tokens(*array.shape[:2]) for array in media]))
        pool = torch.full_like(ids, TEXT_POOL)
        pool[ids == PAD], pool[ids == START] = VISION_POOL, NO_POOL
        engine_ids = torch.tensor(self._ids(task, [1 for _ in media]))
        return Prompt(task, tuple(media), ids, engine_ids, pool)

    def inputs(self, prompt: Prompt, media: Sequence[np.ndarray] | None = None) -> dict[str, torch.Tensor]:
        return {}

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(f"[{m['role']}]{''.join(self._text(part) for part in self._parts(m))}" for m in messages)

    def decode_tokens(self, ids: Sequence[int]) -> list[str]:
        return ["<pad>" if int(i) == PAD else "<start>" if int(i) == START else chr(int(i)) for i in ids]

    def _text(self, part: Mapping[str, Any]) -> str:
        return str(part["text"]) if part["type"] == "text" else "<pad>"

    def _parts(self, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        content = message["content"]
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    def _tokens(self, height: int, width: int) -> int:
        return height * width // self.unit**2

    def _ids(self, task: Task, media_tokens: list[int]) -> list[int]:
        ids, left = [], list(media_tokens)
        for message in task.messages:
            ids.append(START)
            for part in self._parts(message):
                if part["type"] == "text":
                    if "<pad>" in part["text"]:
                        raise ValueError("the text contains the media token <pad>")
                    ids += [max(3, ord(letter)) for letter in part["text"]]
                else:
                    ids += [PAD] * left.pop(0)
        return ids


def picture(height: int = 56, width: int = 84, seed: int = 0, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def picture_bytes(height: int = 56, width: int = 84, seed: int = 0, kind: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    picture(height, width, seed).save(data, kind, **options)
    return data.getvalue()


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def image_rows(directory: Path, count: int, every: int = 1) -> Path:
    """A JSONL of `count` rows; each `every`-th has its own image file."""
    (directory / "images").mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = []
    for i in range(count):
        row: dict[str, Any] = {"prompt": f"question {i}", "answer": i, "level": i % 3}
        if i % every == 0:
            part = directory / f"images/{i}.part"  # another sampler may read ahead while this one is made
            part.write_bytes(picture_bytes(28 + 28 * (i % 3), 56, seed=i))
            part.replace(part.with_suffix(".png"))
            row |= {"prompt": f"<image>question {i}", "images": [f"images/{i}.png"]}
        rows.append(row)
    return write_jsonl(directory / "train.jsonl", rows)
