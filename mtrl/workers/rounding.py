"""AdamW for weights in bf16 that follows float32.

A bf16 number has 8 bits, so a change of less than about 1/512 of a weight is lost when the sum is rounded to the
nearest one, step after step. Two ways out: round up or down at random, so that the mean of the sum is right; or keep
what was lost in a second number and add it the next time (Kahan). Products are taken in float32; the states are kept
in the weights' dtype, rounded at random: at beta2 = 0.999 the nearest number would stand still for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

Rounding = Literal["none", "stochastic", "kahan"]

CHUNK = 1 << 24  # numbers at once: their float32 copies are small beside the weights
LOW_BITS = 16  # of float32, which bf16 lacks


class RoundedAdamW(torch.optim.Optimizer):
    """The random numbers of a step are keyed by the step and the place of the parameter: a run that goes on from a
    checkpoint draws the same ones."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        rounding: Rounding,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        self.rounding = rounding

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._update(parameter, group, place)

    def _update(self, parameter: Tensor, group: dict[str, Any], place: int) -> None:
        state = self.state[parameter]
        if not state:
            kinds = ["exp_avg", "exp_avg_sq", *(["compensation"] if self.rounding == "kahan" else [])]
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {kind: torch.zeros_like(parameter, memory_format=torch.contiguous_format) for kind in kinds}
        state["step"] += 1
        step = int(state["step"])
        generator = torch.Generator(parameter.device).manual_seed(1_000_003 * step + place)
        kept = [state[kind] for kind in ("exp_avg", "exp_avg_sq", "compensation") if kind in state]
        flat = [each.view(-1).split(CHUNK) for each in (parameter, *kept)]
        gradients = parameter.grad.reshape(-1).split(CHUNK)  # type: ignore[union-attr]
        for gradient, weight, mean, square, *lost in zip(gradients, *flat, strict=True):
            change = adam_change(weight, gradient, mean, square, group, step, generator)
            if lost:
                add_compensated(weight, change, lost[0])
            else:
                weight.copy_(rounded_at_random(weight.float() + change, weight.dtype, generator))


def adam_change(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    group: dict[str, Any],
    step: int,
    generator: torch.Generator,
) -> Tensor:
    """What AdamW adds to the weight, in float32; `mean` and `square` of its gradients go on."""
    (beta1, beta2), lr, gradient = group["betas"], group["lr"], gradient.float()
    new_mean = mean.float().lerp_(gradient, 1 - beta1)
    new_square = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    mean.copy_(rounded_at_random(new_mean, mean.dtype, generator))
    square.copy_(rounded_at_random(new_square, square.dtype, generator))
    size = (new_square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    return (new_mean / size).mul_(-lr / (1 - beta1**step)).sub_(weight.float(), alpha=lr * group["weight_decay"])


def add_compensated(weight: Tensor, change: Tensor, lost: Tensor) -> None:
    """Adds to the weight what it can hold of the change and of what was lost before; the rest is lost now."""
    wanted, before = change + lost.float(), weight.to(torch.float32, copy=True)
    weight.copy_(before + wanted)
    lost.copy_(wanted - (weight.float() - before))


def rounded_at_random(numbers: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """float32 numbers as bf16 ones: up or down, the nearer one the more often, so that the mean stays. To the bits that
    are cut off a random number of as many bits is added, and what it carries over decides. (The bits of a float grow
    with its size, whatever its sign.) Any other dtype is rounded to the nearest."""
    if dtype != torch.bfloat16:
        return numbers.to(dtype)
    noise = torch.randint(1 << LOW_BITS, numbers.shape, dtype=torch.int32, device=numbers.device, generator=generator)
    bits = (numbers.contiguous().view(torch.int32) + noise) >> LOW_BITS << LOW_BITS
    return bits.view(torch.float32).to(dtype)
