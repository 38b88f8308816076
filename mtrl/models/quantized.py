"""Frozen weights in 4 bits (NF4) by the bitsandbytes library, under the adapters of QLoRA.

A projection's weight is stored packed and dequantized to the dtype of its input for each product, in the forward pass
and again in the backward pass. It is no parameter, so code that trains, saves or moves parameters does not see it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

KIND, BLOCK = "nf4", 64  # numbers that share a scale
BYTES = 0.5 + 1 / BLOCK + 4 / (BLOCK * 256)  # per number: four bits, and its share of the scales, quantized as well


def import_bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError("this needs the library bitsandbytes: pip install 'mtrl[qlora]'") from error
    return bitsandbytes


class FourBitLinear(nn.Linear):
    """Replaces a projection and takes over its bias. peft adds adapters to it as to any other Linear."""

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.data.to(device), requires_grad=False)
        functional = import_bitsandbytes().functional
        packed, self.scales = functional.quantize_4bit(
            linear.weight.data.to(device), blocksize=BLOCK, compress_statistics=True, quant_type=KIND
        )
        self.register_buffer("packed", packed, persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight."""
        return import_bitsandbytes().functional.dequantize_4bit(self.packed, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self, self.bias)


@torch.compiler.disable  # scales are no tensors
def _product(x: Tensor, linear: FourBitLinear, bias: Tensor | None) -> Tensor:
    return _FourBitProduct.apply(x, linear, bias)


class _FourBitProduct(torch.autograd.Function):
    """x @ weight.T + bias; keeps neither the weight nor x for the backward pass: the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: FourBitLinear, bias: Tensor | None) -> Tensor:
        ctx.linear, ctx.dtype = linear, x.dtype
        return nn.functional.linear(x, linear.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient @ ctx.linear.weight.to(gradient.dtype)).to(ctx.dtype), None, None


def quantize(model: nn.Module, names: Iterable[str], device: torch.device) -> None:
    """Quantize these projections on the device one after the other, so it holds at most one wide weight."""
    for name in names:
        parent, _, last = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, last, FourBitLinear(getattr(holder, last), device))


def four_bit_layers(model: nn.Module) -> dict[str, FourBitLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FourBitLinear)}
