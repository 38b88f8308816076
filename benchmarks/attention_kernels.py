"""Attention over one packed sequence of prompts and responses: flex_attention next to the flash kernels in two parts.

    python -m benchmarks.attention_kernels [--out FILE]        # CUDA

Milliseconds of a layer forward and backward in bf16, the operations a second that this makes, and errors of the output
and of the gradients relative to float64 (largest difference over largest number; on a smaller case, since float64 has
the whole matrix). Operations count visible pairs alone: 4 a pair and column forward, 10 backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.delta_rule import relative_errors
from benchmarks.environment import finish
from benchmarks.measure import alternating, free_memory
from mtrl.models.cascade_attention import CascadeMask, cascade_attention
from mtrl.models.document_mask import BLOCK, DocumentMask, whole_blocks
from mtrl.models.patches import compile_function

NAMES = ("output", "query", "key", "value")
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    prompts: int
    responses: int  # of each prompt
    prompt: int  # tokens
    response: tuple[int, int]  # tokens, drawn between the two
    heads: int = 16
    key_heads: int = 2
    width: int = 128

    @property
    def small(self) -> Case:
        return replace(self, prompts=1, responses=2, prompt=min(self.prompt, 300), response=(50, 200))


CASES = {
    "3b, 2 x 8 x 1,024": Case(2, 8, 642, (1024, 1024)),
    "3b, 8 x 8 x 256": Case(8, 8, 642, (256, 256)),
    "3b, 2 x 8 x 100 to 2,048": Case(2, 8, 642, (100, 2048)),
    "3b, 1 x 8 x 1,024, prompt of 4,096": Case(1, 8, 4162, (1024, 1024)),
    "3b, 16 prompts, 1 x 1,024": Case(16, 1, 642, (1024, 1024)),
    "7b, 2 x 8 x 1,024": Case(2, 8, 642, (1024, 1024), heads=28, key_heads=4),
    "qwen3.5-4b, 2 x 8 x 1,024": Case(2, 8, 642, (1024, 1024), heads=16, key_heads=4, width=256),
}


class Inputs(NamedTuple):
    documents: DocumentMask
    query: Tensor  # [S, heads, D]
    key: Tensor
    value: Tensor
    weights: Tensor  # of the outputs in the sum that is differentiated


def draw(case: Case, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    random = torch.Generator().manual_seed(0)
    segment, prompt, number = [], [], 0
    for _ in range(case.prompts):
        low, high = case.response
        lengths = torch.randint(low, high + 1, (case.responses,), generator=random)
        sizes = torch.cat([torch.tensor([case.prompt]), lengths])
        segment.append((torch.arange(len(sizes)) + number).repeat_interleave(sizes))
        prompt.append(torch.full((int(sizes.sum()),), number))
        number += len(sizes)
    rows = [torch.cat(each)[None] for each in (segment, prompt)]
    padding = whole_blocks(rows[0].shape[1]) - rows[0].shape[1]
    documents = DocumentMask(*(F.pad(each, (0, padding), value=-1) for each in rows))
    size = documents.segment.shape[1]
    torch.manual_seed(0)
    heads = (case.heads, case.key_heads, case.key_heads)
    tensors = [torch.randn(size, each, case.width, device=CUDA).to(dtype).requires_grad_() for each in heads]
    weights = torch.randn(size, case.heads, case.width, device=CUDA)
    return Inputs(documents, *tensors, weights)


def count_pairs(documents: DocumentMask) -> int:
    """Pairs of a query and a key that it sees."""
    segment, prompt = documents.segment[0], documents.prompt[0]
    _, sizes = segment.unique_consecutive(return_counts=True)
    prompts = {int(name): int((segment == name).sum()) for name in prompt.unique()}
    read = sum(int(((prompt == name) & (segment != name)).sum()) * size for name, size in prompts.items())
    return int((sizes * (sizes + 1) // 2).sum()) + read


def kernels() -> dict[str, Callable[[Inputs], dict[str, Tensor]]]:
    """Outputs and gradients by each kernel."""
    return {name: lambda inputs, make=make: measure(make(inputs.documents), inputs) for name, make in MAKERS.items()}


def make_flex(documents: DocumentMask) -> Callable[..., Tensor]:
    mask, flex = documents.blocks(CUDA), compile_function(flex_attention)

    def attend(*tensors: Tensor) -> Tensor:
        query, key, value = (each.transpose(0, 1)[None] for each in tensors)
        output: Tensor = flex(query, key, value, block_mask=mask, scale=query.shape[3] ** -0.5, enable_gqa=True)
        return output[0].transpose(0, 1)

    return attend


def make_cascade(documents: DocumentMask) -> Callable[..., Tensor]:
    mask = CascadeMask.from_documents(documents, CUDA)
    return lambda query, key, value: cascade_attention(query, key, value, mask, query.shape[2] ** -0.5)[0]


def make_exact(documents: DocumentMask) -> Callable[..., Tensor]:
    mask = documents.dense().to(CUDA)

    def attend(*tensors: Tensor) -> Tensor:
        query, key, value = (each.transpose(0, 1)[None] for each in tensors)
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        scores = (query @ key.transpose(2, 3) * query.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ value)[0].transpose(0, 1)

    return attend


MAKERS: dict[str, Callable[[DocumentMask], Callable[..., Tensor]]] = {
    "flex_attention": make_flex,
    "cascade": make_cascade,
}


def measure(attend: Callable[..., Tensor], inputs: Inputs) -> dict[str, Tensor]:
    tensors = inputs[1:4]
    output = attend(*tensors)
    total = (output.to(torch.promote_types(output.dtype, torch.float32)) * inputs.weights).sum()
    return dict(zip(NAMES, (output.detach(), *torch.autograd.grad(total, tensors)), strict=True))


def exact(inputs: Inputs) -> dict[str, Tensor]:
    wide = [each.detach().double().requires_grad_() for each in inputs[1:4]]
    return measure(make_exact(inputs.documents), Inputs(inputs.documents, *wide, inputs.weights.double()))


def run_case(case: Case) -> dict[str, Any]:
    small = draw(case.small)
    expected = exact(small)
    found: dict[str, Any] = {name: {"errors": relative_errors(run(small), expected)} for name, run in kernels().items()}
    del expected, small
    inputs = draw(case)
    attends = {name: make(inputs.documents) for name, make in MAKERS.items()}
    tensors, grad = inputs[1:4], inputs.weights.to(inputs.query.dtype)

    def both(attend: Callable[..., Tensor]) -> None:
        torch.autograd.grad(attend(*tensors), tensors, grad)

    with torch.no_grad():
        forward = alternating({name: lambda a=attend: a(*tensors) for name, attend in attends.items()}, 10)
    total = alternating({name: lambda a=attend: both(a) for name, attend in attends.items()}, 10)
    operations = count_pairs(inputs.documents) * case.heads * case.width
    for name, result in found.items():
        result["forward_ms"], result["both_ms"] = 1000 * forward[name], 1000 * total[name]
        result["forward_tflops"] = round(4 * operations / forward[name] / 1e12, 1)
        result["both_tflops"] = round(14 * operations / total[name] / 1e12, 1)
    return found | {"tokens": inputs.documents.segment.shape[1], "blocks_of": BLOCK}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    result: dict[str, Any] = {"bench": "attention_kernels", "cases": {}}
    for name, case in CASES.items():
        result["cases"][name] = run_case(case)
        print(name, result["cases"][name], flush=True)
        free_memory()
    finish(result, options.out)


if __name__ == "__main__":
    main()
