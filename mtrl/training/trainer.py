"""The same loop from Python."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mtrl.build.data import Rows
from mtrl.build.run import build, configure
from mtrl.config import Config, ConfigError
from mtrl.config.tree import known_leaves
from mtrl.errors import Finished
from mtrl.protocols import Tracker

logger = logging.getLogger(__name__)


class Trainer:
    """
    trainer = mtrl.Trainer(
        model="Qwen/Qwen2.5-VL-3B-Instruct",
        data="train.jsonl",                      # or rows: [{"prompt": .., "images": [..], "answer": ..}, ..]
        rewards=["accuracy", "format"],          # built-ins, "file.py:name", or Python functions
        max_steps=100,                           # any key of the config by its last name, or {"a.b": value}
    )
    trainer.train()

    Without a model and data it trains the embedded model on the embedded task. A function handed over as an object
    runs in this process; one named by its file runs in the sandbox, with a time limit. `trackers` are loggers of your
    own, beside those of the configuration; they are closed at the end of the run.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        data: Rows | None = None,
        rewards: Sequence[Callable[..., Any] | str] | None = None,
        config: str | Path | None = None,
        trackers: Sequence[Tracker] = (),
        **overrides: Any,
    ) -> None:
        settings = {full_key(name): value for name, value in overrides.items()}
        if model is not None:
            settings["worker.actor.model.model_path"] = str(model)
        if isinstance(data, str):
            settings["dataset.train_files"] = data
        self._rows = data if data is not None and not isinstance(data, str) else None
        self._rewards, self._trackers = rewards, trackers
        if rewards:
            settings["worker.reward.functions"] = tuple(map(name_in_config, rewards))
            settings.setdefault("worker.reward.weights", None)  # those of a packaged config belong to its functions
        self.config: Config = configure(config, settings)[0]

    def train(self) -> Path:
        """Runs to the end, from where the run of that name stopped. Returns its directory, with metrics, rollouts and
        checkpoints."""
        try:
            run = build(self.config, data=self._rows, rewards=self._rewards, trackers=self._trackers)
        except Finished as finished:
            logger.warning("%s", finished)
            return finished.directory
        run.train()
        return run.directory


def name_in_config(reward: Callable[..., Any] | str) -> str:
    """How the run's config.yaml names a function that was handed over as an object."""
    return reward if isinstance(reward, str) else f"python:{getattr(reward, '__name__', type(reward).__name__)}"


def full_key(name: str) -> str:
    """A key by its last name, where only one key ends so; a dotted key as it is."""
    if "." in name:
        return name
    found = [key for key in known_leaves() if key.rpartition(".")[2] == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError([f"{name}: several keys end so; write one of {', '.join(found)} as **{{'{found[0]}': ..}}"])
    return name  # the loader knows what to suggest
