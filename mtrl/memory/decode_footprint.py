"""What sampling holds in device memory, before there is a device: each engine's passes for a model without numbers, and
what it holds beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mtrl.models.backbone import Backbone, prompt_positions
from mtrl.models.model_size import model_size
from mtrl.protocols import PromptEncoder
from mtrl.rollout.decode.arena import GROWTH
from mtrl.rollout.decode.buffers import Buffers, Mode, Room
from mtrl.rollout.decode.engine import bucket_size, prompts_at_once, read_prompts
from mtrl.rollout.decode.layers import Shape, decoder_shape, why_unknown
from mtrl.rollout.decode.step import Ops, Step
from mtrl.rollout.local import LocalGenerator, held_at_last
from mtrl.types import Prompt, Sampling
from mtrl.utils.live_tensors import LiveTensors

NOWHERE = torch.device("meta")
WORKSPACE = 32 * 2**20  # of cuBLAS on Hopper, for the stream in which graphs are captured
Parts = dict[str, int]


@dataclass(frozen=True)
class Batch:
    """The largest that is sampled at once."""

    prompts: int
    prompt_tokens: int  # of each
    sampling: Sampling

    @property
    def rows(self) -> int:
        return self.prompts * self.sampling.n

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sampling.max_new_tokens


# ---------------------------------------------------------------------------------------------------- the plain engine
def plain_pass(backbone: Backbone, encoder: PromptEncoder, prompts: Sequence[Prompt], sampling: Sampling) -> None:
    """Prompts are read and a first token is chosen."""
    LocalGenerator(backbone, encoder).generate(prompts, replace(sampling, max_new_tokens=1, version=0))


def plain_parts(model: Any, compute: torch.dtype, batch: Batch) -> Parts:
    """Of the last token, when the prompts' activations are gone."""
    return held_at_last(model_size(model), model.dtype, compute, batch.rows, batch.tokens, batch.sampling.cut)


# ------------------------------------------------------------------------------------------------- the engine of graphs
@torch.no_grad()
def graphs_pass(backbone: Backbone, encoder: PromptEncoder, prompts: Sequence[Prompt]) -> None:
    """As many prompts as are read at once; the images of all are there."""
    inputs = [encoder.inputs(prompt, device=backbone.device) for prompt in prompts]
    few = slice(prompts_at_once(max(len(prompt.ids) for prompt in prompts)))
    read_prompts(backbone, prompts[few], inputs[few], [prompt_positions(each) for each in inputs[few]])


def graphs_parts(model: Any, compute: torch.dtype, batch: Batch, on_gpu: bool = True) -> Parts:
    """From before the prompts are read to the last token, beside activations."""
    lm = getattr(model.model, "language_model", model.model)
    output = model.get_output_embeddings().weight
    followed = {id(p): p.numel() for p in (*lm.parameters(), output) if p.dtype != compute}
    weights: Any = Shapes(replace(decoder_shape(lm), vocabulary=len(output)), compute)
    room = Room.for_batch([batch.prompt_tokens] * batch.prompts, [batch.prompt_tokens], batch.sampling.n,
                          batch.sampling.max_new_tokens)  # fmt: skip
    cuts = batch.sampling.temperature > 0 and batch.sampling.cut
    with LiveTensors() as live:
        buffers = Buffers(weights, room, NOWHERE)
        step = Step(weights, buffers, bucket_size(room.slots), Mode(False, cuts, cuts), Ops(None, None))
        made = live.now
    del step
    cache = sum(each.nbytes for each in vars(buffers.cache).values())
    return {
        "own copy of the weights": sum(followed.values()) * compute.itemsize,
        "keys and values": cache,
        "buffers of a step": made - cache,
        "rest of what the driver gives at a time": (2 if followed else 1) * GROWTH + WORKSPACE if on_gpu else 0,
    }


@dataclass(frozen=True)
class Shapes:
    """Of DecodeWeights what buffers ask for."""

    shape: Shape
    dtype: torch.dtype
    rank: int = 0  # adapters are small

    def angles(self, positions: int) -> tuple[Tensor, Tensor]:
        cos, sin = torch.empty(2, positions, self.shape.width // 2, dtype=self.dtype, device=NOWHERE)
        return cos, sin


def decodes_by_graphs(model: Any) -> bool:
    """Whether the engine of graphs knows the layers of this model."""
    lm = getattr(model.model, "language_model", model.model)
    return why_unknown(lm, model.get_output_embeddings()) is None
