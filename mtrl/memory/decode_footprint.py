"""Device memory of sampling, without a device: the prefill of each engine on a fake model, and the engine's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mtrl.memory.live_tensors import LiveTensors
from mtrl.models.backbone import Backbone, prompt_positions
from mtrl.models.families import find_family
from mtrl.protocols import PromptEncoder
from mtrl.rollout.decode.arena import GROWTH
from mtrl.rollout.decode.buffers import Buffers, Mode, Room
from mtrl.rollout.decode.engine import bucket_size, prompts_at_once, read_prompts
from mtrl.rollout.decode.explain import explain_unsupported
from mtrl.rollout.decode.layers import Shape, decoder_shape
from mtrl.rollout.decode.step import Ops, Step
from mtrl.rollout.local import ROWS_AT_ONCE, LocalGenerator
from mtrl.types import Prompt, Sampling

META = torch.device("meta")
WORKSPACE = 32 * 2**20  # cuBLAS on Hopper, for the stream that captures graphs
Parts = dict[str, int]  # bytes by purpose


@dataclass(frozen=True)
class Batch:
    """The largest batch of an engine."""

    prompts: int
    prompt_tokens: int  # per prompt
    sampling: Sampling

    @property
    def rows(self) -> int:
        return self.prompts * self.sampling.n

    @property
    def slots(self) -> int:
        """Responses that are decoded at a time."""
        return min(self.rows, ROWS_AT_ONCE)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sampling.max_new_tokens


# -------------------------------------------------------------------------------------------------------- plain engine
def run_plain_prefill(
    backbone: Backbone, encoder: PromptEncoder, prompts: Sequence[Prompt], sampling: Sampling
) -> None:
    """Run the prefill of the first batch and sample one token."""
    first = prompts[: max(1, ROWS_AT_ONCE // sampling.n)]
    LocalGenerator(backbone, encoder).generate(first, replace(sampling, max_new_tokens=1, version=0))


# -------------------------------------------------------------------------------------------------------- graph engine
@torch.no_grad()
def run_graph_prefill(backbone: Backbone, encoder: PromptEncoder, prompts: Sequence[Prompt]) -> None:
    """Run one prefill batch while the images of all prompts are on the device."""
    inputs = [encoder.inputs(prompt, device=backbone.device) for prompt in prompts]
    few = slice(prompts_at_once(max(len(prompt.ids) for prompt in prompts)))
    read_prompts(backbone, prompts[few], inputs[few], [prompt_positions(each) for each in inputs[few]])


def count_graph_engine(model: Any, compute: torch.dtype, batch: Batch, on_gpu: bool = True) -> Parts:
    """Bytes held from before the prefill to the last token, in addition to activations."""
    lm = find_family(model.config).find_language_model(model)
    output = model.get_output_embeddings().weight
    copied = {id(p): p.numel() for p in (*lm.parameters(), output) if p.dtype != compute}
    weights: Any = Shapes(replace(decoder_shape(lm), vocabulary=len(output)), compute)
    room = Room.for_batch([batch.prompt_tokens] * batch.prompts, [batch.prompt_tokens], batch.sampling.n,
                          batch.sampling.max_new_tokens, ROWS_AT_ONCE)  # fmt: skip
    cuts = batch.sampling.temperature > 0 and batch.sampling.cut
    with LiveTensors() as live:
        buffers = Buffers(weights, room, META)
        step = Step(weights, buffers, bucket_size(room.slots), Mode(False, cuts, cuts), Ops(None, None))
        allocated = live.now
    del step
    cache = sum(each.nbytes for kept in buffers.cache.values() for each in (*kept.prompts, *kept.own))
    states = sum(each.nbytes for kept in buffers.states.values() for each in (kept.state, kept.taps))
    return {
        "own copy of the weights": sum(copied.values()) * compute.itemsize,
        "keys and values": cache,
        "recurrent states": states + states // room.slots * batch.prompts,
        "buffers of a step": allocated - cache - states,
        "unused rest of driver blocks": (2 if copied else 1) * GROWTH + WORKSPACE if on_gpu else 0,
    }


@dataclass(frozen=True)
class Shapes:
    """The attributes of DecodeWeights that the buffers of a step need."""

    shape: Shape
    dtype: torch.dtype
    rank: int = 0  # adapters are small

    def angles(self, positions: int) -> dict[str, Tensor]:
        return {
            kind.positions: torch.empty(2, positions, kind.rotary // 2, dtype=self.dtype, device=META)
            for kind in self.shape.attentions.values()
        }


def explain_plain_engine(model: Any) -> str | None:
    """Why the plain engine decodes this model on a GPU, too; None if the graph engine does."""
    lm = find_family(model.config).find_language_model(model)
    return explain_unsupported(lm, model.get_output_embeddings())
