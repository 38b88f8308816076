"""MTRL: reinforcement learning for vision-language models that gives each token the credit it deserves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtrl.algorithms.advantages import Estimator
    from mtrl.algorithms.credit import Bonus, Filter, Weight
    from mtrl.algorithms.losses import LossTerm, PolicyLoss
    from mtrl.config import ConfigError
    from mtrl.protocols import Tracker as Callback
    from mtrl.rollout.lifecycle import EngineLifecycle as Engine
    from mtrl.training.trainer import Trainer
    from mtrl.types import Experience, Needs, Signal
    from mtrl.utils.errors import RunError, StartError

    __version__: str

# The module of each public name, which is imported on first use: `import mtrl` alone loads no torch.
_SOURCES = {
    "Trainer": "mtrl.training.trainer:Trainer",
    "Callback": "mtrl.protocols:Tracker",
    "Filter": "mtrl.algorithms.credit:Filter",
    "Weight": "mtrl.algorithms.credit:Weight",
    "Bonus": "mtrl.algorithms.credit:Bonus",
    "Estimator": "mtrl.algorithms.advantages:Estimator",
    "PolicyLoss": "mtrl.algorithms.losses:PolicyLoss",
    "LossTerm": "mtrl.algorithms.losses:LossTerm",
    "Engine": "mtrl.rollout.lifecycle:EngineLifecycle",
    "Needs": "mtrl.types:Needs",
    "Signal": "mtrl.types:Signal",
    "Experience": "mtrl.types:Experience",
    "ConfigError": "mtrl.config:ConfigError",
    "StartError": "mtrl.utils.errors:StartError",
    "RunError": "mtrl.utils.errors:RunError",
}

__all__ = [
    "Bonus",
    "Callback",
    "ConfigError",
    "Engine",
    "Estimator",
    "Experience",
    "Filter",
    "LossTerm",
    "Needs",
    "PolicyLoss",
    "RunError",
    "Signal",
    "StartError",
    "Trainer",
    "Weight",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from mtrl.utils.package_version import package_version

        return package_version()
    if name not in _SOURCES:
        raise AttributeError(f"module 'mtrl' has no attribute {name!r}; public names are {', '.join(__all__)}")
    module, _, attribute = _SOURCES[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
