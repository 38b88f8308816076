"""What a user would have for `mtrl train`, of random content: a checkpoint, rows with pictures on the disk, a reward
function and a YAML. What the YAML does not say is as a user gets it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.random_model import checkpoint_without_weights, random_checkpoint, random_questions
from mtrl.config.load_config import load_config
from mtrl.config.yaml_io import write_yaml
from mtrl.models.families import load_encoder

REWARD = '''"""A reward without a meaning: groups with different rewards, the same ones whenever it is asked."""

import zlib


def score(data):
    return zlib.crc32(str(data["response_token_ids"]).encode()) / 2**32
'''
PATHS = ("worker.actor.model.model_path", "dataset.train_files", "training.output_dir")  # where things lie, no settings


def write_run(
    folder: Path, size: str, device: str, rows: int, sides: Sequence[int], text_tokens: int, seed: int,
    settings: Mapping[str, Any], *, weights: bool = True,
) -> Path:  # fmt: skip
    """Writes everything into `folder`, on request but for the `weights`. Pictures are squares of these sides, in turn;
    `settings` are keys of the YAML with their dots; returned is its path."""
    place = folder / "model"
    checkpoint = random_checkpoint(place, size, device, seed) if weights else checkpoint_without_weights(place, size)
    write_rows(folder, rows, sides, text_tokens, seed)
    (folder / "rewards.py").write_text(REWARD)
    places = dict(zip(PATHS, (str(checkpoint), "train.jsonl", str(folder / "outputs")), strict=True))
    file = folder / "run.yaml"
    file.write_text(write_yaml(nested({**places, **settings})))
    return file


def write_rows(folder: Path, count: int, sides: Sequence[int], text_tokens: int, seed: int) -> None:
    """`train.jsonl` with a picture of noise for each row, as PNG files."""
    encoder = load_encoder(folder / "model")
    (folder / "images").mkdir()
    rows = []
    for number, (text, image) in enumerate(random_questions(encoder, count, sides, text_tokens, seed)):
        name = f"images/{number}.png"
        Image.fromarray(image).save(folder / name, compress_level=1)
        rows.append({"prompt": f"<image>{text}", "images": [name], "answer": "A"})
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def step_settings(
    prompts: int, generations: int, completion: int, steps: int, sides: Sequence[int], prompt_tokens: int
) -> dict[str, Any]:
    """The sizes of a step. Limits of the data are touched only where pictures or prompts would not fit into them."""
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
    """Dotted keys as the sections of a YAML."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, leaf = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return tree
