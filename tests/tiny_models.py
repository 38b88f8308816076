"""Tiny models of every family, prompts for them, and results of plain Hugging Face models.

The weights are eight times those of a fresh model: attention is then far from uniform, so a wrong position, mask or
image moves log-probs by far more than the tolerances. Recurrent layers amplify rounding with such weights, so theirs
are a smaller multiple.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from mtrl.models.backbone import Backbone
from mtrl.models.families import TextEncoder, load_encoder
from mtrl.models.load_model import load_model
from mtrl.models.parity import plain_inputs as transformers_inputs
from mtrl.rollout.responses import make_rollouts
from mtrl.types import Medium, Prompt, Rollouts, Task
from pretraining.tiny_checkpoints import CHECKED_FAMILIES, make_tiny_checkpoint
from pretraining.tiny_checkpoints import QWEN_FAMILIES as QWEN_FAMILIES
from pretraining.tiny_checkpoints import TEXT_FAMILIES as TEXT_FAMILIES
from pretraining.tiny_checkpoints import TINY_FAMILIES as TINY_FAMILIES
from pretraining.tiny_checkpoints import VISION_FAMILIES as VISION_FAMILIES

logging.disable_progress_bar()

SHARPER, SHARPER_RECURRENT = 8.0, 4.0
LAYERS = 3  # one each for early, middle and late attention
# vLLM's CPU kernels need heads of 32 in attention and of 64 in recurrent layers.
HIDDEN, RECURRENT_HEAD = (64, None) if find_spec("vllm") is None else (128, 64)
_scratch = tempfile.TemporaryDirectory()


@lru_cache
def checkpoint(family: str) -> Path:
    assert family in CHECKED_FAMILIES
    sizes: dict[str, Any] = {"layers": LAYERS, "hidden": HIDDEN, "recurrent_head": RECURRENT_HEAD}
    directory = make_tiny_checkpoint(Path(_scratch.name) / family, family, **sizes)
    model = plain_model_at(directory, family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SHARPER_RECURRENT if family.startswith("qwen3_5") else SHARPER)
    model.save_pretrained(directory)
    return directory


def plain_model_at(directory: Path, family: str) -> PreTrainedModel:
    loader: Any = AutoModelForCausalLM if family in TEXT_FAMILIES else AutoModelForImageTextToText
    return loader.from_pretrained(directory, dtype=torch.float32).eval()


@lru_cache
def plain_model(family: str) -> PreTrainedModel:
    """The model as Hugging Face loads it; tests must not patch or change it."""
    return plain_model_at(checkpoint(family), family)


@lru_cache
def _loaded(family: str) -> PreTrainedModel:
    return load_model(checkpoint(family))


def fresh_backbone(family: str) -> Backbone:
    """A backbone with its own weights; copying the loaded model takes a fifth of the time of loading it again."""
    return Backbone(copy.deepcopy(_loaded(family)))


@lru_cache
def shared_backbone(family: str) -> Backbone:
    """A backbone for tests that change no weights; gradients are left over from earlier tests."""
    return fresh_backbone(family)


@lru_cache
def get_encoder(family: str) -> TextEncoder:
    return load_encoder(checkpoint(family))


def picture(encoder: TextEncoder, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """A picture of noise of rows x columns tokens, or of the only size that the model takes."""
    assert encoder.image_settings is not None
    side = encoder.image_settings.factor
    size = rows * side, columns * side
    if encoder.image_settings.min_pixels == encoder.image_settings.max_pixels:
        size = encoder.target_size(*size)
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def prompt(encoder: TextEncoder, name: str, words: str, sizes: Sequence[tuple[int, int]] = ()) -> Prompt:
    """`sizes`: rows and columns of tokens of each image; the images are between words."""
    media = [picture(encoder, *size, seed=seed) for seed, size in enumerate(sizes)]
    parts: list[dict[str, str]] = []
    for _ in sizes:
        parts += [{"type": "image"}, {"type": "text", "text": " and"}]
    content = [*parts, {"type": "text", "text": words}]
    task = Task(name, name, ({"role": "user", "content": content},), media=(Medium("image", None),) * len(media))
    return encoder.encode(task, media)


def prompts_for(family: str) -> list[Prompt]:
    """Prompts of unequal length: an image with odd windows, text only, several images of other sizes, a small image."""
    sizes: list[list[tuple[int, int]]] = [[(5, 9)], [], [(2, 3), (6, 4), (1, 7)], [(2, 2)]]
    words = ["which colour is it", "how many", "what is left of the red circle and why", "count the dogs"]
    if family in TEXT_FAMILIES:
        sizes = [[] for _ in sizes]
    encoder = get_encoder(family)
    return [prompt(encoder, f"t:{i}", words[i], sizes[i]) for i in range(len(sizes))]


def random_rollouts(prompts: Sequence[Prompt], group: Sequence[int], lengths: Sequence[int], seed: int = 0) -> Rollouts:
    """Random responses of plain tokens. `group`: the prompt of each response."""
    tokens = torch.randint(20, 300, (len(group), max(lengths)), generator=torch.Generator().manual_seed(seed))
    return make_rollouts(
        prompts,
        group,
        [row[:length] for row, length in zip(tokens, lengths, strict=True)],
        None,
        text=("",) * len(group),
        finish=("stop",) * len(group),
        version=0,
        pad_id=0,
    )


def plain_inputs(encoder: TextEncoder, prompt: Prompt, response: Tensor, view: Any = None) -> dict[str, Tensor]:
    """One row for `model.forward`, which computes positions and masks itself."""
    return transformers_inputs(encoder.inputs(prompt, view), prompt, response)


def plain_log_probs(
    family: str, prompt: Prompt, response: Tensor, *, temperature: float = 1.0, view: Any = None, model: Any = None
) -> Tensor:
    """[length, V]: the distribution at every response token, by a plain forward of this one row."""
    encoder = get_encoder(family)
    row = plain_inputs(encoder, prompt, response, view)
    logits = (model or plain_model(family))(**row).logits[0, len(prompt.ids) - 1 : -1] / temperature
    forbidden = torch.zeros(logits.shape[-1], dtype=torch.bool)
    forbidden[list(encoder.forbidden_ids)] = True
    return logits.masked_fill(forbidden, -torch.inf).log_softmax(-1)


def plain_logp(family: str, rollouts: Rollouts, **options: Any) -> Tensor:
    """[N, T], computed row by row; 0 off the mask. `views`: the media of each prompt."""
    views = options.pop("views", None)
    rows = []
    for row, g in enumerate(rollouts.group.tolist()):
        response = rollouts.tokens[row, : int(rollouts.mask[row].sum())]
        view = None if views is None else views[g]
        log_probs = plain_log_probs(family, rollouts.prompts[g], response, view=view, **options)
        picked = log_probs.gather(-1, response[:, None])[:, 0]
        rows.append(torch.nn.functional.pad(picked, (0, rollouts.mask.shape[1] - len(response))))
    return torch.stack(rows)
