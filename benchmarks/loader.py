"""Does the loader keep ahead of training? From JPEG files of 1024 x 768 pixels to prompts.

    python -m benchmarks.loader [--prompts 128] [--workers 2] [--out benchmarks/results/loader.json]

The prompts of a step are made by worker processes as in `mtrl train` (`mtrl/data/workers.py`), and once more by two
threads of one process. CPU seconds are measured instead of wall time, since other work shares the machine: those of the
workers, which more cores divide, and those of the training process, which more cores do not reduce. The time of a step
of 512 prompts on 8 cores is extrapolated from both, not measured.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import finish

STEP_S, STEP_PROMPTS, CORES = 4.0, 512, 8
HEIGHT, WIDTH = 768, 1024


def picture(seed: int) -> bytes:
    """A JPEG with detail at every scale, like a photograph: the sum of noise of several grain sizes."""
    from PIL import Image

    random, whole = np.random.default_rng(seed), np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for grain, weight in ((256, 90), (64, 50), (16, 25), (4, 12), (1, 4)):
        noise = random.integers(0, 256, (HEIGHT // grain, WIDTH // grain, 3), dtype=np.uint8)
        smooth = Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        whole += weight * (np.asarray(smooth, np.float32) / 127.5 - 1)
    data = io.BytesIO()
    Image.fromarray(np.clip(whole + 128, 0, 255).astype(np.uint8)).save(data, "JPEG", quality=90)
    return data.getvalue()


def make_data(folder: Path, rows: int, contents: int = 32) -> Path:
    pictures = [picture(seed) for seed in range(contents)]
    with (folder / "train.jsonl").open("w") as out:
        for row in range(rows):
            (folder / f"{row}.jpg").write_bytes(pictures[row % contents])
            question = f"<image>Question {row}: " + "which of the shapes stands left of the red one, and why? " * 2
            out.write(json.dumps({"prompt": question, "answer": "A", "images": f"{row}.jpg"}) + "\n")
    return folder / "train.jsonl"


def measure(dataset: Any, encoder: Any, prompts: int, workers: int) -> dict[str, float]:
    """CPU seconds of a step's prompts, in this process and in the workers."""
    from mtrl.data import Sampler

    before, begin = os.times(), time.perf_counter()
    seen = 0
    with Sampler(dataset, encoder, workers=workers) as sampler:
        while seen < prompts:
            seen += len(sampler.take(min(64, prompts - seen)))  # prompts are dropped at once, like a stream
    after = os.times()
    workers_cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "here_cpu_s": round(after.user + after.system - before.user - before.system, 2),
        "workers_cpu_s": round(workers_cpu_s, 2),
        "clock_s": round(time.perf_counter() - begin, 2),
    }


def run(prompts: int, workers: int) -> dict[str, Any]:
    from mtrl.data import DataSettings, open_dataset
    from mtrl.models.families import load_encoder
    from pretraining.tiny_checkpoints import make_tiny_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MTRL_CACHE"] = str(Path(folder, "cache"))
        data = make_data(Path(folder), prompts)
        sizes = [file.stat().st_size for file in Path(folder).glob("*.jpg")]
        encoder = load_encoder(make_tiny_checkpoint(Path(folder, "model")), min_pixels=262144, max_pixels=4194304)
        dataset = open_dataset(str(data), DataSettings(), encoder, workers=1)
        pixels = int(dataset.pixels.sum())
        rss_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        forked = measure(dataset, encoder, prompts, workers)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss_before
        threads = measure(dataset, encoder, prompts, 0)
    step = max(forked["workers_cpu_s"] / CORES, forked["here_cpu_s"]) * STEP_PROMPTS / prompts
    return {
        "pictures": {"width": WIDTH, "height": HEIGHT, "mean_file_kb": round(sum(sizes) / len(sizes) / 1e3)},
        "prompts": prompts,
        "decoded_mb": round(3 * pixels / 1e6),
        "memory_grown_mb": round(grown / 1e3),
        "workers": workers,
        "by_workers": forked,
        "by_threads": threads,
        "on_8_cores": {
            "extrapolated": True,
            "seconds": round(step, 2),
            "prompts": STEP_PROMPTS,
            "of_a_step_s": STEP_S,
            "keeps_ahead": step < STEP_S,
        },
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    command = f"python -m benchmarks.loader --prompts {arguments.prompts} --workers {arguments.workers}"
    finish({"command": command, **run(arguments.prompts, arguments.workers)}, arguments.out)


if __name__ == "__main__":
    main()
