"""Mixtures of experts: which experts the routers of a model choose.

An engine and the trainer read the same tokens with the same weights, yet rounding may flip the choice of a router where
two experts are nearly tied. The recorder runs in both, and `routing_mismatch` says how much they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def has_experts(config: Any) -> bool:
    """Whether a language model is a mixture of experts, from its config."""
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def find_routers(language_model: Any) -> list[Any]:
    """The routers in the order of the layers; a dense model has none. The last of their outputs are the experts
    [tokens, k]."""
    gates = (getattr(getattr(layer, "mlp", None), "gate", None) for layer in language_model.layers)
    return [gate for gate in gates if hasattr(gate, "top_k") and hasattr(gate, "num_experts")]


def expert_dtype(experts: int) -> torch.dtype:
    """The narrowest type that numbers so many experts."""
    return torch.int16 if experts > 256 else torch.uint8


class ExpertRecorder:
    """Records the experts that routers choose while it is entered, pass by pass."""

    def __init__(self, routers: Sequence[Any]) -> None:
        self.routers = routers
        self.shape = (len(routers), routers[0].top_k) if routers else (0, 0)  # of a token's experts
        self.dtype = expert_dtype(routers[0].num_experts if routers else 0)
        self._chosen: list[Tensor] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> ExpertRecorder:
        self._hooks = [router.register_forward_hook(self._record) for router in self.routers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, _router: Any, _inputs: Any, output: tuple[Tensor, ...]) -> None:
        self._chosen.append(output[-1].to(self.dtype))

    def take(self, rows: int, device: torch.device) -> Tensor:
        """[rows, S, layers, k]: the experts of the last pass, which it forgets."""
        chosen, self._chosen = self._chosen, []
        if not self.routers:
            return torch.empty(rows, 1, *self.shape, dtype=self.dtype, device=device)
        assert len(chosen) == len(self.routers), "one pass at a time"
        return torch.stack(chosen, 1).unflatten(0, (rows, -1))


class RoutingReader:
    """Compares the experts of a pass with those that the engine chose for the same tokens, `engine` [M, layers, k]."""

    def __init__(self, routers: Sequence[Any], engine: Tensor) -> None:
        self.recorder, self.engine = ExpertRecorder(routers), engine
        self.mismatch: Tensor | None = None  # [M]

    def compare(self, chosen: Tensor) -> None:
        self.mismatch = routing_mismatch(chosen, self.engine)


def routing_mismatch(ours: Tensor, theirs: Tensor) -> Tensor:
    """[M]: the share of a token's experts [M, layers, k] that the other side did not choose, in any order.

    >>> routing_mismatch(torch.tensor([[[0, 1], [2, 3]]]), torch.tensor([[[1, 0], [3, 4]]]))
    tensor([0.2500])
    """
    return (ours[..., :, None] != theirs[..., None, :]).all(-1).float().mean((-2, -1))
