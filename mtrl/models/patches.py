"""Patches of upstream libraries, each with its reason and what would make it unnecessary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from mtrl.models.device_copy import to_device

# transformers passes segment boundaries (`cu_seq_lens_q`) only to implementations with "flash" in their name.
SEGMENT_ATTENTION = "mtrl_flash_segments"

COMPILED_KINDS = 64  # most kinds of calls (dtypes, dimensions, gradients) that one function is compiled for
MLP_MULTIPLE = 64  # numbers in a row: tiles of fast kernels are 64 or 128 wide, 128 bytes of bf16 at once


def use_segment_attention(vision_tower: Any) -> None:
    """Run the vision tower's attention in one call for all windows of the same length.

    Why: without flash-attn, transformers (5.17 and 5.19) loops in Python over every window of every image in every
    layer; a batch of 256 tiny images spends half a second per step there. Unnecessary once the sdpa path of the towers
    batches its segments.
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
    """[1, heads, S, D]; each position attends to its own segment. Keep the boundaries on the CPU for speed."""
    assert attention_mask is None, "segments are given by their boundaries"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [S, heads, D]
    sizes, order, inverse = _sort_by_length(tuple(cu_seq_lens_q.diff().tolist()), query.device)
    if order is not None:
        q, k, v = q[order], k[order], v[order]
    attended = []
    for length, *qkv in zip(sizes, *(x.split(list(sizes.values())) for x in (q, k, v)), strict=True):
        q_s, k_s, v_s = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in qkv)
        attended.append(F.scaled_dot_product_attention(q_s, k_s, v_s, scale=scaling).transpose(1, 2).flatten(0, 1))
    output = torch.cat(attended) if inverse is None else torch.cat(attended)[inverse]
    return output[None], None


@lru_cache(maxsize=32)
def _sort_by_length(
    lengths: tuple[int, ...], device: torch.device
) -> tuple[dict[int, int], Tensor | None, Tensor | None]:
    """Segments sorted by length: positions per length, the order of positions and its inverse (None if all segments
    have the same length)."""
    sizes = {length: length * lengths.count(length) for length in sorted(set(lengths))}
    if len(sizes) == 1:
        return sizes, None, None
    order = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths)).argsort(stable=True)
    return sizes, to_device(order, device), to_device(order.argsort(), device)


AttentionInterface.register(SEGMENT_ATTENTION, segment_attention)


def use_linear_patches(vision_tower: Any) -> None:
    """Compute the tower's first layer as a matrix product.

    Why: it is a Conv3d whose stride equals its kernel, though each patch comes as a separate row; a library that does
    not notice (bfloat16 on some CUDA versions) takes many times as long. Unnecessary once transformers uses a Linear.
    """
    vision_tower.patch_embed.forward = MethodType(embed_patches, vision_tower.patch_embed)


def embed_patches(module: Any, pixels: Tensor) -> Tensor:
    if type(module.proj) is not nn.Conv3d:  # an adapter computes more than its weight
        return type(module).forward(module, pixels)
    weight = module.proj.weight
    return F.linear(pixels.to(weight.dtype), weight.flatten(1), module.proj.bias)


def use_padded_mlps(vision_tower: Any) -> None:
    """Compute MLPs of an odd inner width at the next multiple of 64; for 16-bit products on CUDA.

    Why: Qwen2.5-VL's are 3,420 wide. A row of so many bf16 numbers is no multiple of 16 bytes, and cuBLAS takes an
    older kernel for it: a product takes 0.82 ms instead of 0.30 on an H200. (In float32 such a row is a multiple.)
    Unnecessary once cuBLAS or a checkpoint pads.

    Parameters, gradients and checkpoints keep their shapes: weights are padded when they are narrowed, in every pass.
    This writes them once more: 0.8 GB for the tower of a 3B model, under 1 ms. Backward reads the padded copies,
    compiled or not: of one layer (27 MB) with gradient checkpointing, otherwise of all (0.8 GB). The memory estimate
    counts them.
    """
    for module in vision_tower.modules():
        if is_odd_mlp(
            module
        ):  # its class changes: code that compiles the forward of a module's class compiles this one
            kind: Any = type(module)
            module.__class__ = make_padded_class(kind)


def is_odd_mlp(module: Any) -> bool:
    """Whether a module is a gated MLP to pad. Projections with an adapter or quantized weights are left alone."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(type(part) is nn.Linear for part in parts) and module.gate_proj.out_features % MLP_MULTIPLE > 0


@cache
def make_padded_class(kind: Any) -> Any:
    own = {"forward": padded_mlp, "plain_forward": kind.forward}
    return kind if kind.forward is padded_mlp else type(kind.__name__, (kind,), own)


def padded_mlp(module: Any, hidden: Tensor) -> Tensor:
    """The added columns hold act(0) * 0 and meet zeros of the last matrix, so the result does not change."""
    if not is_odd_mlp(module):  # an adapter was added after the patch
        return module.plain_forward(hidden)
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    more, device = -gate.out_features % MLP_MULTIPLE, hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else gate.weight.dtype

    def pad_linear(x: Tensor, linear: nn.Linear) -> Tensor:
        bias = None if linear.bias is None else F.pad(linear.bias.to(dtype), (0, more))
        return F.linear(x, F.pad(linear.weight.to(dtype), (0, 0, 0, more)), bias)

    inner = module.act_fn(pad_linear(hidden, gate)) * pad_linear(hidden, up)
    return F.linear(inner, F.pad(down.weight.to(dtype), (0, more)), down.bias)


def use_no_dropout(model: Any) -> None:
    """Turn every dropout off, also in training.

    Why: the ratio of a policy to itself must be 1, and dropout adds noise to it. flex_attention has no dropout either.
    Unnecessary for checkpoints whose config has no dropout, which are most. The dropout of adapters is left alone:
    users who set it are warned.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and ".lora_dropout." not in name:
            module.p = 0.0
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def use_narrow_embedding_scale(model: Any, dtype: torch.dtype) -> None:
    """Round the factor of scaled embeddings (Gemma's) to the dtype of the computation.

    Why: transformers rounds it to the dtype of the weights: at a width of 2,560 50.6 is 50.5 in bf16. With float32
    master weights one process would train with another factor than ranks that gather narrow weights, and than a bf16
    checkpoint. Unnecessary once transformers rounds it alike for all weights.
    """
    for module in model.modules():
        scale = getattr(module, "embed_scale", None)
        if isinstance(scale, Tensor):
            scale.copy_(scale.to(dtype))


def import_gemma4_processor() -> None:
    """Import the module of Gemma 4's processor where torchvision is missing.

    Why: it takes two names from the module of the image processor that needs torchvision (transformers 5.17 and 5.19).
    The module of the one without has them too. Unnecessary once transformers takes them from there.
    """
    if find_spec("torchvision") is not None:
        return
    folder = "transformers.models.gemma4."
    missing = folder + "image_processing_gemma4"
    sys.modules[missing] = import_module(folder + "image_processing_pil_gemma4")
    try:
        import_module(folder + "processing_gemma4")
    finally:
        del sys.modules[missing]


def use_narrow_adapters(adapted: Iterable[Any]) -> None:
    """Let adapters that are wider than the products take their input unchanged; autocast narrows their weights.

    Why: peft widens every input to the dtype of the adapter, and autocast narrows it again: two more copies of each
    hidden state for each projection. Unnecessary once peft leaves the dtype to autocast when autocast is on.
    """
    for layer in adapted:
        layer.cast_input_dtype_enabled = False


def use_wide_routers(routers: Iterable[Any]) -> None:
    """Let routers that correct the scores of experts (GLM-4.5V's) multiply in float32 under autocast, too.

    Why: transformers widens what they multiply, and autocast narrows it again. In bf16 many scores are equal, and which
    of their experts is chosen is an accident of the engine. Unnecessary once transformers turns autocast off there, as
    it does for rotary positions.
    """
    for router in routers:
        if hasattr(router, "e_score_correction_bias"):
            router.forward = MethodType(route_wide, router)


def route_wide(router: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast(hidden.device.type, enabled=False):
        return type(router).forward(router, hidden)


def use_compiled_pieces(model: nn.Module) -> None:
    """Compile norms, MLPs and rotary positions, each kind once for all layers and lengths.

    Why: as small operations they read and write every hidden state a dozen times: a third of the time of a pass of a 3B
    model on an H200. Unnecessary once transformers has fused kernels for them.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__.lower().endswith(("rmsnorm", "mlp")):
            module.forward = MethodType(compile_function(kind.forward, find_hidden_dims), module)
        elif kind.__name__.endswith("Attention"):
            module.forward = MethodType(compile_rotary(kind.forward), module)


@cache
def compile_rotary(forward: FunctionType) -> FunctionType:
    """The same function in a separate namespace where rotary positions are compiled: other models in this process stay
    unchanged."""
    own = {
        name: compile_function(function, find_rotary_dims)
        for name, function in forward.__globals__.items()
        if name in forward.__code__.co_names and "rotary" in name
    }
    same = FunctionType(
        forward.__code__, forward.__globals__ | own, forward.__name__, forward.__defaults__, forward.__closure__
    )
    same.__kwdefaults__ = forward.__kwdefaults__
    return same


@cache
def compile_function(
    function: Any, dynamic_dims: Callable[[Sequence[Tensor]], Iterable[tuple[Tensor, int]]] | None = None
) -> Any:
    """Compile the function once for every kind of call (with gradients or without, two dimensions or three, each
    dtype). These are more than torch's limit of 8, beyond which it would silently run the plain function.

    `dynamic_dims` lists the dimensions of its arguments that change from call to call; by default all of them. Known
    sizes give faster kernels and save most of the compile time: torch reasons about every unknown size symbolically.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_KINDS)
    if dynamic_dims is None:
        return torch.compile(function, dynamic=True)
    compiled = torch.compile(function)

    def run(*arguments: Any, **named: Any) -> Any:
        for tensor, dimension in dynamic_dims([each for each in arguments if isinstance(each, Tensor)]):
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        return compiled(*arguments, **named)

    return run


def find_hidden_dims(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """All dimensions of hidden states but the last, which is the model's width."""
    return ((tensor, dimension) for tensor in tensors for dimension in range(tensor.dim() - 1))


def find_rotary_dims(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Batch and sequence of queries and keys, [B, heads, S, D] or [S, heads, D], and of their angles."""
    query, key, *angles = tensors
    rows = ((tensor, dimension) for tensor in (query, key) for dimension in range(0, tensor.dim() - 1, 2))
    return chain(rows, find_hidden_dims(angles))
