"""Nothing leaks: rounds of generation and update on images that are never the same."""

import os
from dataclasses import replace

import psutil
import pytest
import torch
from tiny_models import checkpoint, encoder_of, picture, plain_model_at, prompt
from vllm_engines import INSTALLED, engine_on, in_process

from mtrl.models.weights import exported_weights
from mtrl.types import Sampling, Weights

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

FAMILY = "qwen2_5_vl"


def new_picture(encoder, number, place):
    rows, columns = 2 + (number + place) % 7, 2 + number % 5
    asked = prompt(encoder, f"{number}:{place}", "what", [(rows, columns)])
    return replace(asked, media=(picture(encoder, rows, columns, seed=10 * number + place),))


def resident(rounds):
    """Bytes of this process after each round."""
    engine, model = engine_on(in_process(FAMILY), FAMILY, may_change=True), plain_model_at(checkpoint(FAMILY), FAMILY)
    encoder, process, seen = encoder_of(FAMILY), psutil.Process(os.getpid()), []
    for number in range(1, rounds + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0001)
        engine.load(Weights(number, exported_weights(model)))
        prompts = [new_picture(encoder, number, i) for i in range(4)]
        engine.generate(prompts, Sampling(n=4, max_new_tokens=16, version=number, step=number))
        seen.append(process.memory_info().rss)
    return seen


@pytest.mark.parametrize("rounds, first", [(60, 30), pytest.param(300, 50, marks=pytest.mark.slow)])
def test_memory_does_not_grow(rounds, first):
    seen = resident(rounds)
    assert seen[-1] < 1.05 * seen[first - 1], [each >> 20 for each in seen[::10]]
