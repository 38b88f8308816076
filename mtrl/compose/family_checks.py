"""Run the checks of `models/family_checks.py` on a checkpoint, with prompts and responses that need no data."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from mtrl.models.backbone import Backbone
from mtrl.models.check_candidate import PREFIX_MULTIPLE, Candidate, Finding, NotApplicable, share_weights
from mtrl.models.families import TextEncoder, describe_error, load_encoder
from mtrl.models.family_checks import CHECKS, LARGE_CHECKS
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.rollout.local import LocalGenerator
from mtrl.rollout.responses import make_rollouts
from mtrl.types import FinishReason, Medium, Prompt, Rollouts, Task

logger = logging.getLogger(__name__)
QUESTIONS = (
    "What is to the left of the red square, and how many colours are in the picture? Think step by step.",
    "How many sides has a square?",
    "Which of the two pictures is larger, the first or the second one?",
)
PICTURES: tuple[tuple[tuple[int, int], ...], ...] = (((120, 180),), (), ((60, 90), (150, 50)))  # height and width
LONG_QUESTION = " Count slowly: one, two, three, four, five, six, seven, eight." * 4  # a text model needs it
ANSWER = " The red square is on the left of the picture, and there are three colours in it. So the answer is 3." * 4
GROUP, LENGTHS = (0, 0, 0, 1, 1, 2), (3, 7, 67, 1, 6, 2)  # the question and the tokens of each response


def run_checks(
    path: str,
    encoder: TextEncoder | None = None,
    *,
    dtype: str = "fp32",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    only: Collection[str] = tuple(CHECKS),
    no_room: str | None = None,
) -> Iterator[Finding]:
    """Check a model: a directory or a hub id. `encoder` replaces that of its family. `no_room`: why large checks are
    skipped, which hold gradients or a second copy of the weights. The families of users are registered before, by
    `families.register_family`."""
    encoder = encoder or load_encoder(path, trust_remote_code=trust_remote_code)
    candidate = load_candidate(path, encoder, dtype, device, trust_remote_code)
    for name in (name for name in CHECKS if name in only):
        yield run_check(name, candidate, no_room if name in LARGE_CHECKS else None)


def load_candidate(
    path: str, encoder: TextEncoder, dtype: str, device: str | torch.device, trust_remote_code: bool
) -> Candidate:
    plain = load_model(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    return make_candidate(path, plain, encoder, trust_remote_code)


def make_candidate(path: str, plain: Any, encoder: TextEncoder, trust_remote_code: bool = False) -> Candidate:
    """A loaded model, which must not be patched, as the checks take it."""
    backbone = Backbone(share_weights(plain))
    forward = Forward(backbone, encoder, share_prefix=backbone.can_share_prefix)
    return Candidate(
        path, forward, plain, make_check_rollouts(encoder), LocalGenerator(backbone, encoder), trust_remote_code
    )


def run_check(name: str, candidate: Candidate, skipped: str | None = None) -> Finding:
    """A check that ends in an error has failed: a family that is being written fails in any way."""
    try:
        return CHECKS[name](candidate) if skipped is None else Finding(name, 0.0, None, skipped)
    except NotApplicable as reason:
        return Finding(name, 0.0, None, str(reason))
    except torch.OutOfMemoryError as error:
        return Finding(name, 0.0, None, f"the device has no room for it: {describe_error(error)}")
    except Exception as error:
        logger.debug("the check %r of %s ended in an error", name, candidate.path, exc_info=True)
        return Finding(name, math.nan, 0.0, describe_error(error))


def make_check_rollouts(encoder: TextEncoder) -> Rollouts:
    """Three questions with pictures and without, and responses of the lengths that `check_lengths` asks for."""
    prompts = [make_prompt(encoder, number) for number in range(len(QUESTIONS))]
    answer = encoder.tokenizer.encode(ANSWER, add_special_tokens=False)
    starts = range(0, len(LENGTHS) * 5, 5)  # so that responses differ
    finish: list[FinishReason] = ["stop" for _ in GROUP]
    return make_rollouts(
        prompts,
        GROUP,
        [answer[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)],
        None,
        text=("",) * len(GROUP),
        finish=finish,
        version=0,
        pad_id=encoder.pad_id,
    )


def make_prompt(encoder: TextEncoder, number: int) -> Prompt:
    """A question with its pictures, if the model takes any. Its tokens are no whole number of blocks."""
    sizes = PICTURES[number] if encoder.image_settings is not None else ()
    media = [draw_picture(*encoder.target_size(*size)) for size in sizes]
    text = QUESTIONS[number] + ("" if media or number == 1 else LONG_QUESTION)
    while True:
        content: Any = text
        if encoder.image_settings is not None:
            content = [*({"type": "image"} for _ in media), {"type": "text", "text": text}]
        messages = ({"role": "user", "content": content},)
        task = Task(f"check:{number}", f"question {number + 1}", messages, media=(Medium("image", None),) * len(media))
        prompt = encoder.encode(task, media)
        if number == 0 and len(prompt.ids) <= PREFIX_MULTIPLE:  # pictures of few tokens
            text += LONG_QUESTION
        elif len(prompt.ids) % PREFIX_MULTIPLE:
            return prompt
        else:
            text += " Please."


def draw_picture(height: int, width: int) -> np.ndarray:
    """A red square in front of blue that becomes green to the right, with some noise."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[..., 1] = np.linspace(0, 255, width)[None]
    picture[..., 2] = 255 - picture[..., 1]
    side = min(height, width) // 3
    picture[side : 2 * side, side : 2 * side] = (230, 30, 30)
    return picture ^ np.random.default_rng(0).integers(0, 16, picture.shape, dtype=np.uint8)
