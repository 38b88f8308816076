"""Layers with a recurrent state (gated delta nets), where several responses continue one prompt.

Such a layer reads tokens in order and keeps a state instead of keys and values, so no mask can separate the responses
that share a prompt. The prompt is read once, and every response continues from a copy of what it left behind: the
state, and the last inputs of the short convolution before it. Backward sums the gradients of the copies.

Everything else in a layer works token by token, on sequences as they are laid out (`layout.py`). Only convolution and
recurrence run over prompts, then over responses, each padded to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from mtrl.models import patches
from mtrl.models.delta_rule import Solve, find_chunk_dims, gated_delta_rule, solve_chunks
from mtrl.models.device_copy import to_device
from mtrl.models.document_mask import DocumentMask
from mtrl.models.layer_kinds import FULL, RECURRENT, SLIDING, attention_layers, layer_kinds

TAPS = 3  # earlier inputs that the convolution of a layer reads
PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
CHUNK_RULE = "torch_chunk_gated_delta_rule"  # in the modeling files of transformers


@dataclass(frozen=True, eq=False)
class Spans:
    """Padded rows of consecutive positions. `index` [rows, length] counts positions over all sequences; padding repeats
    the last position of its row."""

    index: Tensor
    is_real: Tensor  # [rows, length]

    @classmethod
    def of(cls, starts: Sequence[int], sizes: Sequence[int]) -> Spans:
        offsets = torch.arange(max(sizes, default=0))
        size = torch.tensor(sizes, dtype=torch.long)[:, None]
        return cls(torch.tensor(starts, dtype=torch.long)[:, None] + offsets.minimum(size - 1), offsets < size)

    def to(self, device: torch.device) -> Spans:
        return Spans(to_device(self.index, device), to_device(self.is_real, device))

    def take(self, values: Tensor) -> Tensor:
        """[positions, ..] -> [rows, length, ..]"""
        return values.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)


@dataclass(frozen=True, eq=False)
class StateForks:
    """The prompts and responses in sequences [B, S], and which prompt each response continues."""

    prompts: Spans
    responses: Spans
    parent: Tensor  # [responses]
    tail: Tensor  # [prompts, TAPS] the last positions of each prompt, -1 where it has fewer
    place: Tensor  # [B * S] where each position is among the padded prompts followed by the padded responses

    @classmethod
    def from_mask(cls, documents: DocumentMask, device: torch.device) -> StateForks:
        segment, prompt = documents.segment.flatten(), documents.prompt.flatten()
        names, sizes = segment.unique_consecutive(return_counts=True)
        starts = sizes.cumsum(0) - sizes
        real = names >= 0
        names, sizes, starts = names[real], sizes[real], starts[real]
        parents = prompt[starts]
        is_prompt = parents == names
        prompts, responses = (Spans.of(starts[each].tolist(), sizes[each].tolist()) for each in (is_prompt, ~is_prompt))
        ends = (starts + sizes)[is_prompt]
        tail = ends[:, None] - torch.arange(TAPS, 0, -1)
        tail = tail.where(tail >= starts[is_prompt][:, None], -1)
        place = torch.zeros(len(segment), dtype=torch.long)
        rows = torch.cat([each.index[each.is_real] for each in (prompts, responses)])
        place[rows] = torch.cat([prompts.is_real.flatten(), responses.is_real.flatten()]).nonzero()[:, 0]
        parent = torch.searchsorted(names[is_prompt], parents[~is_prompt])
        return cls(
            prompts.to(device), responses.to(device), *(to_device(each, device) for each in (parent, tail, place))
        )


StateMask = StateForks | Tensor | None


def count_states(config: Any) -> int:
    """Numbers that the recurrent layers keep for a row: their states, and the inputs of their convolutions."""
    if not (layers := config.num_hidden_layers - len(attention_layers(config))):
        return 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    taps = config.linear_conv_kernel_dim * (2 * keys + values)
    return layers * (values * config.linear_key_head_dim + taps)


def explain_layers(language_model: Any, sliding_windows: bool) -> list[str]:
    """Why some layers of a language model would be computed wrongly. `sliding_windows`: its family has them."""
    kinds = layer_kinds(language_model.config)
    reasons = []
    if SLIDING in kinds and not sliding_windows:
        reasons.append("sliding attention")
    if others := set(kinds) - {FULL, RECURRENT, SLIDING}:
        reasons.append(f"layers of the kind {', '.join(sorted(others))}")
    modules: list[Any] = [getattr(layer, "linear_attn", None) for layer in language_model.layers]
    states = [module for module, kind in zip(modules, kinds, strict=False) if kind == RECURRENT]
    if not all(all(hasattr(module, part) for part in PARTS) for module in states):
        reasons.append("its recurrent layers")
    elif any(module.conv1d.kernel_size[0] != TAPS + 1 for module in states):
        reasons.append("the convolution of its recurrent layers")
    return reasons


def use_forked_states(language_model: Any, compiled: bool = False) -> None:
    """Let the recurrent layers take a `StateForks` as their mask. With any other mask they run as transformers wrote
    them, with our recurrence. `compiled` fuses its small operations, a sixth of its time on an H200."""
    solve = patches.compile_function(solve_chunks, find_chunk_dims) if compiled else solve_chunks
    for layer in language_model.layers:
        module = getattr(layer, "linear_attn", None)
        if module is not None:
            module.forward = MethodType(make_forward(type(module).forward, solve), module)


@cache
def make_forward(forward: Any, solve: Solve) -> Any:
    plain = use_own_rule(forward, solve)

    def run(
        module: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Any = None, **named: Any
    ) -> Tensor:
        if isinstance(attention_mask, StateForks):
            return forward_forked(module, hidden_states, attention_mask, solve)
        return plain(module, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **named)

    return run


def use_own_rule(forward: Any, solve: Solve) -> FunctionType:
    """The same function in a namespace with our rule. transformers would take the kernels of another package as
    soon as it can be imported, on any device and with gradients that nobody checked."""
    forward = getattr(forward, "__wrapped__", forward)
    assert CHUNK_RULE in forward.__globals__, f"{forward.__module__} has no {CHUNK_RULE} any more"
    names = forward.__globals__ | {CHUNK_RULE: partial(gated_delta_rule, solve=solve)}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return own


def forward_forked(module: Any, hidden: Tensor, forks: StateForks, solve: Solve = solve_chunks) -> Tensor:
    """The gated delta net over prompts and then over the responses that continue them."""
    mixed = module.in_proj_qkv(hidden).flatten(0, 1)
    beta = module.in_proj_b(hidden).sigmoid().flatten(0, 1)
    decay = -module.A_log.float().exp() * F.softplus(module.in_proj_a(hidden).float() + module.dt_bias).flatten(0, 1)
    weight = module.conv1d.weight
    tail = F.pad(mixed, (0, 0, 0, 1))[forks.tail]  # [prompts, taps, channels]; position -1 is the added zero
    state: Any = None
    outputs = []
    for spans, before in ((forks.prompts, torch.zeros_like(tail)), (forks.responses, tail[forks.parent])):
        if not spans.index.numel():  # all responses are empty
            continue
        inputs = torch.cat([before, spans.take(mixed)], dim=1).transpose(1, 2).to(weight.dtype)
        convolved = F.conv1d(inputs, weight, module.conv1d.bias, groups=weight.shape[0])
        rates, decays = (spans.take(each) * spans.is_real[..., None] for each in (beta, decay))
        convolved = ACT2FN[module.activation](convolved).transpose(1, 2).to(hidden.dtype)
        heads = split_heads(module, convolved)
        output, state = gated_delta_rule(*heads, decays, rates, state, output_final_state=True, solve=solve)
        state = state[forks.parent] if spans is forks.prompts else None
        outputs.append(output.flatten(0, 1))
    output = torch.cat(outputs).index_select(0, forks.place)
    gate = module.in_proj_z(hidden).reshape(-1, module.head_v_dim)
    output = module.norm(output.reshape(-1, module.head_v_dim), gate)
    return module.out_proj(output.reshape(*hidden.shape[:2], -1))


def split_heads(module: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [rows, length, heads, width]; a query and key head serve several value heads."""
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    widths = [module.head_k_dim, module.head_k_dim, module.head_v_dim]
    query, key, value = (
        part.unflatten(2, (-1, width)) for part, width in zip(mixed.split(sizes, dim=2), widths, strict=True)
    )
    shared = module.num_v_heads // module.num_k_heads
    return query.repeat_interleave(shared, dim=2), key.repeat_interleave(shared, dim=2), value
