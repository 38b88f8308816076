"""Frozen weights in 4 bits (NF4) by the bitsandbytes library, under the adapters of QLoRA.

A projection's weight is stored packed and dequantized to the dtype of its input for each product, in the forward pass
and again in the backward pass. It is no parameter, so code that trains, saves, shards or gathers parameters does not
see it: ranks that hold a model together hold all of it each. Its packed numbers and their scales are buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

KIND, BLOCK, SCALES = "nf4", 64, 256  # numbers that share a scale, and scales that share one
BYTES = 0.5 + 1 / BLOCK + 4 / (BLOCK * SCALES)  # per number: four bits, and its share of the scales, quantized as well


def import_bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError("this needs the library bitsandbytes: pip install 'mtrl[qlora]'") from error
    return bitsandbytes


class FourBitLinear(nn.Linear):
    """Replaces a projection and takes over its bias. peft adds adapters to it as to any other Linear. It is quantized
    on the device and then held on `keep`; from a projection without numbers (on the meta device) it has none either."""

    def __init__(self, linear: nn.Linear, device: torch.device, keep: torch.device | None = None) -> None:
        nn.Module.__init__(self)
        keep = keep or device
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.data.to(keep), requires_grad=False)
        weight = linear.weight.data
        for name, tensor in (empty_parts(weight) if weight.is_meta else quantized_parts(weight.to(device))).items():
            self.register_buffer(name, tensor.to(keep), persistent=False)

    @property
    def scales(self) -> Any:
        """As bitsandbytes expects them."""
        make = import_bitsandbytes().functional.QuantState
        of_scales = make(self.scale_absmax, code=self.scale_code, blocksize=SCALES, dtype=torch.float32)
        return make(
            self.absmax,
            shape=torch.Size((self.out_features, self.in_features)),
            code=self.code,
            blocksize=BLOCK,
            quant_type=KIND,
            dtype=self.dtype,
            offset=self.offset,
            state2=of_scales,
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight."""
        if self.packed.is_meta:
            return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")
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


def quantized_parts(weight: Tensor) -> dict[str, Tensor]:
    """The tensors that stand for a weight."""
    packed, scales = import_bitsandbytes().functional.quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=True, quant_type=KIND
    )
    return {
        "packed": packed,
        "absmax": scales.absmax,
        "code": scales.code,
        "offset": scales.offset,
        "scale_absmax": scales.state2.absmax,
        "scale_code": scales.state2.code,
    }


def empty_parts(weight: Tensor) -> dict[str, Tensor]:
    """The same tensors on the meta device."""
    numbers = weight.numel()
    scales = -(-numbers // BLOCK)
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "packed": ((-(-numbers // 2), 1), torch.uint8),
        "absmax": ((scales,), torch.uint8),
        "code": ((16,), torch.float32),
        "offset": ((), torch.float32),
        "scale_absmax": ((-(-scales // SCALES),), torch.float32),
        "scale_code": ((256,), torch.float32),
    }
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in sizes.items()}


def quantize(model: nn.Module, names: Iterable[str], device: torch.device, keep: torch.device) -> None:
    """Quantize these projections on the device one after the other, so it holds at most one wide weight."""
    for name in names:
        parent, _, last = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, last, FourBitLinear(getattr(holder, last), device, keep))


def four_bit_layers(model: nn.Module) -> dict[str, FourBitLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FourBitLinear)}


def share_four_bit(target: nn.Module, source: nn.Module) -> None:
    """Give a model the 4-bit weights of another that is built alike: the same tensors."""
    for name, layer in four_bit_layers(source).items():
        target.get_submodule(name)._buffers.update(layer._buffers)
