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
class CuSeqlens:
    """Spans of consecutive queries and of the consecutive keys that they attend to, as the kernels take them."""

    query: Tensor  # [spans + 1] int32, where each begins, from 0
    key: Tensor
    max_query: int  # the most queries of a span
    max_key: int
    causal: bool

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, causal: bool, device: torch.device) -> CuSeqlens:
        """From the numbers of each span's queries and keys."""
        begins = (torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int() for sizes in (queries, keys))
        query, key = (to_device(each, device) for each in begins)
        return cls(query, key, int(queries.max()), int(keys.max()), causal)


class CascadeMask(Tensor):
    """Which tokens of one packed sequence attend to which: a `DocumentMask` for the kernels of this file.

    It is a tensor of four dimensions because transformers passes such masks on to the layers as they are.
    """

    own: CuSeqlens  # every prompt and response by itself
    to_prompts: CuSeqlens | None  # prompts, which read nothing, and their responses in turn; None: no prompt is shared
    prompts: Tensor  # [P] columns of the prompts that responses read

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
            mask.own, mask.to_prompts = CuSeqlens.of(sizes, sizes, True, device), None
            return mask
        mask.own = CuSeqlens.of(sizes, sizes, True, device)
        prompts = sizes[is_prompt]
        responses = torch.zeros_like(prompts).index_add_(0, number[~is_prompt], sizes[~is_prompt])
        queries, keys = torch.stack([prompts, responses], 1), torch.zeros(len(prompts), 2, dtype=torch.long)
        keys[:, 1] = prompts.where(responses > 0, 0)
        mask.to_prompts = CuSeqlens.of(queries.flatten(), keys.flatten(), False, device)
        read = (is_prompt & (responses > 0)[number]).repeat_interleave(sizes)
        mask.prompts = to_device(read.nonzero()[:, 0], device)
        return mask


def cascade_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: CascadeMask, scale: float
) -> tuple[Tensor, Tensor]:
    """[S, heads, D] of one packed sequence, and lse [heads, S] without gradients; several query heads may share a key
    head."""
    output, lse = _CascadeAttention.apply(query, key, value, mask, scale)
    return output, lse


class _CascadeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: CascadeMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        output, lse = flash_forward(query, key, value, mask.own, scale)
        if mask.to_prompts is not None:
            read = flash_forward(query, key[mask.prompts], value[mask.prompts], mask.to_prompts, scale)
            join = compile_function(join_parts, find_token_dims) if query.is_cuda else join_parts
            output, lse = join(output, lse, *read)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.mask, ctx.scale = mask, scale
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        mask, scale, grad = ctx.mask, ctx.scale, grad.contiguous()
        grads = flash_backward(grad, query, key, value, output, lse, mask.own, scale)
        if mask.to_prompts is not None:
            prompts = mask.prompts
            more = flash_backward(grad, query, key[prompts], value[prompts], output, lse, mask.to_prompts, scale)
            grads[0].add_(more[0])
            for each, added in zip(grads[1:], more[1:], strict=True):
                each.index_copy_(0, prompts, each[prompts] + added)
        return *grads, None, None


def join_parts(own: Tensor, own_lse: Tensor, prompt: Tensor, prompt_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [S, heads, D] and lse [heads, S] of the attention to the keys of both parts. The kernel's lse of a query
    without keys is inf."""
    prompt_lse = prompt_lse.where(prompt_lse < torch.inf, -torch.inf)
    lse = torch.logaddexp(own_lse, prompt_lse)
    from_prompt = (prompt_lse - lse).exp().T[..., None]
    joined = torch.lerp(own.to(lse.dtype), prompt.to(lse.dtype), from_prompt)
    return joined.to(own.dtype), lse


def find_token_dims(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """The dimensions of the arguments of `join_parts` that change from call to call."""
    return ((tensor, 1 if tensor.dim() == 2 else 0) for tensor in tensors)


# ------------------------------------------------------------------------------------------------------------- kernels
def flash_forward(query: Tensor, key: Tensor, value: Tensor, spans: CuSeqlens, scale: float) -> tuple[Tensor, Tensor]:
    """Output [T, heads, D] and lse [heads, T]; zeros and inf for queries without keys."""
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, spans.query, spans.key, spans.max_query, spans.max_key, 0.0, spans.causal, False,
        scale=scale,
    )  # fmt: skip
    return output, lse


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, spans: CuSeqlens, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Those of queries are sums in any order, unless torch is told to be
    deterministic."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, output, lse, spans.query, spans.key, spans.max_query, spans.max_key, 0.0,
        spans.causal, *no_dropout, scale=scale,
    )  # fmt: skip
    return grads
