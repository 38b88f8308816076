"""Does vLLM keep memory? Rounds of update and generation on images that are never the same:
`python -m benchmarks.vllm_growth [rounds] [inprocess|process]`. Prints a line of JSON: resident MiB of this process and
its children after the 50th round (or a sixth of all), after the last, and the growth between them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from mtrl.models.families import TextEncoder, load_encoder
from mtrl.models.load_model import load_model
from mtrl.models.state_dicts import exported_weights
from mtrl.models.tiny import make_tiny_checkpoint
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.rollout.vllm.inprocess import VllmInProcess
from mtrl.rollout.vllm.process_engine import VllmProcess
from mtrl.rollout.vllm.settings import make_llm_arguments
from mtrl.types import Medium, Prompt, Sampling, Task, Weights

PROMPTS, FIRST = 4, 50


def new_prompt(encoder: TextEncoder, number: int, place: int) -> Prompt:
    """With a picture of a size and a content that no other has."""
    assert encoder.image_settings is not None
    name, side = f"{number}:{place}", encoder.image_settings.factor
    size = (2 + (number + place) % 7) * side, (2 + number % 5) * side, 3
    picture = np.random.default_rng([number, place]).integers(0, 256, size, dtype=np.uint8)
    content = [{"type": "image"}, {"type": "text", "text": "what is it"}]
    return encoder.encode(
        Task(name, name, ({"role": "user", "content": content},), (Medium("image", None),)), [picture]
    )


def resident() -> int:
    """Bytes of this process and all that it started."""
    own = psutil.Process()
    return sum(each.memory_info().rss for each in [own, *own.children(recursive=True)])


def rounds_of(rounds: int, mode: str = "inprocess", family: str = "qwen2_5_vl") -> list[int]:
    """Resident bytes after each round."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_checkpoint(Path(folder), family, layers=3, hidden=128)
        model, encoder, seen = load_model(path), load_encoder(path), []
        assert encoder.image_settings is not None
        arguments = make_llm_arguments(
            str(path), dtype="float32", max_length=512, extra={"kv_cache_memory_bytes": 2**26}
        )
        images = encoder.image_settings.processor_arguments()
        host = VllmProcess(arguments, images, torch.float32) if mode == "process" else VllmInProcess(arguments, images)
        engine = VllmGenerator(host, encoder, exported_weights(model).keys())
        for number in range(1, rounds + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0001)
            engine.load(Weights(number, exported_weights(model)))
            prompts = [new_prompt(encoder, number, place) for place in range(PROMPTS)]
            engine.generate(prompts, Sampling(n=4, max_new_tokens=16, version=number, step=number))
            seen.append(resident())
        engine.close()
    return seen


def main(rounds: int, mode: str) -> None:
    began, first = time.perf_counter(), min(FIRST, rounds // 6)
    seen = rounds_of(rounds, mode)
    print(json.dumps({
        "mode": mode, "rounds": rounds, f"MiB after {first}": seen[first - 1] >> 20, "MiB after all": seen[-1] >> 20,
        "growth": round(seen[-1] / seen[first - 1] - 1, 4), "seconds": round(time.perf_counter() - began),
    }))  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 300, sys.argv[2] if sys.argv[2:] else "inprocess")
