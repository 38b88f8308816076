"""Does vLLM leak memory? Rounds of update and generation on images that are all different:
`python -m benchmarks.vllm_growth [rounds] [inprocess|process]`. Prints a line of JSON: resident MiB of this process and
its children after the 50th round (or a sixth of all), after the last round, and the growth between them.
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
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.rollout.vllm.inprocess import VllmInProcess
from mtrl.rollout.vllm.process_engine import VllmProcess
from mtrl.rollout.vllm.settings import make_llm_arguments
from mtrl.types import Medium, Prompt, Sampling, Task, Weights
from pretraining.tiny_checkpoints import make_tiny_checkpoint

PROMPTS, FIRST = 4, 50


def new_prompt(encoder: TextEncoder, number: int, index: int) -> Prompt:
    """A prompt with a picture whose size and content are unique."""
    assert encoder.image_settings is not None
    name, side = f"{number}:{index}", encoder.image_settings.factor
    size = (2 + (number + index) % 7) * side, (2 + number % 5) * side, 3
    picture = np.random.default_rng([number, index]).integers(0, 256, size, dtype=np.uint8)
    content = [{"type": "image"}, {"type": "text", "text": "what is it"}]
    return encoder.encode(
        Task(name, name, ({"role": "user", "content": content},), (Medium("image", None),)), [picture]
    )


def resident() -> int:
    """Resident bytes of this process and its children."""
    process = psutil.Process()
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])


def run_rounds(rounds: int, mode: str = "inprocess", family: str = "qwen2_5_vl") -> list[int]:
    """Resident bytes after each round."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_checkpoint(Path(folder), family, layers=3, hidden=128)
        model, encoder, rss = load_model(path), load_encoder(path), []
        assert encoder.image_settings is not None
        arguments = make_llm_arguments(
            str(path), dtype="float32", max_length=512, extra={"kv_cache_memory_bytes": 2**26}
        )
        images = encoder.engine_image_arguments()
        host = VllmProcess(arguments, images, torch.float32) if mode == "process" else VllmInProcess(arguments, images)
        engine = VllmGenerator(host, encoder, exported_weights(model).keys())
        for number in range(1, rounds + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0001)
            engine.load(Weights(number, exported_weights(model)))
            prompts = [new_prompt(encoder, number, index) for index in range(PROMPTS)]
            engine.generate(prompts, Sampling(n=4, max_new_tokens=16, version=number, step=number))
            rss.append(resident())
        engine.close()
    return rss


def main(rounds: int, mode: str) -> None:
    began, first = time.perf_counter(), min(FIRST, rounds // 6)
    rss = run_rounds(rounds, mode)
    print(json.dumps({
        "mode": mode, "rounds": rounds, f"MiB after {first}": rss[first - 1] >> 20, "MiB after all": rss[-1] >> 20,
        "growth": round(rss[-1] / rss[first - 1] - 1, 4), "seconds": round(time.perf_counter() - began),
    }))  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 300, sys.argv[2] if sys.argv[2:] else "inprocess")
