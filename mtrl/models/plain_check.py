"""Before the first step of a model that no family describes: do our log-probs equal transformers' own?

The reference is the whole model as transformers wrote it, with everything that its Processor returns. It must run
before `Backbone` changes the attention of the model, so the check has two halves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrl.models.backbone import check_supported
from mtrl.models.families import UndescribedFamily, describe_error, find_family
from mtrl.models.families.undescribed import HOW_TO_ADD, PER_TOKEN, ProcessorEncoder
from mtrl.models.forward import Forward
from mtrl.models.masked_attention import ATTENTION
from mtrl.models.parity import ROUNDING
from mtrl.types import FinishReason, Medium, Prompt, Rollouts, Task

SIZES = [[(120, 200)], [(90, 64), (64, 150)], []]  # of the pictures of each prompt
ROWS, LENGTH = [0, 0, 1, 2], 12
LIMITS = ROUNDING | {torch.float32: 1e-4}  # a wrong mask within images moved a tiny Gemma 3 by 6e-4, rounding by 3e-7
SMALL_SHARE = 0.1  # a gap must be far smaller than the effect of a picture
PASSED = (
    "the family {family!r} is not described. Its log-probs equal transformers' own (a difference of {gap:.1g} nats per "
    "token). It is slower: every response computes its prompt. Perturbations act on a picture before its Processor "
    "resizes it. Not available: several processes, vLLM, attention maps. " + HOW_TO_ADD
)


@dataclass(frozen=True, eq=False)
class PlainCheck:
    """Random responses to prompts with pictures of noise, and their log-probs by transformers."""

    family: str
    rollouts: Rollouts
    expected: Tensor  # [N, T]
    effect: float  # how much the log-probs change if the colours of a picture are inverted

    def finish(self, forward: Forward) -> str:
        """Compare with our own log-probs. Returns a line for the user; raises a ValueError if they differ."""
        backbone = forward.backbone
        narrow, backbone.compute_dtype = backbone.compute_dtype, backbone.model.dtype  # without the noise of rounding
        try:
            found = replace(forward, temperature=1.0).signals(self.rollouts).old_logprobs
        except Exception as error:  # features of another number, positions of another shape, ..
            raise refuse(self.family, f"our pass over it fails ({describe_error(error)})") from error
        finally:
            backbone.compute_dtype = narrow
        assert found is not None
        gap, limit = float((found - self.expected).abs().mean()), LIMITS[backbone.model.dtype]
        if not gap <= min(limit, SMALL_SHARE * self.effect):
            raise refuse(
                self.family,
                f"our log-probs differ from transformers' by {gap:.2g} nats per token ({limit:g} is rounding, another "
                f"picture changes them by {self.effect:.2g})",
            )
        return PASSED.format(family=self.family, gap=gap)


def start_plain_check(model: Any, encoder: Any) -> PlainCheck | None:
    """The first half, by a model as transformers loads it. None for families that are described, and for a model that
    a script trains a second time."""
    if not isinstance(find_family(model.config), UndescribedFamily):
        return None
    family = model.config.model_type
    try:
        check_supported(model)
        if model.get_decoder().config._attn_implementation == ATTENTION:
            return None
        rollouts = make_random_rollouts(encoder)
        expected = torch.stack([plain_row(model, encoder, rollouts, row) for row in range(len(rollouts))])
        other = plain_row(model, encoder, invert_pictures(rollouts), 0)
        effect = float((other - expected[0]).abs().mean())
        if effect == 0:
            raise ValueError("pictures do not change its log-probs")
    except Exception as error:  # a Processor may refuse anything
        raise refuse(family, describe_error(error)) from error
    return PlainCheck(family, rollouts, expected, effect)


def refuse(family: str, reason: str) -> ValueError:
    return ValueError(f"the family {family!r} is not described, and it cannot be used as it is: {reason}; {HOW_TO_ADD}")


def make_random_rollouts(encoder: ProcessorEncoder) -> Rollouts:
    prompts = [make_prompt(encoder, number, sizes) for number, sizes in enumerate(SIZES)]
    allowed = sorted(set(range(len(encoder.tokenizer))) - {*encoder.forbidden_ids, *encoder.tokenizer.all_special_ids})
    chosen = torch.randint(len(allowed), (len(ROWS), LENGTH), generator=torch.Generator().manual_seed(0))
    rows, tokens = len(ROWS), torch.tensor(allowed)[chosen]
    finish: tuple[FinishReason, ...] = tuple("stop" for _ in ROWS)
    return Rollouts(
        tuple(prompts), torch.tensor(ROWS), tokens, torch.ones_like(tokens, dtype=torch.bool),
        torch.zeros(tokens.shape), rows * ("",), finish, torch.zeros(rows, dtype=torch.long),
    )  # fmt: skip


def make_prompt(encoder: ProcessorEncoder, number: int, sizes: list[tuple[int, int]]) -> Prompt:
    random = np.random.default_rng(number)
    media = [random.integers(0, 256, (*encoder.target_size(*size), 3), dtype=np.uint8) for size in sizes]
    content = [*({"type": "image"} for _ in sizes), {"type": "text", "text": "Which colours do you see, and why?"}]
    marks = tuple(Medium("image", None) for _ in sizes)
    return encoder.encode(Task(f"check:{number}", "the check", ({"role": "user", "content": content},), marks), media)


def invert_pictures(rollouts: Rollouts) -> Rollouts:
    prompts = (replace(each, media=tuple(255 - medium for medium in each.media)) for each in rollouts.prompts)
    return replace(rollouts, prompts=tuple(prompts))


@torch.no_grad()
def plain_row(model: Any, encoder: ProcessorEncoder, rollouts: Rollouts, row: int) -> Tensor:
    """[T]: the log-probs of a response by the model's own forward, with all that its Processor returns."""
    prompt, response = rollouts.prompts[int(rollouts.group[row])], rollouts.tokens[row]
    inputs = encoder.plain_inputs(prompt)
    if not torch.equal(inputs["input_ids"][0], prompt.ids):
        raise ValueError("its Processor makes other tokens of a prompt than its chat template and tokenizer")
    inputs.pop("labels", None)
    after = {"input_ids": response, "attention_mask": torch.ones_like(response)}
    for name in inputs.keys() & set(PER_TOKEN):
        added = after.get(name, torch.zeros_like(response)).to(inputs[name].dtype)
        inputs[name] = torch.cat([inputs[name], added[None]], dim=1)
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    logits = model(**inputs).logits[0, -len(response) - 1 : -1].float().cpu()
    logits[:, list(encoder.forbidden_ids)] = -torch.inf
    return logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
