"""Inputs of the benchmarks: a model of random weights, prompts with pictures of noise, and random responses. The
shapes are those of `mtrl bench` (mtrl/bench/shapes.py)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from mtrl.bench.random_run import encode_question, random_questions
from mtrl.bench.shapes import write_files
from mtrl.models.backbone import Backbone
from mtrl.models.families import TextEncoder, load_encoder
from mtrl.models.load_model import DTYPES
from mtrl.models.random_model import draw_model
from mtrl.types import Prompt, Rollouts


def random_backbone(
    size: str, device: str, weights: str, compute: str | None = None, *, checkpointing: bool = True, seed: int = 0
) -> tuple[TextEncoder, Backbone]:
    """`weights` and `compute`: bf16 or fp32; weights of fp32 with bf16 products are master weights."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_files(Path(directory), size)
        encoder, model = load_encoder(path), draw_model(path, device, weights, seed)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return encoder, Backbone(model.eval(), DTYPES[compute or weights])


def random_prompts(
    encoder: TextEncoder, count: int, sides: Sequence[int], text_tokens: int, seed: int = 0
) -> list[Prompt]:
    """Prompts of a square picture (sides in pixels, in turn) and `text_tokens` other tokens, template included."""
    questions = random_questions(encoder, count, sides, text_tokens, seed)
    return [encode_question(encoder, number, text, image) for number, (text, image) in enumerate(questions)]


def random_rollouts(prompts: Sequence[Prompt], responses: int, lengths: tuple[int, int], seed: int = 0) -> Rollouts:
    """`responses` of random plain tokens per prompt, with lengths drawn between the two."""
    draw = torch.Generator().manual_seed(seed)
    rows = len(prompts) * responses
    length = torch.randint(lengths[0], lengths[1] + 1, (rows,), generator=draw)
    mask = torch.arange(lengths[1]) < length[:, None]
    tokens = torch.randint(30, 480, mask.shape, generator=draw).where(mask, 0)
    return Rollouts(
        prompts=tuple(prompts), group=torch.arange(len(prompts)).repeat_interleave(responses), tokens=tokens, mask=mask,
        rollout_logprobs=torch.full(mask.shape, -7.0), text=("",) * rows, finish_reason=("length",) * rows,
        version=torch.zeros(rows, dtype=torch.long),
    )  # fmt: skip
