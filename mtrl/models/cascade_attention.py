"""Attention of one packed sequence of prompts and responses, by the flash kernels for sequences of many lengths.

A response attends to its prompt and, causally, to itself. One call of the kernel computes the causal part of every
prompt and response, a second one lets the responses of a group read their prompt, and the logarithms of both sums of
exponentials weigh the two outputs:

    out = (exp(own lse) own + exp(prompt lse) prompt) / (exp(own lse) + exp(prompt lse))

A backward kernel recomputes probabilities as exp(score - lse). Given output and lse of the joined attention it returns
the gradients of the joined attention through its part of the keys; those of the queries add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrl.models.device_copy import to_device
from mtrl.models.document_mask import DocumentMask
from mtrl.models.patches import compile_function

WIDEST_HEAD = 256  # that the kernels take


@dataclass(frozen=True, eq=False)
class Spans:
    """Consecutive queries and the consecutive keys that they attend to, as the kernels take them."""

    query_ends: Tensor  # [spans + 1] int32, from 0
    key_ends: Tensor
    longest_query: int
    longest_key: int
    causal: bool

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, causal: bool, device: torch.device) -> Spans:
        """From the sizes of each span's queries and keys."""
        ends = (torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int() for sizes in (queries, keys))
        query_ends, key_ends = (to_device(each, device) for each in ends)
        return cls(query_ends, key_ends, int(queries.max()), int(keys.max()), causal)


class CascadeMask(Tensor):
    """Which tokens of one packed sequence attend to which: a `DocumentMask` for the kernels of this file.

    It is a tensor of four dimensions because transformers passes such masks on to the layers as they are.
    """

    own: Spans  # every prompt and response by itself
    to_prompts: Spans | None  # the responses of each prompt, and the prompt; None: no prompt is shared
    responses: Tensor  # [R] columns of the response tokens
    prompts: Tensor  # [P] columns of the prompts that have any

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    @classmethod
    def from_documents(cls, documents: DocumentMask, device: torch.device) -> CascadeMask:
        assert len(documents.segment) == 1, "one sequence"
        segment, prompt = documents.segment[0], documents.prompt[0]
        mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device).as_subclass(cls)
        names, sizes = segment.unique_consecutive(return_counts=True)
        is_prompt = names == prompt[sizes.cumsum(0) - sizes]
        number = is_prompt.cumsum(0) - 1  # of the prompt that each segment belongs to: responses follow it
        if int(number.bincount().max()) <= 2:  # no prompt has two responses: attention over both is causal
            _, sizes = prompt.unique_consecutive(return_counts=True)
            mask.own, mask.to_prompts = Spans.of(sizes, sizes, True, device), None
            return mask
        tokens = torch.zeros_like(sizes[is_prompt]).index_add_(0, number[~is_prompt], sizes[~is_prompt])
        read = tokens > 0
        mask.own = Spans.of(sizes, sizes, True, device)
        mask.to_prompts = Spans.of(tokens[read], sizes[is_prompt][read], False, device)
        of_prompts = (is_prompt & read[number]).repeat_interleave(sizes)
        mask.responses, mask.prompts = (
            to_device(each.nonzero()[:, 0], device) for each in (segment != prompt, of_prompts)
        )
        return mask


def cascade_attention(query: Tensor, key: Tensor, value: Tensor, mask: CascadeMask, scale: float) -> Tensor:
    """[S, heads, D] of one packed sequence; several query heads may share a key head."""
    output: Tensor = _CascadeAttention.apply(query, key, value, mask, scale)
    return output


class _CascadeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: CascadeMask, scale: float) -> Tensor:
        output, lse = flash_forward(query, key, value, mask.own, scale)
        if mask.to_prompts is not None:
            responses, prompts = mask.responses, mask.prompts
            read = flash_forward(query[responses], key[prompts], value[prompts], mask.to_prompts, scale)
            join = compile_function(join_parts, find_token_dims) if query.is_cuda else join_parts
            joined, joined_lse = join(output[responses], lse[:, responses], *read)
            output.index_copy_(0, responses, joined)
            lse.index_copy_(1, responses, joined_lse)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.mask, ctx.scale = mask, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        mask, scale = ctx.mask, ctx.scale
        grads = flash_backward(grad, query, key, value, output, lse, mask.own, scale)
        if mask.to_prompts is not None:
            rows, prompts = mask.responses, mask.prompts
            more = flash_backward(
                grad[rows],
                query[rows],
                key[prompts],
                value[prompts],
                output[rows],
                lse[:, rows],
                mask.to_prompts,
                scale,
            )
            for each, columns, added in zip(grads, (rows, prompts, prompts), more, strict=True):
                each.index_copy_(0, columns, each[columns] + added)
        return *grads, None, None


def join_parts(own: Tensor, own_lse: Tensor, prompt: Tensor, prompt_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [R, heads, D] and lse [heads, R] of the attention to the keys of both parts."""
    lse = torch.logaddexp(own_lse, prompt_lse)
    from_prompt = (prompt_lse - lse).exp().T[..., None]
    joined = torch.lerp(own.to(lse.dtype), prompt.to(lse.dtype), from_prompt)
    return joined.to(own.dtype), lse


def find_token_dims(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """The dimensions of the arguments of `join_parts` that change from call to call."""
    return ((tensor, 1 if tensor.dim() == 2 else 0) for tensor in tensors)


# ------------------------------------------------------------------------------------------------------------- kernels
def flash_forward(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """Output [T, heads, D] and lse [heads, T]."""
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, spans.query_ends, spans.key_ends, spans.longest_query, spans.longest_key,
        0.0, spans.causal, False, scale=scale,
    )  # fmt: skip
    return output, lse


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Those of queries are sums in any order, unless torch is told to be
    deterministic."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), query, key, value, output, lse.contiguous(), spans.query_ends, spans.key_ends,
        spans.longest_query, spans.longest_key, 0.0, spans.causal, *no_dropout, scale=scale,
    )  # fmt: skip
    return grads
