"""AdamW whose state takes a byte a number, by the kernels of the bitsandbytes library: 2 bytes a weight in place of 8.

Blocks of 256 numbers share a scale, and each number is the nearest of 256 that are finer towards zero. Small weights
(norms, biases), of which there is little to save, keep their state in float32. Nothing in it is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mtrl.models.quantized import library

BLOCK, SMALL = 256, 4096  # numbers


class EightBitAdamW(torch.optim.Optimizer):
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
        self.functional = library().functional
        # The numbers that a byte stands for, in a mean and in a mean of squares.
        self.maps = [self.functional.create_dynamic_map(signed=signed) for signed in (True, False)]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(new_state(parameter))
        state["step"] += 1
        assert parameter.grad is not None and parameter.is_contiguous()
        (beta1, beta2), gradient, number = group["betas"], parameter.grad.contiguous(), int(state["step"])
        settings = {"weight_decay": group["weight_decay"]}
        if "exp_avg_scale" not in state:
            self.functional.optimizer_update_32bit(
                "adam", gradient, parameter, state["exp_avg"], beta1, group["eps"], number, group["lr"],
                state["exp_avg_sq"], beta2, **settings,
            )  # fmt: skip
            return
        self.maps = [each.to(parameter.device) for each in self.maps]
        self.functional.optimizer_update_8bit_blockwise(
            "adam", gradient, parameter, state["exp_avg"], state["exp_avg_sq"], beta1, beta2, 0.0, 0.0, group["eps"],
            number, group["lr"], *self.maps, state["exp_avg_scale"], state["exp_avg_sq_scale"], **settings,
        )  # fmt: skip


def new_state(parameter: Tensor) -> dict[str, Tensor]:
    small = parameter.numel() < SMALL
    kinds = ("exp_avg", "exp_avg_sq")
    dtype = torch.float32 if small else torch.uint8
    state = {"step": torch.zeros(())} | {kind: torch.zeros_like(parameter, dtype=dtype) for kind in kinds}
    if not small:
        blocks = -(-parameter.numel() // BLOCK)
        state |= {f"{kind}_scale": torch.zeros(blocks, device=parameter.device) for kind in kinds}
    return state
