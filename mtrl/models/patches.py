"""Changes to how upstream libraries behave, each with its reason and what would make it unnecessary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from mtrl.models.adapters import adapter_layers
from mtrl.models.device_copy import to_device

# Transformers hands segment boundaries (`cu_seq_lens_q`) only to implementations with "flash" in their name.
SEGMENT_ATTENTION = "mtrl_flash_segments"


COMPILED_KINDS = 64  # most kinds of calls (dtypes, dimensions, gradients) that one function is compiled for
MLP_MULTIPLE = 64  # of numbers in a row: tiles of fast kernels are 64 or 128 wide, 128 bytes of bf16 at once


def use_segment_attention(vision_tower: Any) -> None:
    """Attention of the vision tower in one call for all windows of a length.

    Why: without flash-attn, transformers (seen in 5.17 and 5.19) loops in Python over every window of every image in
    every layer; a batch of 256 tiny images spends half a second a step there. Unnecessary once the sdpa path of the
    towers batches its segments.
    """
    vision_tower.config._attn_implementation = SEGMENT_ATTENTION


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, heads, S, D] with each position seeing its own segment; the boundaries are best kept on the CPU."""
    assert attention_mask is None, "segments are given by their boundaries"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [S, heads, D]
    sizes, order, back = _by_length(tuple(cu_seq_lens_q.diff().tolist()), query.device)
    if order is not None:
        q, k, v = q[order], k[order], v[order]
    attended = []
    for length, *of_length in zip(sizes, *(x.split(list(sizes.values())) for x in (q, k, v)), strict=True):
        q_s, k_s, v_s = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in of_length)
        attended.append(F.scaled_dot_product_attention(q_s, k_s, v_s, scale=scaling).transpose(1, 2).flatten(0, 1))
    output = torch.cat(attended) if back is None else torch.cat(attended)[back]
    return output[None], None


@lru_cache(maxsize=32)
def _by_length(lengths: tuple[int, ...], device: torch.device) -> tuple[dict[int, int], Tensor | None, Tensor | None]:
    """Segments sorted by length: how many positions each length has, the order of positions, and the way back.

    No order where all segments have one length.
    """
    sizes = {length: length * lengths.count(length) for length in sorted(set(lengths))}
    if len(sizes) == 1:
        return sizes, None, None
    of_position = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
    order = of_position.argsort(stable=True)
    return sizes, to_device(order, device), to_device(order.argsort(), device)


AttentionInterface.register(SEGMENT_ATTENTION, segment_attention)


def use_linear_patches(vision_tower: Any) -> None:
    """The tower's first layer as a matrix product.

    Why: it is written as a Conv3d whose stride is its kernel, though each patch comes as a row of its own; a library
    that does not see this (bfloat16 on some versions of CUDA) takes many times as long. Unnecessary once transformers
    writes it as the Linear that it is.
    """
    vision_tower.patch_embed.forward = MethodType(embed_patches, vision_tower.patch_embed)


def embed_patches(module: Any, pixels: Tensor) -> Tensor:
    if type(module.proj) is not nn.Conv3d:  # an adapter computes more than its weight says
        return type(module).forward(module, pixels)
    weight = module.proj.weight
    return F.linear(pixels.to(weight.dtype), weight.flatten(1), module.proj.bias)


def use_padded_mlps(vision_tower: Any) -> None:
    """MLPs of an odd inner width computed at the next multiple of 64; for products of 16-bit numbers on CUDA.

    Why: Qwen2.5-VL's are 3,420 wide. A row of so many bf16 numbers is no multiple of 16 bytes, and cuBLAS takes an
    older kernel for it: a product takes 0.82 ms in place of 0.30 on an H200. (In float32 such a row is a multiple.)
    Unnecessary once cuBLAS, or a checkpoint, pads by itself.

    Parameters, gradients and checkpoints keep their shapes: weights are padded as they are narrowed, in every pass. It
    writes them once more, 0.8 GB for the tower of a 3B model, under 1 ms. Backward reads the padded copies, compiled or
    not: of one layer (27 MB) with gradient checkpointing, else of all (0.8 GB). The estimate of memory counts them.
    """
    for module in vision_tower.modules():
        if is_odd_mlp(module):  # a class of its own: what compiles the forward of a module's class compiles this one
            kind: Any = type(module)
            module.__class__ = padded_kind(kind)


def is_odd_mlp(module: Any) -> bool:
    """By its parts. A projection that is not a plain one (an adapter's, a quantized one) is left alone."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(type(part) is nn.Linear for part in parts) and module.gate_proj.out_features % MLP_MULTIPLE > 0


@cache
def padded_kind(kind: Any) -> Any:
    own = {"forward": padded_mlp, "plain_forward": kind.forward}
    return kind if kind.forward is padded_mlp else type(kind.__name__, (kind,), own)


def padded_mlp(module: Any, hidden: Tensor) -> Tensor:
    """The added columns hold act(0) * 0 and meet zeros of the last matrix, so that all else is as it was."""
    if not is_odd_mlp(module):  # an adapter came after the patch
        return module.plain_forward(hidden)
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    more, device = -gate.out_features % MLP_MULTIPLE, hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else gate.weight.dtype

    def widened(x: Tensor, linear: nn.Linear) -> Tensor:
        bias = None if linear.bias is None else F.pad(linear.bias.to(dtype), (0, more))
        return F.linear(x, F.pad(linear.weight.to(dtype), (0, 0, 0, more)), bias)

    inner = module.act_fn(widened(hidden, gate)) * widened(hidden, up)
    return F.linear(inner, F.pad(down.weight.to(dtype), (0, more)), down.bias)


def use_no_dropout(model: Any) -> None:
    """Every dropout off, for training too.

    Why: the ratio of a policy to itself must be 1; dropout makes noise of it. And flex_attention has none, so the
    routes would differ. Unnecessary where a checkpoint's settings have no dropout, as most of them. That of adapters is
    left alone: whoever sets it has been told what it costs.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and ".lora_dropout." not in name:
            module.p = 0.0
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def use_narrow_adapters(model: nn.Module) -> None:
    """Adapters that are wider than the products take their input as it is; autocast narrows their weights.

    Why: peft widens every input to the dtype of the adapter, and autocast narrows it again: two more copies of each
    hidden state for each projection. Unnecessary once peft leaves the dtype to autocast where that is on.
    """
    for layer in adapter_layers(model):
        layer.cast_input_dtype_enabled = False


def use_compiled_pieces(model: nn.Module) -> None:
    """Norms, MLPs and rotary positions compiled, each kind once for all layers and lengths.

    Why: written out in small operations they read and write every hidden state a dozen times; a third of the time of a
    pass of a 3B model on an H200. Unnecessary once transformers' own fused kernels come with it.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__.lower().endswith(("rmsnorm", "mlp")):
            module.forward = MethodType(compiled(kind.forward, all_but_last), module)
        elif kind.__name__.endswith("Attention"):
            module.forward = MethodType(with_compiled_rotary(kind.forward), module)


@cache
def with_compiled_rotary(forward: FunctionType) -> FunctionType:
    """The same function, in a namespace of its own where rotary positions are compiled: models of this process that are
    not ours go on as they were."""
    own = {
        name: compiled(function, all_but_heads)
        for name, function in forward.__globals__.items()
        if name in forward.__code__.co_names and "rotary" in name
    }
    same = FunctionType(
        forward.__code__, forward.__globals__ | own, forward.__name__, forward.__defaults__, forward.__closure__
    )
    same.__kwdefaults__ = forward.__kwdefaults__
    return same


@cache
def compiled(function: Any, lengths: Callable[[Sequence[Tensor]], Iterable[tuple[Tensor, int]]] | None = None) -> Any:
    """The function compiled once for every kind of call (with gradients or without, two dimensions or three, each
    dtype). These are more than torch's limit of 8, beyond which it would silently go back to the plain function.

    `lengths` says which dimensions of which arguments change from call to call; without it all are taken to. Sizes that
    are known make faster kernels, and save most of the time that it takes to find them: torch reasons about every
    unknown size by symbols.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_KINDS)
    if lengths is None:
        return torch.compile(function, dynamic=True)
    run = torch.compile(function)

    def marked(*arguments: Any, **named: Any) -> Any:
        for tensor, dimension in lengths([each for each in arguments if isinstance(each, Tensor)]):
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        return run(*arguments, **named)

    return marked


def all_but_last(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Of hidden states: their width is the model's."""
    return ((tensor, dimension) for tensor in tensors for dimension in range(tensor.dim() - 1))


def all_but_heads(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Of queries and keys, [B, heads, S, D] or [S, heads, D], and of their angles."""
    query, key, *angles = tensors
    rows = ((tensor, dimension) for tensor in (query, key) for dimension in range(0, tensor.dim() - 1, 2))
    return chain(rows, all_but_last(angles))
