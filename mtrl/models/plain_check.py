"""Before the first step of a model that no family describes: do our log-probs equal transformers' own?

The reference is the whole model as transformers wrote it, with everything that its Processor returns. It must run
before `Backbone` changes the attention of the model, so the check has two halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mtrl.models.backbone import check_supported
from mtrl.models.families import UndescribedFamily, describe_error, find_family
from mtrl.models.families.undescribed import HOW_TO_ADD, PER_TOKEN, ProcessorEncoder
from mtrl.models.forward import Forward
from mtrl.models.masked_attention import ATTENTION
from mtrl.models.parity import ROUNDING, row_log_probs
from mtrl.types import VISION_POOL, Rollouts

LIMITS = ROUNDING | {torch.float32: 1e-4}  # a wrong mask within images moved a tiny Gemma 3 by 6e-4, rounding by 3e-7
MOST_LOOK_AHEAD = 0.005  # sums of experts depend on other tokens in the last bits; attention is far above it
SMALL_SHARE = 0.1  # a gap must be far smaller than the effect of a picture
PASSED = (
    "the family {family!r} is not described. Its log-probs equal transformers' own (a difference of {gap:.1g} nats per "
    "token). It is slower: every response computes its prompt. Perturbations act on a picture before its Processor "
    "resizes it. Not available: several processes, vLLM, attention maps. " + HOW_TO_ADD
)


@dataclass(frozen=True, eq=False)
class PlainCheck:
    """Responses to prompts with pictures, and their log-probs by transformers."""

    family: str
    rollouts: Rollouts
    expected: Tensor  # of all their tokens, one response after the other
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
        gap = float((found[self.rollouts.mask] - self.expected).abs().mean())
        limit = LIMITS[backbone.model.dtype]
        if not gap <= min(limit, SMALL_SHARE * self.effect):
            raise refuse(
                self.family,
                f"our log-probs differ from transformers' by {gap:.2g} nats per token ({limit:g} is rounding, another "
                f"picture changes them by {self.effect:.2g})",
            )
        return PASSED.format(family=self.family, gap=gap)


def start_plain_check(
    model: Any, encoder: Any, make_rollouts: Callable[[ProcessorEncoder], Rollouts]
) -> PlainCheck | None:
    """The first half, by a model as transformers loads it. None for families that are described, and for a model that
    a script trains a second time."""
    if not isinstance(find_family(model.config), UndescribedFamily):
        return None
    family = model.config.model_type
    try:
        check_supported(model)
        if model.get_decoder().config._attn_implementation == ATTENTION:
            return None
        rollouts = make_rollouts(encoder)
        expected = torch.cat([plain_row(model, encoder, rollouts, row) for row in range(len(rollouts))])
        other = plain_row(model, encoder, invert_pictures(rollouts), 0)
        effect = float((other - expected[: len(other)]).abs().mean())
        if effect == 0:
            raise ValueError("pictures do not change its log-probs")
        if (share := measure_look_ahead(model, encoder, rollouts)) > MOST_LOOK_AHEAD:
            raise ValueError(
                f"its image tokens attend to later ones (which change the first by {share:.0%}), ours to earlier ones"
            )
    except Exception as error:  # a Processor may refuse anything
        raise refuse(family, describe_error(error)) from error
    return PlainCheck(family, rollouts, expected, effect)


def refuse(family: str, reason: str) -> ValueError:
    return ValueError(f"the family {family!r} is not described, and it cannot be used as it is: {reason}; {HOW_TO_ADD}")


def invert_pictures(rollouts: Rollouts) -> Rollouts:
    prompts = (replace(each, media=tuple(255 - medium for medium in each.media)) for each in rollouts.prompts)
    return replace(rollouts, prompts=tuple(prompts))


@torch.no_grad()
def measure_look_ahead(model: Any, encoder: ProcessorEncoder, rollouts: Rollouts) -> float:
    """How much the state of an image's first token changes, relative to its size, if noise replaces the tokens of that
    image after it. 0 for a causal model. In 16 bits log-probs alone would not tell a wrong mask from rounding."""
    image = rollouts.prompts[0].token_pool == VISION_POOL
    first, later = int(image.nonzero()[0]), image.nonzero()[1:, 0]
    decoder, states = model.get_decoder(), []

    def replace_later(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        embeds = kwargs["inputs_embeds"].clone()
        noise = torch.randn(embeds[:, later].shape, generator=torch.Generator().manual_seed(0))
        embeds[:, later] = noise.to(embeds) * embeds.std()
        return args, kwargs | {"inputs_embeds": embeds}

    keep = decoder.register_forward_hook(lambda module, args, output: states.append(output[0][0, first].double()))
    with keep:
        plain_row(model, encoder, rollouts, 0)
        with decoder.register_forward_pre_hook(replace_later, with_kwargs=True):
            plain_row(model, encoder, rollouts, 0)
    before, after = states
    return float((after - before).norm() / before.norm())


@torch.no_grad()
def plain_row(model: Any, encoder: ProcessorEncoder, rollouts: Rollouts, row: int) -> Tensor:
    """[T]: the log-probs of a response by the model's own forward, with all that its Processor returns."""
    prompt, response = rollouts.prompts[int(rollouts.group[row])], rollouts.tokens[row][rollouts.mask[row]]
    inputs = encoder.plain_inputs(prompt)
    if not torch.equal(inputs["input_ids"][0], prompt.ids):
        raise ValueError("its Processor makes other tokens of a prompt than its chat template and tokenizer")
    inputs.pop("labels", None)
    after = {"input_ids": response, "attention_mask": torch.ones_like(response)}
    for name in inputs.keys() & set(PER_TOKEN):
        added = after.get(name, torch.zeros_like(response)).to(inputs[name].dtype)
        inputs[name] = torch.cat([inputs[name], added[None]], dim=1)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    return row_log_probs(model, inputs, response, encoder.forbidden_ids)
