"""The gated delta rule on one device: outputs and gradients against float64, and the time of a pass.

    python -m benchmarks.delta_rule --device cuda [--out FILE]

Compares `mtrl.models.delta_rule` with the kernels of the package fla-core, if it is installed (transformers takes them
as soon as it can be imported), each in float32 and bf16. `reading` is a prompt that several responses continue,
`continuing` are responses that start from its state. Errors are relative to the largest number of each tensor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import finish
from mtrl.models.delta_rule import find_chunk_dims, gated_delta_rule, solve_chunks
from mtrl.models.patches import compile_function

NAMES = ("query", "key", "value", "g", "beta", "initial_state")
SHAPES = {"cpu": {"reading": (1, 100), "continuing": (4, 40)}, "cuda": {"reading": (8, 640), "continuing": (64, 256)}}
HEADS, WIDTH = {"cpu": 4, "cuda": 32}, {"cpu": 32, "cuda": 128}
REPEATS = {"cpu": 3, "cuda": 10}


def draw(rows: int, length: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Decays and rates as in a layer: most decays are weak, some strong."""
    heads, width = HEADS[device], WIDTH[device]
    torch.manual_seed(0)
    wide = {name: torch.randn(rows, length, heads, width, device=device) for name in NAMES[:3]}
    small = {
        "g": -(torch.rand(rows, length, heads, device=device) ** 4) * 4,
        "beta": torch.rand(rows, length, heads, device=device),
        "initial_state": torch.randn(rows, heads, width, width, device=device),
    }
    drawn = {name: each.to(dtype) for name, each in wide.items()} | small
    return {name: each.detach().requires_grad_() for name, each in drawn.items()}


def measure(rule: Callable[..., Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients of a fixed weighted sum of them."""
    *tensors, state = inputs.values()
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    output, state = rule(*tensors, **options)
    weights = torch.Generator(output.device).manual_seed(1)
    total = 0.0
    for each in (output, state):
        noise = torch.randn(each.shape, generator=weights, device=each.device)
        total = total + (each.to(torch.promote_types(each.dtype, torch.float32)) * noise).sum()
    gradients = torch.autograd.grad(total, list(inputs.values()))
    return {"output": output, "state": state, **dict(zip(inputs, gradients, strict=True))}


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name].double() - each).abs().max() / each.abs().max()) for name, each in exact.items()}


def seconds(rule: Callable[..., Any], inputs: dict[str, Tensor], device: str) -> float:
    times = []
    for _ in range(REPEATS[device]):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        measure(rule, inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def list_rules(device: str) -> dict[str, Callable[..., Any]]:
    rules: dict[str, Callable[..., Any]] = {"torch": gated_delta_rule}
    if device == "cuda":
        rules["torch, compiled"] = partial(gated_delta_rule, solve=compile_function(solve_chunks, find_chunk_dims))
        try:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule

            rules["fla-core"] = chunk_gated_delta_rule
        except ImportError as error:
            print(f"without fla-core: {error}", flush=True)
    return rules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    a = parser.parse_args()
    result: dict[str, Any] = {"bench": "gated_delta_rule", "shapes": SHAPES[a.device], "rules": {}}
    for shape, (rows, length) in SHAPES[a.device].items():
        for dtype in (torch.float32, torch.bfloat16):
            inputs = draw(rows, length, a.device, dtype)
            exact = measure(
                gated_delta_rule, {name: each.detach().double().requires_grad_() for name, each in inputs.items()}
            )
            for name, rule in list_rules(a.device).items():
                case = f"{name}, {shape}, {str(dtype).removeprefix('torch.')}"
                try:
                    found = {
                        "errors": relative_errors(measure(rule, inputs), exact),
                        "seconds": seconds(rule, inputs, a.device),
                    }
                except Exception as error:  # a kernel that does not run on this device
                    found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
                result["rules"][case] = found
                print(case, found, flush=True)
    finish(result, a.out)


if __name__ == "__main__":
    main()
