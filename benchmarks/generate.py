"""Sampling 16 prompts x 8 answers on two cores: the local engine against `model.generate`, in one run.

    python -m benchmarks.generate [--rounds 7] [--threads 2] [--out benchmarks/results/generate.json]

Both sample from the embedded model in float32 at temperature 1, at most 32 new tokens, until all answers have ended;
both start from encoded prompts and make their own pixels. `model.generate` gets all prompts in one left-padded batch
with num_return_sequences=8 and the image marks suppressed, as its users would call it. The two take turns after a
warm-up; times and the ratio of the two times are medians over the rounds. The sampled tokens differ (other random
numbers), so tokens per second are reported in addition to seconds; the longest answer sets the number of decode steps.
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from mtrl.bench.environment import environment

PROMPTS, ANSWERS, NEW_TOKENS = 16, 8, 32


def left_padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return pad_sequence([row.flip(0) for row in rows], batch_first=True, padding_value=value).flip(1)


def model_generate(model: Any, encoder: Any, prompts: Sequence[Any], answers: int, new_tokens: int) -> torch.Tensor:
    """New tokens [rows, new tokens], sampled by transformers."""
    device = model.device
    inputs = [encoder.inputs(prompt, device=device) for prompt in prompts]
    ids = left_padded([prompt.ids for prompt in prompts], encoder.pad_id)
    output = model.generate(
        input_ids=ids.to(device),
        attention_mask=left_padded([torch.ones_like(prompt.ids) for prompt in prompts], 0).to(device),
        mm_token_type_ids=left_padded([each["mm_token_type_ids"] for each in inputs], 0).to(device),
        pixel_values=torch.cat([each["pixel_values"] for each in inputs]),
        image_grid_thw=torch.cat([each["image_grid_thw"] for each in inputs]).to(device),
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=answers,
        max_new_tokens=new_tokens, suppress_tokens=list(encoder.forbidden_ids),
    )  # fmt: skip
    return output[:, ids.shape[1] :].cpu()


def contestants() -> dict[str, Callable[[int], int]]:
    """Name -> function that samples a round and returns the number of tokens sampled."""
    from transformers import AutoModelForImageTextToText

    from mtrl.embedded.task import make_question
    from mtrl.models.backbone import Backbone
    from mtrl.models.families import load_encoder
    from mtrl.models.load_model import load_model
    from mtrl.rollout.local import LocalGenerator
    from mtrl.types import Sampling
    from mtrl.utils.embedded_models import MODELS
    from pretraining.evaluation import make_prompts

    path = MODELS["zoo"]
    encoder = load_encoder(path)
    prompts = make_prompts([make_question("test", index) for index in range(PROMPTS)], encoder)
    engine = LocalGenerator(Backbone(load_model(path)), encoder)
    plain: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def ours(number: int) -> int:
        sampling = Sampling(n=ANSWERS, max_new_tokens=NEW_TOKENS, step=number)
        return int(engine.generate(prompts, sampling).mask.sum())

    def theirs(number: int) -> int:
        torch.manual_seed(number)
        output = model_generate(plain, encoder, prompts, ANSWERS, NEW_TOKENS)
        ended = torch.isin(output, torch.tensor(encoder.stop_ids)).long()
        return int((ended.cumsum(1) - ended == 0).sum())  # up to and including the first stop token

    return {"local": ours, "generate": theirs}


def run(rounds: int) -> dict[str, Any]:
    samplers = contestants()
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    tokens: dict[str, list[int]] = {name: [] for name in samplers}
    for number in range(rounds + 1):
        for name, sample in samplers.items():
            begin = time.perf_counter()
            count = sample(number)
            if number > 0:  # round 0 is the warm-up
                seconds[name].append(time.perf_counter() - begin)
                tokens[name].append(count)
    ratios = [theirs / ours for ours, theirs in zip(seconds["local"], seconds["generate"], strict=True)]
    result: dict[str, Any] = {"ratio": round(statistics.median(ratios), 2), "ratios": [round(x, 2) for x in ratios]}
    for name in samplers:
        median = statistics.median(seconds[name])
        result[f"{name}_s"] = round(median, 4)
        result[f"{name}_tokens_per_s"] = round(sum(tokens[name]) / sum(seconds[name]))
        result[f"{name}_tokens"] = round(statistics.mean(tokens[name]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/generate.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    what = f"{PROMPTS} prompts x {ANSWERS} answers of at most {NEW_TOKENS} tokens, embedded model, float32"
    command = f"python -m benchmarks.generate --rounds {arguments.rounds} --threads {arguments.threads}"
    load = round(os.getloadavg()[0], 1)  # load by other processes: above 0 the rates are too low, most with two threads
    settings = {"what": what, "command": command, "load_average_before": load}
    result = {**settings, **run(arguments.rounds), "limit_ratio": 2.0, **environment()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
