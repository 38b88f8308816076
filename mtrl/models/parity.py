"""Compare our log-probs with transformers' own forward, row by row: the first check of real weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtrl.protocols import PromptEncoder
from mtrl.types import Prompt, Rollouts

# Mean difference in nats per token that passes as rounding: far above it, and far below the effect of a wrong position.
ROUNDING = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Gap:
    """Difference between two log-probs of the same tokens, in nats."""

    mean: float
    largest: float
    tokens: int
    limit: float  # for the mean

    @property
    def within(self) -> bool:
        return self.mean <= self.limit  # False for NaN


def log_prob_gap(
    ours: Tensor,
    rollouts: Rollouts,
    model: PreTrainedModel,
    encoder: PromptEncoder,
    *,
    temperature: float,
    compute_dtype: torch.dtype,
) -> Gap:
    """The gap between `ours` [N, T] and the log-probs of `model`, unpatched as transformers loads it."""
    rows = []
    for row, g in enumerate(rollouts.group.tolist()):
        response = rollouts.tokens[row, : int(rollouts.mask[row].sum())]
        precision = torch.autocast(model.device.type, dtype=compute_dtype, enabled=compute_dtype != model.dtype)
        with torch.no_grad(), precision:
            theirs = plain_log_probs(model, encoder, rollouts.prompts[g], response, temperature)
        rows.append((ours[row, : len(response)] - theirs).abs())
    gaps = torch.cat(rows).double()
    return Gap(float(gaps.mean()), float(gaps.max()), len(gaps), ROUNDING[compute_dtype])


def plain_log_probs(
    model: PreTrainedModel,
    encoder: PromptEncoder,
    prompt: Prompt,
    response: Tensor,
    temperature: float = 1.0,
    view: Sequence[np.ndarray] | None = None,
) -> Tensor:
    """[length], on the CPU: by a forward of this one row, which computes positions and masks itself. `view`: other
    media than the prompt's."""
    row = plain_inputs(encoder.inputs(prompt, view), prompt, response)
    return row_log_probs(model, row, response, encoder.forbidden_ids, temperature)


def row_log_probs(
    model: PreTrainedModel,
    row: Mapping[str, Tensor],
    response: Tensor,
    forbidden_ids: Sequence[int],
    temperature: float = 1.0,
) -> Tensor:
    """[length], on the CPU: the log-probs of the response at the end of a row, given the arguments of the forward."""
    options = {"logits_to_keep": len(response) + 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    logits = model(**{name: each.to(model.device) for name, each in row.items()}, **options).logits
    logits = logits[0, -len(response) - 1 : -1].float().cpu() / temperature
    logits = logits.index_fill(1, torch.tensor(forbidden_ids, dtype=torch.long), -torch.inf)
    return logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]


def plain_inputs(inputs: Mapping[str, Tensor], prompt: Prompt, response: Tensor) -> dict[str, Tensor]:
    """Arguments of the model's own forward for this one row, from an encoder's inputs: images and videos separate."""
    ids = torch.cat([prompt.ids, response])[None]
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("mm_token_type_ids", "token_type_ids"):  # what is an image
        if name in inputs:
            row[name] = torch.cat([inputs[name], torch.zeros_like(response)])[None]
    if "image_grid_thw" not in inputs:  # no media, or one entry of every argument for each image
        return row | {name: each for name, each in inputs.items() if name not in ("position_ids", *row)}
    clips, grids = [medium.clip for medium in prompt.task.media], inputs["image_grid_thw"]
    patches = inputs["pixel_values"].split(grids.prod(1).tolist())
    for names, chosen in (
        (("pixel_values", "image_grid_thw"), [i for i, clip in enumerate(clips) if clip is None]),
        (("pixel_values_videos", "video_grid_thw"), [i for i, clip in enumerate(clips) if clip is not None]),
    ):
        if chosen:
            row |= dict(zip(names, (torch.cat([patches[i] for i in chosen]), grids[chosen]), strict=True))
    if "second_per_grid_ts" in inputs:
        row["second_per_grid_ts"] = inputs["second_per_grid_ts"]
    return row
