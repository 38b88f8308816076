"""Does a model of any family learn from images? The packaged recipe on the embedded task, and a control without them.

    python -m pretraining.pretrain zoo --family qwen3_5 --out MODEL        # minutes on one GPU
    python -m benchmarks.family_learning MODEL --out FILE

Trains MODEL as `mtrl train` does with no file: once on the pictures, once on the same questions about grey squares.
Reports the reward of every step and the greedy accuracy on the test questions before and after, with pictures and
without; `constant` is that of the best constant answer to each kind of question, which needs no picture.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.environment import finish
from mtrl.compose.run import Run, build, configure
from mtrl.embedded.embedded_rows import CONFIG_FILE
from mtrl.embedded.task import TEST_QUESTIONS, ZooQuestion, make_question, row
from mtrl.models.families import load_encoder
from mtrl.tracking.jsonl import read_rows
from mtrl.training.validation import Validation
from mtrl.types import Sampling
from pretraining.evaluation import best_constant, make_prompts


def learn(model: Path, directory: Path, steps: int, grey: bool, questions: list[ZooQuestion]) -> dict[str, Any]:
    image = load_encoder(model).image_settings
    assert image is not None
    config, _ = configure(CONFIG_FILE, {
        "worker.actor.model.model_path": str(model), "training.output_dir": str(directory), "training.logger": (),
        "training.max_steps": steps, "training.val_before_train": False, "training.val_freq": -1,
        "dataset.train_files": "zoo@train", "dataset.val_files": "zoo@validation",
        "dataset.min_pixels": image.min_pixels, "dataset.max_pixels": image.max_pixels,
    })  # fmt: skip
    prompts = steps * config.dataset.rollout_batch_size
    run = build(config, data=[grey_row(index) for index in range(prompts)] if grey else None)
    before = grade(run, questions)
    run.train()
    rows = read_rows(run.directory / "metrics.jsonl")
    rewards = [each["reward/overall"] for each in rows if "reward/overall" in each]
    return {"reward": rewards, "before": before, "after": grade(run, questions)}


def grade(run: Run, questions: list[ZooQuestion]) -> dict[str, float]:
    """Greedy accuracy with the pictures and with grey ones."""
    parts = run.loop.components

    def accuracy(blank: bool) -> float:
        prompts = make_prompts(questions, parts.generator.encoder, blank)
        exam = Validation(lambda: [prompts], Sampling(temperature=0.0, max_new_tokens=24))
        return exam.run(parts.generator, parts.scorer, run.loop.version).metrics["val/avg@1"]

    return {"pictures": accuracy(False), "blank": accuracy(True)}


def grey_row(index: int) -> dict[str, Any]:
    picture = Image.fromarray(np.full((56, 56, 3), 127, dtype=np.uint8))
    return row(make_question("train", index)) | {"images": [picture]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--questions", type=int, default=TEST_QUESTIONS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    questions = [make_question("test", index) for index in range(options.questions)]
    best = best_constant(questions)
    result: dict[str, Any] = {"constant": sum(best[question.kind] for question in questions) / len(questions)}
    with tempfile.TemporaryDirectory() as scratch:
        for name, grey in (("pictures", False), ("grey pictures", True)):
            result[name] = learn(options.model, Path(scratch, name.split()[0]), options.steps, grey, questions)
            print(name, result[name]["before"], result[name]["after"], flush=True)
    finish(result, options.out)


if __name__ == "__main__":
    main()
