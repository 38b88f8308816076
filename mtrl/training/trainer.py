"""The same loop from Python."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from mtrl.compose.policy import LoadedModel, save_checkpoint
from mtrl.compose.run import (
    Reward,
    Run,
    build,
    check_all_given,
    check_usable,
    configure,
    evaluate,
    history,
    metrics_row,
    open_model,
    run_directory,
    train_through,
)
from mtrl.compose.task_source import Rows
from mtrl.config import Config, warnings
from mtrl.protocols import Tracker
from mtrl.training.trainer_arguments import (
    GIVEN_ROWS,
    checked_callbacks,
    checked_data,
    checked_model,
    checked_rewards,
    file_and_keys,
    full_keys,
    name_in_config,
    over,
    put,
)
from mtrl.utils.errors import Finished

# What belongs to the reward functions of a configuration, and goes with them when a script gives its own.
OF_REWARDS = ("reward_fn_path", "weights", "early_weights", "weight_schedule")

logger = logging.getLogger(__name__)


class TrainingHistory(list[dict[str, Any]]):
    """The rows of metrics.jsonl: one a step, one a validation."""

    def to_pandas(self) -> Any:
        """A DataFrame with a column for each number; what a row lacks is NaN."""
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from error
        return pandas.DataFrame(self)


class Trainer:
    """
    trainer = mtrl.Trainer(
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "train.jsonl",                           # or rows: [{"prompt": .., "images": [..], "answer": ..}, ..]
        ["accuracy", "format"],                  # built-ins, "file.py:name", Python functions; one, or a list
        val_data="test.jsonl",
        max_steps=100, lr=2e-6, n=8,             # any key by its last name, or **{"a.b": value}
    )
    trainer.train()
    trainer.save("my_model")

    A trainer is a run, which lives in `directory`: train() goes on where the run of that name stopped. Without a model
    and data it trains the embedded model on the embedded task. `data` and `val_data` are a path, a hub id, rows or a
    datasets.Dataset. A reward function handed over as an object runs in this process; one named by its file runs in the
    sandbox, with a time limit. `rewards` replace those of a configuration, with their weights. `config` is a YAML file,
    a mapping or another trainer's config; keys stand over it. What is wrong with any of it is said here, before a model
    is loaded. Callbacks (`mtrl.Callback`) are told what the run does and are closed at its end.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        data: Rows | Path | None = None,
        rewards: Reward | Sequence[Reward] | None = None,
        *,
        val_data: Rows | Path | None = None,
        callbacks: Tracker | Sequence[Tracker] = (),
        config: str | Path | Mapping[str, Any] | Config | None = None,
        **keys: Any,
    ) -> None:
        file, below = file_and_keys(config)
        settings = full_keys(keys)
        if model is not None:
            put(settings, "model", "worker.actor.model.model_path", checked_model(model))
        self._rows = _data(settings, "data", "dataset.train_files", data)
        self._val_rows = _data(settings, "val_data", "dataset.val_files", val_data)
        self._rewards = None if rewards is None else checked_rewards(rewards)
        if self._rewards is not None:
            put(settings, "rewards", "worker.reward.functions", tuple(map(name_in_config, self._rewards)))
            settings = {f"worker.reward.{name}": None for name in OF_REWARDS} | settings
        self._callbacks = checked_callbacks(callbacks)
        self.config, self._embedded = configure(file, over(below, settings))
        check_usable(self.config)
        check_all_given(self.config, self._rows, self._val_rows, self._rewards)
        for warning in warnings(self.config):
            logger.warning("%s", warning)
        self._loaded: LoadedModel | None = None

    @property
    def directory(self) -> Path:
        """Where the run lives: metrics, rollouts, checkpoints."""
        return run_directory(self.config)

    @property
    def model(self) -> Any:
        """The model of transformers, with the weights that the run has now: before it trains those it will begin or go
        on with. It is one object for the life of a trainer, loaded when it is first asked for."""
        return self._open().model

    @property
    def history(self) -> TrainingHistory:
        """The rows of metrics.jsonl so far, of earlier attempts too; of a step that was done twice, the last."""
        return TrainingHistory(history(self.config))

    def train(self) -> Path:
        """Runs to the end, from where the run stopped; a finished one says so. Returns its directory."""
        try:
            return train_through(self.config, self._begin).directory
        except Finished as finished:
            logger.warning("%s", finished)
            return finished.directory

    def _begin(self, config: Config) -> Run:
        run = build(
            config,
            data=self._rows,
            val_data=self._val_rows,
            rewards=self._rewards,
            trackers=self._callbacks,
            loaded=self._loaded,
        )
        if self._embedded:
            say(f"no config given: the embedded model, with the settings of its {self._embedded.name} under yours")
        say(f"run directory: {run.directory}, {run.start.told()}")
        self._loaded = run.loaded
        return run

    def evaluate(self, val_data: Rows | Path | None = None) -> dict[str, float]:
        """Validates the weights of now, on `val_data` of the trainer or those given here. Returns the numbers that a
        validation has in metrics.jsonl, where this writes nothing."""
        rows = self._val_rows if val_data is None else checked_data("val_data", val_data)
        self.model.eval()
        return metrics_row(evaluate(self.config, val_data=rows, rewards=self._rewards, loaded=self._open()))

    def save(self, path: str | Path) -> Path:
        """Writes the weights of now as a Hugging Face checkpoint with its tokenizer, which from_pretrained loads. An
        earlier one in its place is replaced, anything else refused."""
        target = Path(path).expanduser()
        save_checkpoint(self.config, self._open(), target)
        return target

    def _open(self) -> LoadedModel:
        if self._loaded is None:
            self._loaded = open_model(self.config)
        return self._loaded


def _data(settings: dict[str, Any], argument: str, key: str, data: Any) -> Any:
    """Puts a text under its key; rows stand there by a name, and are returned."""
    if data is None:
        return None
    found = checked_data(argument, data)
    put(settings, argument, key, found if isinstance(found, str) else GIVEN_ROWS)
    return None if isinstance(found, str) else found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
