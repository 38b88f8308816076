"""Random inputs for `mtrl train`: a checkpoint, rows with pictures on disk, a reward function and a YAML. Settings that
the YAML omits have their defaults."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mtrl.bench.shapes import write_checkpoint, write_files
from mtrl.config.load_config import load_config
from mtrl.config.yaml_io import write_yaml
from mtrl.models.families import TextEncoder, load_encoder
from mtrl.models.tiny_tokenizer import WORDS
from mtrl.types import VISION_POOL, Medium, Prompt, Task

REWARD = '''"""A deterministic reward without meaning, which gives the responses of a group different values."""

import zlib


def score(data):
    return zlib.crc32(str(data["response_token_ids"]).encode()) / 2**32
'''
PATHS = ("worker.actor.model.model_path", "dataset.train_files", "training.output_dir")  # paths, not settings


def write_run(
    folder: Path, size: str, device: str, rows: int, sides: Sequence[int], text_tokens: int, seed: int,
    settings: Mapping[str, Any], *, weights: bool = True,
) -> Path:  # fmt: skip
    """Writes all files into `folder`, without the weights if `weights` is false; returns the path of the YAML. Pictures
    are squares of these sides, in turn; `settings` are dotted keys of the YAML."""
    path = folder / "model"
    checkpoint = write_checkpoint(path, size, device, seed) if weights else write_files(path, size)
    write_rows(folder, rows, sides, text_tokens, seed)
    (folder / "rewards.py").write_text(REWARD)
    paths = dict(zip(PATHS, (str(checkpoint), "train.jsonl", str(folder / "outputs")), strict=True))
    file = folder / "run.yaml"
    file.write_text(write_yaml(nested({**paths, **settings})))
    return file


def write_rows(folder: Path, count: int, sides: Sequence[int], text_tokens: int, seed: int) -> None:
    """Writes `train.jsonl` and a PNG file of noise for each row."""
    encoder = load_encoder(folder / "model")
    (folder / "images").mkdir()
    rows = []
    for number, (text, image) in enumerate(random_questions(encoder, count, sides, text_tokens, seed)):
        name = f"images/{number}.png"
        Image.fromarray(image).save(folder / name, compress_level=1)
        rows.append({"prompt": f"<image>{text}", "images": [name], "answer": "A"})
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def random_questions(
    encoder: TextEncoder, count: int, sides: Sequence[int], text_tokens: int, seed: int = 0
) -> Iterator[tuple[str, np.ndarray]]:
    """Texts and square pictures (sides in pixels, in turn) of prompts that have `text_tokens` tokens besides those of
    the picture, template included."""
    words = [word for word in WORDS.split() if len(encoder.tokenizer(f" {word}")["input_ids"]) == 1]
    draw, noise = random.Random(seed), np.random.default_rng(seed)
    for number in range(count):
        side = sides[number % len(sides)]
        image = noise.integers(0, 256, (side, side, 3), dtype=np.uint8)
        first = f" {draw.choice(words)}"  # a template may trim it, so that it has other tokens than the next ones
        prompt = encode_question(encoder, number, first, image)
        spare = text_tokens - int((prompt.token_pool != VISION_POOL).sum())
        yield first + "".join(f" {draw.choice(words)}" for _ in range(spare)), image


def encode_question(encoder: TextEncoder, number: int, text: str, image: np.ndarray) -> Prompt:
    content = [{"type": "image"}, {"type": "text", "text": text}]
    task = Task(f"noise:{number}", f"noise {number}", ({"role": "user", "content": content},), (Medium("image", None),))
    return encoder.encode(task, [image])


def step_settings(
    prompts: int, generations: int, completion: int, steps: int, sides: Sequence[int], prompt_tokens: int
) -> dict[str, Any]:
    """Settings for the sizes of a step; data limits change only if pictures or prompts would exceed them."""
    limits = load_config().dataset
    settings: dict[str, Any] = {
        "dataset.rollout_batch_size": prompts,
        "dataset.max_response_length": completion,
        "training.max_steps": steps,
        "worker.actor.global_batch_size": prompts,
        "worker.rollout.n": generations,
        "worker.reward.functions": ["rewards.py:score"],
    }
    if min(sides) ** 2 < limits.min_pixels:
        settings["dataset.min_pixels"] = min(sides) ** 2
    if max(sides) ** 2 > limits.max_pixels:
        settings["dataset.max_pixels"] = max(sides) ** 2
    if prompt_tokens > limits.max_prompt_length:
        settings["dataset.max_prompt_length"] = prompt_tokens
    return settings


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Converts dotted keys to the sections of a YAML."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree
