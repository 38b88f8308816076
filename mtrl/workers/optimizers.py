"""AdamW variants that need less memory: bf16 weights that learn like float32, and a state of one byte per number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mtrl.models.parallel.fsdp import local_tensor, shard_range
from mtrl.models.quantized import import_bitsandbytes
from mtrl.workers.scale_blocks import BLOCK, count_blocks, fit_scales, make_scales

Rounding = Literal["none", "stochastic", "kahan"]

CHUNK = 1 << 24  # numbers at once: their float32 copies are small compared to the weights
LOW_BITS = 16  # bits that float32 has and bf16 lacks
SMALL = 4096  # numbers


class AdamWVariant(torch.optim.Optimizer):
    """Updates one parameter after the other; a subclass says how."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._update(parameter, group, index)

    def _update(self, parameter: Tensor, group: dict[str, Any], index: int) -> None:
        raise NotImplementedError


# --------------------------------------------------------------------------------------------- rounding of bf16 weights
class RoundedAdamW(AdamWVariant):
    """For bf16 weights. A bf16 number has 8 bits, so a change of less than about 1/512 of a weight is lost, step after
    step, if the sum is rounded to the nearest number. Two remedies: round up or down at random, so that the mean of the
    sum is right; or store the rounding error in a second number and add it the next time (Kahan). Products are in
    float32; the states have the weights' dtype and are rounded at random: at beta2 = 0.999 rounding to nearest would
    never change them. Random numbers are keyed by the step and the parameter's index, so that a resumed run draws the
    same ones. Ranks draw those of the whole parameter up to the end of their shard and take their own, so that the
    numbers do not depend on how it is sharded."""

    def __init__(self, parameters: Iterable[Tensor], *, rounding: Rounding, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.rounding = rounding

    def _update(self, parameter: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[parameter]
        if not state:
            kinds = ["exp_avg", "exp_avg_sq", *(["compensation"] if self.rounding == "kahan" else [])]
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {kind: torch.zeros_like(parameter, memory_format=torch.contiguous_format) for kind in kinds}
        state["step"] += 1
        step, weights = int(state["step"]), local_tensor(parameter)
        generator = torch.Generator(weights.device).manual_seed(1_000_003 * step + index)
        states = [local_tensor(state[kind]) for kind in ("exp_avg", "exp_avg_sq", "compensation") if kind in state]
        assert parameter.grad is not None
        flat = [local_tensor(parameter.grad).reshape(-1), *(each.view(-1) for each in (weights, *states))]
        first, last = shard_range(parameter)
        for begin in range(0, last if first < last else 0, CHUNK):
            end = min(begin + CHUNK, parameter.numel())
            low, high = (min(max(edge, first), last) for edge in (begin, end))  # the shard's part of it, if any
            noise = Noise(generator, end - begin, slice(low - begin, high - begin))
            gradient, weight, mean, square, *lost = [each[low - first : high - first] for each in flat]
            change = adam_change(weight, gradient, mean, square, group, step, noise)
            if lost:
                add_compensated(weight, change, lost[0])
            else:
                weight.copy_(round_at_random(weight.float() + change, weight.dtype, noise))


@dataclass(frozen=True)
class Noise:
    """Random numbers for a chunk of a parameter, of which those for a part are taken."""

    generator: torch.Generator
    numbers: int
    part: slice

    def draw(self) -> Tensor:
        drawn = torch.randint(
            1 << LOW_BITS, (self.numbers,), dtype=torch.int32, device=self.generator.device, generator=self.generator
        )
        return drawn[self.part]


def adam_change(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    group: dict[str, Any],
    step: int,
    noise: Noise,
) -> Tensor:
    """The change that AdamW makes to the weight, in float32; updates `mean` and `square` of its gradients."""
    (beta1, beta2), lr, gradient = group["betas"], group["lr"], gradient.float()
    new_mean = mean.float().lerp_(gradient, 1 - beta1)
    new_square = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    mean.copy_(round_at_random(new_mean, mean.dtype, noise))
    square.copy_(round_at_random(new_square, square.dtype, noise))
    size = (new_square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    return (new_mean / size).mul_(-lr / (1 - beta1**step)).sub_(weight.float(), alpha=lr * group["weight_decay"])


def add_compensated(weight: Tensor, change: Tensor, lost: Tensor) -> None:
    """Adds the change and the last rounding error to the weight; stores the new rounding error in `lost`."""
    wanted, before = change + lost.float(), weight.to(torch.float32, copy=True)
    weight.copy_(before + wanted)
    lost.copy_(wanted - (weight.float() - before))


def round_at_random(numbers: Tensor, dtype: torch.dtype, noise: Noise) -> Tensor:
    """Rounds float32 to bf16, up or down with probabilities that preserve the mean: a random number is added to the
    bits that are cut off, and the carry decides. (The bits of a float grow with its magnitude, whatever its sign.)
    Other dtypes are rounded to nearest."""
    if dtype != torch.bfloat16:
        return numbers.to(dtype)
    bits = (numbers.contiguous().view(torch.int32) + noise.draw()) >> LOW_BITS << LOW_BITS
    return bits.view(torch.float32).to(dtype)


# ------------------------------------------------------------------------------------------------------ an 8-bit state
class EightBitAdamW(AdamWVariant):
    """By the kernels of bitsandbytes: 2 bytes of state per weight instead of 8. Blocks of 256 numbers share a scale
    (`scale_blocks.py`), and each number is rounded to the nearest of 256 values that are finer towards zero. Small
    weights (norms, biases), where there is little to save, have their state in float32. Nothing in it is random."""

    def __init__(self, parameters: Iterable[Tensor], **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.functional = import_bitsandbytes().functional
        # The values that a byte stands for, in the mean and in the mean of squares.
        self.maps = [self.functional.create_dynamic_map(signed=signed) for signed in (True, False)]

    def _update(self, parameter: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[parameter]
        if not state:
            state.update(make_8bit_state(parameter))
        state["step"] += 1
        assert parameter.grad is not None
        weight, gradient = local_tensor(parameter).view(-1), local_tensor(parameter.grad).reshape(-1)
        means = [local_tensor(state[kind]).view(-1) for kind in ("exp_avg", "exp_avg_sq")]
        (beta1, beta2), number = group["betas"], int(state["step"])
        settings = {"weight_decay": group["weight_decay"]}
        if "exp_avg_scale" not in state:
            mean, square = means
            self.functional.optimizer_update_32bit(
                "adam", gradient, weight, mean, beta1, group["eps"], number, group["lr"], square, beta2, **settings
            )
            return
        self.maps = [each.to(weight.device) for each in self.maps]
        scales = [local_tensor(state[f"{kind}_scale"]).view(-1) for kind in ("exp_avg", "exp_avg_sq")]
        first, last = shard_range(parameter)
        head = min(-first % BLOCK, last - first)  # the end of a block that begins in the shard before
        for begin, end in ((0, head), (head, last - first)):
            if begin < end:
                blocks = slice(begin > 0, (begin > 0) + count_blocks(first + begin, first + end))
                own = slice(begin, end)
                self.functional.optimizer_update_8bit_blockwise(
                    "adam", gradient[own], weight[own], *(each[own] for each in means), beta1, beta2, 0.0, 0.0,
                    group["eps"], number, group["lr"], *self.maps, *(each[blocks] for each in scales), **settings,
                )  # fmt: skip


def make_8bit_state(parameter: Tensor) -> dict[str, Tensor]:
    small = parameter.numel() < SMALL
    kinds = ("exp_avg", "exp_avg_sq")
    dtype = torch.float32 if small else torch.uint8
    state = {"step": torch.zeros(())} | {kind: torch.zeros_like(parameter, dtype=dtype) for kind in kinds}
    return state if small else state | {f"{kind}_scale": make_scales(parameter) for kind in kinds}


def fit_states(optimizer: torch.optim.Optimizer) -> None:
    """Fits states that any number of ranks have saved to the shards of this rank."""
    if not isinstance(optimizer, EightBitAdamW):
        return
    for parameter, state in optimizer.state.items():
        for kind, values in zip(("exp_avg", "exp_avg_sq"), optimizer.maps, strict=True):
            if (name := f"{kind}_scale") in state:
                state[name] = fit_scales(parameter, state[kind], state[name], values.cpu())
