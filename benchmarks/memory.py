"""Peaks of device memory: an update with bf16 and with float32 master weights, and attention masses against length.

    python -m benchmarks.memory [--size 3b] [--out benchmarks/results/memory.json]

Needs a GPU. `held` is the memory that stays allocated between steps (weights and optimizer state; gradients are freed);
a peak is the most that was allocated at once. The update learns from 8 prompts x 8 responses x 256 tokens and 576 image
tokens, with checkpointing. Masses are read for one group of 8 responses, whose length doubles from row to row:
the memory of the pass beyond the weights must grow no faster than the length. The last line is the result as JSON;
`tests/unit/test_doctor.py` compares the estimate of `mtrl doctor` (`expected`) with it.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig

from benchmarks.environment import finish
from benchmarks.forward import BUDGET, SHAPES, TEXT_TOKENS, Bench
from benchmarks.measure import peak_gb
from mtrl.algorithms.losses import Loss
from mtrl.bench import shapes
from mtrl.memory.estimate import MemoryEstimate, estimate
from mtrl.memory.plan import Plan
from mtrl.memory.preflight import Limits
from mtrl.types import Needs, Sampling
from mtrl.workers.micro_batches import MicroBatching

RESPONSES = 8


def allocated_gb() -> float:
    gc.collect()
    torch.cuda.empty_cache()
    return round(torch.cuda.memory_allocated() / 2**30, 2)


def measure_update(size: str, weights: str) -> dict[str, float]:
    bench = Bench(size, "cuda", weights, compiled=True)
    count, length, side = SHAPES[size]
    batch = bench.batch(bench.rollouts(count, count, (length, length), [side]))
    peaks = {"weights_gb": allocated_gb()}
    actor = bench.actor("shared")
    actor.update([batch], Loss())
    peaks["held_gb"] = allocated_gb()
    with peak_gb(peaks, "update_peak_gb"):
        actor.update([batch], Loss())
    with peak_gb(peaks, "two_views_peak_gb"):
        bench.probe("shared", batch.rollouts, estimator="low_var_kl")
    return peaks


def expected(size: str, weights: str) -> MemoryEstimate:
    """The estimate of `mtrl doctor` for the same update and probe."""
    shape = shapes.SHAPES[size]
    text = {**shape.text, "tie_word_embeddings": True}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=dict(shape.vision), tie_word_embeddings=True)
    count, length, side = SHAPES[size]
    limits = Limits(
        prompts=count, prompts_per_update=count, sampling=Sampling(n=count, max_new_tokens=length),
        prompt_tokens=TEXT_TOKENS + shape.image_tokens(side), max_pixels=side**2,
        update=MicroBatching(at_least=BUDGET["update"]), probe=MicroBatching(at_least=BUDGET["probe"]),
        needs=Needs("old_logprobs", "entropy", "dependency"),
    )  # fmt: skip
    return estimate(config, Plan(limits, weights, "bf16", checkpointing=True, on_gpu=True, packed=True, compiled=True))


def measure_lengths(size: str) -> list[dict[str, float]]:
    bench = Bench(size, "cuda", "bf16", compiled=True)
    _, shortest, side = SHAPES[size]
    weights = torch.cuda.memory_allocated() / 2**30
    table = []
    for length in (shortest, 2 * shortest, 4 * shortest, 8 * shortest):
        rollouts = bench.rollouts(1, RESPONSES, (length, length), [side])
        row: dict[str, float] = {"response_tokens": length, "tokens": bench.tokens(rollouts)}
        forward = bench.routes["shared"]
        for name, needs in (("plain_gb", ()), ("with_attention_gb", ("attention_mass",))):
            with peak_gb(row, name):
                forward.signals(rollouts, Needs("old_logprobs", *needs))
            row[name] = round(row[name] - weights, 3)
        table.append(row)
        print(row, flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="3b")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.memory measures device memory and needs a GPU")
    result: dict[str, Any] = {"bench": "memory", "size": arguments.size}
    for weights in ("bf16", "fp32"):
        result[f"weights_{weights}"] = measure_update(arguments.size, weights)
        print(weights, result[f"weights_{weights}"], flush=True)
        allocated_gb()
    result["attention_by_length"] = measure_lengths(arguments.size)
    finish(result, arguments.out)


if __name__ == "__main__":
    main()
