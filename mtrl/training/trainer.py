"""`mtrl.Trainer`: the same run from Python."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from mtrl.checkpoint.run_directory import set_aside
from mtrl.compare.arms import read_arm
from mtrl.compose.policy import GivenModel, LoadedModel, save_checkpoint
from mtrl.compose.run import (
    Reward,
    build,
    check_config,
    check_given,
    check_python_objects_given,
    configure,
    evaluate,
    open_model,
    read_run_history,
    run_directory,
    to_metrics_row,
)
from mtrl.compose.task_source import Rows
from mtrl.config import Config, find_warnings
from mtrl.protocols import Tracker
from mtrl.report.compare_html import Comparison
from mtrl.training.resumable_run import Run, train_with_restarts
from mtrl.training.trainer_arguments import (
    GIVEN_MODEL,
    GIVEN_ROWS,
    MODEL_PATH,
    callers_names,
    checked_callbacks,
    checked_data,
    checked_rewards,
    environment_in_config,
    file_and_keys,
    full_keys,
    name_in_config,
    over,
    put,
    short_names_in_errors,
)
from mtrl.utils.errors import Finished
from mtrl.utils.files import short_names
from mtrl.view.response_html import ResponsesView, view_responses

# Keys that belong to the reward functions of a configuration; reset when a script passes its own functions.
REWARD_KEYS = ("reward_fn_path", "weights", "early_weights", "weight_schedule")

ENVIRONMENT = "worker.rollout.environment"
INITIAL_MODEL = "initial_model"  # in the run directory: the weights that a model object had at the start

logger = logging.getLogger(__name__)
Method = TypeVar("Method", bound=Callable[..., Any])


class MetricRows(list[dict[str, Any]]):
    """Rows of metrics.jsonl."""

    def to_pandas(self) -> Any:
        """A DataFrame with one column per metric; missing values are NaN."""
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from error
        return pandas.DataFrame(self)


class TrainingHistory(MetricRows):
    """The rows of the training steps; those of the validations are apart, in `validations`."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        super().__init__(row for row in rows if "perf/seconds_step" in row)
        self.validations = MetricRows(row for row in rows if "perf/seconds_step" not in row)


def in_callers_words(method: Method) -> Method:
    """Errors name a key as the caller wrote it, too: `lr (worker.actor.optim.lr): ..`."""

    @wraps(method)
    def wrapped(self: Trainer, *arguments: Any, **options: Any) -> Any:
        with short_names_in_errors(self._names):
            return method(self, *arguments, **options)

    return cast(Method, wrapped)


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

    A trainer is one run with its own `directory`: train() resumes where the run of that name stopped. Without a model
    and data it trains the embedded model on the embedded task. `model` may also be a transformers model, which is
    trained in place; `processing_class` is its processor or tokenizer, by default that of the checkpoint it was loaded
    from. `data` and `val_data` are a path, a hub id, rows or a datasets.Dataset. A reward function passed as an object
    runs in this process; one named by its file runs in the sandbox, with a time limit. `rewards` replace those of a
    configuration and their weights. `environment` is a class with tools, which is loaded from its file. `config` is a
    YAML file, a mapping or another trainer's config; keys override it. Wrong arguments raise here, before a model is
    loaded. Callbacks (`mtrl.Callback`) are called as the run proceeds and closed at its end. `overwrite` starts anew:
    an earlier run of this name is renamed to NAME.old.
    """

    def __init__(
        self,
        model: str | Path | Any = None,
        data: Rows | Path | None = None,
        rewards: Reward | Sequence[Reward] | None = None,
        *,
        processing_class: Any = None,
        val_data: Rows | Path | None = None,
        callbacks: Tracker | Sequence[Tracker] = (),
        config: str | Path | Mapping[str, Any] | Config | None = None,
        overwrite: bool = False,
        **keys: Any,
    ) -> None:
        file, below = file_and_keys(config)
        settings = full_keys(keys)
        if ENVIRONMENT in settings:
            settings[ENVIRONMENT] = environment_in_config(settings[ENVIRONMENT])
        self._names = callers_names(keys)
        self._given = _model(settings, model, processing_class)
        self._rows = _data(settings, "data", "dataset.train_files", data)
        self._val_rows = _data(settings, "val_data", "dataset.val_files", val_data)
        self._rewards = None if rewards is None else checked_rewards(rewards)
        if self._rewards is not None:
            put(settings, "rewards", "worker.reward.functions", tuple(map(name_in_config, self._rewards)))
            settings = {f"worker.reward.{name}": None for name in REWARD_KEYS} | settings
        self._callbacks = checked_callbacks(callbacks)
        with short_names_in_errors(self._names):
            self.config, self._embedded = configure(file, over(below, settings))
            if self._given is not None:
                check_given(self.config, model)
                settings[MODEL_PATH] = str(self.directory / INITIAL_MODEL)
                self.config, _ = configure(file, over(below, settings))
            check_config(self.config)
            check_python_objects_given(self.config, self._rows, self._val_rows, self._rewards)
        for warning in find_warnings(self.config):
            logger.warning("%s", warning)
        self._loaded: LoadedModel | None = None
        if overwrite and (old := set_aside(self.directory)):
            say(f"overwrite: the earlier run of this name is now {old}")

    @property
    def directory(self) -> Path:
        """The run directory: metrics, rollouts, checkpoints."""
        return run_directory(self.config)

    @property
    @in_callers_words
    def model(self) -> Any:
        """The transformers model with the run's current weights (before training: those it will start or resume with).
        It is loaded on first access and stays the same object."""
        return self._open().model

    @property
    @in_callers_words
    def history(self) -> TrainingHistory:
        """The rows of metrics.jsonl so far, one per training step; `history.validations` are those of the validations.
        Earlier attempts are included; of a repeated step, it is the last row. Each access reads the whole file, so keep
        the list where it is needed often."""
        return TrainingHistory(read_run_history(self.config))

    def train(self) -> Path:
        """Train to the end, resuming where the run stopped; a finished run is only reported. Returns its directory."""
        try:
            with short_names_in_errors(self._names):
                return train_with_restarts(self.config, self._begin).directory
        except Finished as finished:
            logger.warning("%s", finished)
            if self._given is not None:
                self._open()  # the script's object gets the trained weights, as after training
            return finished.directory

    def _begin(self, config: Config) -> Run:
        run = build(
            config,
            data=self._rows,
            val_data=self._val_rows,
            rewards=self._rewards,
            trackers=self._callbacks,
            given=self._given,
            loaded=self._loaded,
        )
        if self._embedded:
            say(f"no config given: the embedded model, with the settings of its {self._embedded.name} under yours")
        say(f"run directory: {run.directory}, {run.start.describe()}")
        self._loaded = run.loaded
        return run

    @in_callers_words
    def evaluate(self, val_data: Rows | Path | None = None) -> dict[str, float]:
        """Validate the current weights, on the trainer's `val_data` or the given data. Returns the metrics of a
        validation; nothing is written."""
        rows = self._val_rows if val_data is None else checked_data("val_data", val_data)
        self.model.eval()
        return to_metrics_row(evaluate(self.config, val_data=rows, rewards=self._rewards, loaded=self._open()))

    @in_callers_words
    def save(self, path: str | Path) -> Path:
        """Write the current weights and tokenizer as a checkpoint for from_pretrained. Replaces an earlier checkpoint
        at that path and refuses anything else."""
        target = Path(path).expanduser()
        save_checkpoint(self.config, self._open(), target)
        return target

    def view(
        self, step: int | None = None, row: int | None = None, signal: str | None = None, most: int = 4
    ) -> ResponsesView:
        """The best and the worst recorded responses to one prompt, `most` in all, each token coloured by a `signal`
        ("dependency", "entropy", "advantage", ..). A notebook shows them as HTML. Default: the last step, and a prompt
        whose responses have different rewards; `row` is any response to another prompt."""
        return view_responses(self.directory, step, row, signal, most)

    def compare(self, *others: Trainer) -> Comparison:
        """Compare other runs with this one: curves, final values, and questions of the last validation that only one of
        two runs answered correctly. A notebook shows it as HTML. Needs pip install 'mtrl[compare]'."""
        if find_spec("scipy") is None:
            raise ImportError("compare() needs scipy: pip install 'mtrl[compare]'")
        directories = [trainer.directory for trainer in (self, *others)]
        names = short_names([directory.absolute() for directory in directories])
        arms = [replace(read_arm(path), name=name) for path, name in zip(directories, names, strict=True)]
        return Comparison(arms)

    def _open(self) -> LoadedModel:
        if self._loaded is None:
            self._loaded = open_model(self.config, self._given)
        return self._loaded


def _model(settings: dict[str, Any], model: Any, processing_class: Any) -> GivenModel | None:
    """Set the key to the path, or to a placeholder for a model object, which is returned."""
    if model is not None and not isinstance(model, (str, Path)):
        put(settings, "model", MODEL_PATH, GIVEN_MODEL)
        return GivenModel(model, processing_class)
    if processing_class is not None:
        raise TypeError("processing_class: belongs to a model object; tokenizer_path= names another tokenizer")
    if model is not None:
        put(settings, "model", MODEL_PATH, str(model))
    return None


def _data(settings: dict[str, Any], argument: str, key: str, data: Any) -> Any:
    """Set the key to the path, or to a placeholder for rows, which are returned."""
    if data is None:
        return None
    checked = checked_data(argument, data)
    put(settings, argument, key, checked if isinstance(checked, str) else GIVEN_ROWS)
    return None if isinstance(checked, str) else checked


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
