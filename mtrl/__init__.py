"""MTRL: reinforcement learning for vision-language models that gives each token the credit it deserves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtrl.training.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    """`mtrl.Trainer`, imported when it is asked for: `import mtrl` alone loads no torch."""
    if name == "Trainer":
        from mtrl.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'mtrl' has no attribute {name!r}")
