"""Seconds and memory of a start with 10,000 rows, each with its own 448-px image file.

    python -m benchmarks.data_start [--rows 10000] [--workers N] [--out benchmarks/results/data_start.json]

Each start is a separate process: it loads the tokenizer of a tiny Qwen2.5-VL checkpoint, opens the dataset (scan or
cache) and takes the first 256 prompts. The first start has an empty cache. A start's seconds are those of opening the
dataset and of the first batch; imports and the tokenizer are listed separately. Seconds grow with other load on the
machine, so the load average before each start and the CPU time of the process tree are stored too. Memory is the peak
of the whole process tree, sampled every 50 ms: the sum of resident sizes (shared pages count in every process) and of
proportional sizes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from mtrl.bench.environment import environment

BATCH = 256
LIMITS = {"first_start_s": 60.0, "second_start_s": 3.0, "peak_memory_mb": 1500.0}


def make_data(directory: Path, rows: int, contents: int = 300) -> Path:
    """JPEG files of smooth noise: `contents` different pictures; a JPEG comment makes all `rows` files unique."""
    from PIL import Image

    generator = np.random.default_rng(0)
    pictures = []
    for _ in range(contents):
        coarse = Image.fromarray(generator.integers(0, 256, (28, 28, 3), dtype=np.uint8))
        data = io.BytesIO()
        coarse.resize((448, 448), Image.Resampling.BICUBIC).save(data, "JPEG", quality=90)
        pictures.append(data.getvalue())
    (directory / "images").mkdir()
    with (directory / "train.jsonl").open("w") as out:
        for row in range(rows):
            picture, remark = pictures[row % contents], f"row {row}".encode()
            comment = b"\xff\xfe" + (len(remark) + 2).to_bytes(2, "big") + remark
            (directory / f"images/{row:06d}.jpg").write_bytes(picture[:2] + comment + picture[2:])
            question = f"<image>Question {row}: " + "which of the shapes stands left of the red one, and why? " * 2
            picked = {"prompt": question, "answer": "ABCD"[row % 4], "images": f"images/{row:06d}.jpg"}
            out.write(json.dumps(picked) + "\n")
    return directory / "train.jsonl"


def start(data: Path, model: Path, workers: int | None) -> dict[str, float]:
    """One start, in this process."""
    begin, cpu_before = time.perf_counter(), sum(os.times()[:4])
    from mtrl.data import DataSettings, Sampler, open_dataset
    from mtrl.models.families import load_encoder

    encoder = load_encoder(model, min_pixels=262144, max_pixels=4194304)
    loaded = time.perf_counter()
    dataset = open_dataset(str(data), DataSettings(), encoder, workers=workers)
    opened = time.perf_counter()
    with Sampler(dataset, encoder) as sampler:
        prompts = sampler.take(BATCH)
    taken = time.perf_counter()
    assert len(prompts) == BATCH and len(dataset) == dataset.counts.total
    return {
        "imports_and_tokenizer_s": loaded - begin,
        "open_dataset_s": opened - loaded,
        "first_batch_s": taken - opened,
        "cpu_s": sum(os.times()[:4]) - cpu_before,
        "tokens_per_prompt": float(np.mean(dataset.lengths)),
    }


def measured_start(data: Path, model: Path, cache: Path, workers: int | None) -> dict[str, Any]:
    """Runs `start` in a separate process and adds the peak memory of its process tree."""
    command = [sys.executable, "-m", "benchmarks.data_start", "--start", str(data), "--model", str(model)]
    command += ["--workers", str(workers)] if workers else []
    environment = {**os.environ, "MTRL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    begin, load = time.perf_counter(), os.getloadavg()[0]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    peak = {"rss": 0, "pss": 0}
    done = threading.Event()
    watcher = threading.Thread(target=watch_memory, args=(process.pid, peak, done))
    watcher.start()
    output, _ = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(process.returncode)
    result = json.loads(output.splitlines()[-1])
    result |= {"process_s": time.perf_counter() - begin, "load_average_before": load}
    return result | {"peak_rss_sum_mb": peak["rss"] / 1e6, "peak_pss_mb": peak["pss"] / 1e6}


def watch_memory(pid: int, peak: dict[str, int], done: threading.Event) -> None:
    while not done.wait(0.05):
        try:
            memories = [_memory(process) for process in _tree(pid)]
        except OSError:
            continue  # a process ended meanwhile
        for kind in peak:
            peak[kind] = max(peak[kind], sum(memory[kind] for memory in memories))


def _tree(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _words(task / "children")]
    return [pid, *(process for child in children for process in _tree(child))]


def _memory(pid: int) -> dict[str, int]:
    """Resident and proportional bytes of a process, from the kernel's summary of its mappings."""
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    kilobytes = {words[0]: int(words[1]) for words in lines if words[0] in ("Rss:", "Pss:")}
    return {"rss": 1024 * kilobytes.get("Rss:", 0), "pss": 1024 * kilobytes.get("Pss:", 0)}


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/data_start.json"))
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps(start(arguments.start, arguments.model, arguments.workers)))
        return
    from pretraining.tiny_checkpoints import make_tiny_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        data = make_data(root, arguments.rows)
        model = make_tiny_checkpoint(root / "model", "qwen2_5_vl")
        first = measured_start(data, model, root / "cache", arguments.workers)
        second = measured_start(data, model, root / "cache", arguments.workers)
    measured = {
        "first_start_s": first["open_dataset_s"] + first["first_batch_s"],
        "second_start_s": second["open_dataset_s"] + second["first_batch_s"],
        "peak_memory_mb": max(first["peak_rss_sum_mb"], second["peak_rss_sum_mb"]),
    }
    result = {
        "what": f"{arguments.rows} rows, one 448 x 448 JPEG file each, tiny Qwen2.5-VL checkpoint's encoder",
        "command": "python -m benchmarks.data_start",
        "limits": {name: {"limit": limit, "measured": round(measured[name], 3)} for name, limit in LIMITS.items()},
        "passed": all(measured[name] < limit for name, limit in LIMITS.items()),
        "first_start": {name: round(value, 3) for name, value in first.items()},
        "second_start": {name: round(value, 3) for name, value in second.items()},
        **environment(),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
