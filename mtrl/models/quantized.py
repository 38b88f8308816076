"""Frozen weights in 4 bits (NF4), by the bitsandbytes library: what adapters learn beside in QLoRA.

A projection's weight is kept packed, and is made again, in the dtype of its input, for each product: on the way forward
and once more on the way back. What is quantized is no parameter, so nothing that looks for weights to train, to save or
to move finds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

KIND, BLOCK = "nf4", 64  # numbers that share a scale
BYTES = 0.5 + 1 / BLOCK + 4 / (BLOCK * 256)  # of a number: four bits, and its part of scales, which are quantized too


def library() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError("this needs the library bitsandbytes: pip install 'mtrl[qlora]'") from error
    return bitsandbytes


class FourBitLinear(nn.Linear):
    """In the place of a projection, whose bias it takes over. peft puts the adapters beside it that it puts beside
    every other."""

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.data.to(device), requires_grad=False)
        functional = library().functional
        packed, self.scales = functional.quantize_4bit(
            linear.weight.data.to(device), blocksize=BLOCK, compress_statistics=True, quant_type=KIND
        )
        self.register_buffer("packed", packed, persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight that it stands for, made for whoever asks."""
        return library().functional.dequantize_4bit(self.packed, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self, self.bias)


@torch.compiler.disable  # scales are no tensors
def _product(x: Tensor, linear: FourBitLinear, bias: Tensor | None) -> Tensor:
    return _FourBitProduct.apply(x, linear, bias)


class _FourBitProduct(torch.autograd.Function):
    """x @ weight.T + bias, which keeps neither the weight nor x for the way back: the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: FourBitLinear, bias: Tensor | None) -> Tensor:
        ctx.linear, ctx.dtype = linear, x.dtype
        return nn.functional.linear(x, linear.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient @ ctx.linear.weight.to(gradient.dtype)).to(ctx.dtype), None, None


def quantize(model: nn.Module, names: Iterable[str], device: torch.device) -> None:
    """Puts these projections into 4 bits on the device, one after the other, so that there is never more than one wide
    weight beside them there."""
    for name in names:
        parent, _, last = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, last, FourBitLinear(getattr(holder, last), device))


def four_bit_layers(model: nn.Module) -> dict[str, FourBitLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FourBitLinear)}
