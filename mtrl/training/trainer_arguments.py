"""Checks the arguments of `mtrl.Trainer`: keys by their last names, and objects of the right kinds.

A Python object appears in the configuration as `python:` and a name. The run's config.yaml then says that a script
passed it, and only a script that passes it again can resume the run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtrl.config import Config, ConfigError, to_yaml
from mtrl.config.paths import PYTHON_PREFIX
from mtrl.config.tree import RENAMED_KEYS, known_leaves, known_sections
from mtrl.config.yaml_io import YamlFile
from mtrl.data.arrow import is_dataset
from mtrl.protocols import Tracker
from mtrl.utils.errors import Finished, RunError, StartError

GIVEN_ROWS = f"{PYTHON_PREFIX}rows"  # stands for rows and datasets in a configuration
GIVEN_MODEL = f"{PYTHON_PREFIX}model"  # for a model object, until its folder is known

OPTIMIZER_KEYS = ("lr", "weight_decay", "betas", "warmup_steps", "warmup_ratio", "lr_scheduler_type", "min_lr_ratio")

# If several keys end in the same name: the policy's and its training rollouts', and one seed for all.
SHORT_NAMES = {
    **{name: (f"worker.actor.optim.{name}",) for name in OPTIMIZER_KEYS},
    "model_path": ("worker.actor.model.model_path",),
    "offload_params": ("worker.actor.offload.offload_params",),
    "n": ("worker.rollout.n",),
    "temperature": ("worker.rollout.temperature",),
    "seed": ("dataset.seed", "worker.rollout.seed"),
}

MODEL_PATH = "worker.actor.model.model_path"

# Keys that arguments of the trainer set, and those that messages advise to set.
ARGUMENTS = {
    MODEL_PATH: "model",
    "dataset.train_files": "data",
    "dataset.val_files": "val_data",
    "worker.reward.functions": "rewards",
}
ADVISED = ("experiment_name", "max_steps", "output_dir")

# Arguments of TRL's trainer that have another name here.
TRL_NAMES = {
    "train_dataset": "data=",
    "eval_dataset": "val_data=",
    "reward_funcs": "rewards=",
    "args": "config= (a YAML file or a mapping), and any key by its last name",
    "peft_config": "peft_type=, lora_rank= and the other keys of worker.actor.model",
    "trackers": "callbacks=",
    "environment_factory": "environment= (a class, 'file.py:Class', or a mapping of these)",
}

Reward = Callable[..., Any] | str


# ---------------------------------------------------------------------------------------------------------------- keys
def full_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Expand the keys. Setting one key by two of its names is an error."""
    settings: dict[str, Any] = {}
    for name, value in keys.items():
        for key in config_keys(name):
            put(settings, name, key, value)
    return settings


def callers_names(keys: Mapping[str, Any]) -> dict[str, str]:
    """What the caller calls a key, by its full name: its short name if one was written or messages advise to set it,
    or an argument of the trainer."""
    short = {full: name for name in (*ADVISED, *keys) for full in config_keys(name) if full != name}
    return ARGUMENTS | short


@contextmanager
def short_names_in_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name a key as the caller wrote it, too: `lr (worker.actor.optim.lr): ..`."""
    try:
        yield
    except (ConfigError, StartError, RunError, Finished) as error:
        error.args = tuple(add_short_names(str(each), names) for each in error.args)
        if isinstance(error, ConfigError):
            error.errors = [add_short_names(each, names) for each in error.errors]
        raise


def add_short_names(text: str, names: Mapping[str, str]) -> str:
    for full, name in names.items():
        already = rf"(?<!{re.escape(name)} \()"
        text = re.sub(rf"{already}(?<![\w.]){re.escape(full)}(?![\w.])", f"{name} ({full})", text)
    return text


def config_keys(name: str) -> tuple[str, ...]:
    """The full keys of a last name; a dotted key or a section stays as it is."""
    if "." in name:
        return (name,)
    if name in TRL_NAMES:
        raise ConfigError([f"{name}: called {TRL_NAMES[name]} here"])
    if name in SHORT_NAMES:
        return SHORT_NAMES[name]
    keys = [key for key in (*known_leaves(), *RENAMED_KEYS) if key.rpartition(".")[2] == name]
    if len(keys) > 1:
        raise ConfigError([f"{name}: several keys end so; write one of {', '.join(keys)} as **{{'{keys[0]}': ..}}"])
    return (keys[0],) if keys else (name,)  # the loader suggests the nearest key


def put(settings: dict[str, Any], argument: str, key: str, value: Any) -> None:
    if key in settings:
        raise ConfigError([f"{argument}: sets {key}, which is set a second time; keep one of the two"])
    settings[key] = value


def over(below: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings over those of a mapping."""
    if twice := below.keys() & settings.keys() & known_sections():
        name = min(twice)
        raise ConfigError([f"{name}: a section of config= and an argument too; write the argument's keys in full"])
    return {**below, **settings}


def file_and_keys(config: str | Path | Mapping[str, Any] | Config | None) -> tuple[str | Path | None, dict[str, Any]]:
    """The configuration file, or the keys of a configuration made in Python."""
    if config is None or isinstance(config, (str, Path)):
        return config, {}
    if isinstance(config, Config):
        return None, dict(YamlFile(to_yaml(config)).content)
    if isinstance(config, Mapping):
        return None, dict(config)
    raise TypeError(f"config: a YAML file, a mapping of keys or another trainer's config, got {kind(config)}")


# ------------------------------------------------------------------------------------------------------------- objects
def checked_data(argument: str, data: Any) -> Any:
    """A path, or rows: a sequence of mappings or a Hugging Face dataset."""
    if isinstance(data, (str, Path)):
        if not str(data).strip():
            raise TypeError(f"{argument}: an empty text; name a file, or leave it out")
        return str(data)
    if is_dataset(data):
        return nonempty(argument, data)
    if isinstance(data, Sequence) and not isinstance(data, (bytes, bytearray)):
        for number, row in enumerate(data):
            if isinstance(row, (str, Path)):
                raise TypeError(f"{argument}: several files are one text with commas: {argument}='a.jsonl,b.jsonl'")
            if not isinstance(row, Mapping):
                raise TypeError(f"{argument}: row {number} is {kind(row)}; a row is a dict of its columns")
        return nonempty(argument, data)
    expected = f"{argument}: a file, a list of rows (dicts) or a datasets.Dataset, got {kind(data)}"
    raise TypeError(expected + _advice_on_data(argument, data))


def nonempty(argument: str, rows: Any) -> Any:
    if not len(rows):
        raise TypeError(f"{argument}: no rows; a row is a dict such as {{'prompt': .., 'images': [..], 'answer': ..}}")
    return rows


def _advice_on_data(argument: str, data: Any) -> str:
    if type(data).__name__ in ("DatasetDict", "IterableDatasetDict"):
        return f"; choose a split: {argument}=dataset[{next(iter(data), 'train')!r}]"
    if type(data).__name__ == "IterableDataset":
        return "; it has no length: datasets.Dataset.from_list(list(dataset)) has"
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return f"; {argument}=frame.to_dict('records') gives its rows"
    if callable(data):
        return "; functions are for rewards="
    return ""


def checked_rewards(rewards: Any) -> list[Reward]:
    """One or several names and functions, as a list."""
    several = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
    if not several:
        raise TypeError("rewards: an empty list; name a reward, or leave it out for those of the configuration")
    for reward in several:
        if not isinstance(reward, str) and not callable(reward):
            raise TypeError(f"rewards: a built-in's name, 'file.py:name' or a function, got {kind(reward)}")
        if isinstance(reward, str) and reward.startswith(PYTHON_PREFIX):
            raise TypeError(f"rewards: {reward} stands for a function in a configuration; pass the function itself")
    return several


def name_in_config(reward: Reward) -> str:
    """The name in config.yaml of a function that was passed as an object."""
    return reward if isinstance(reward, str) else f"{PYTHON_PREFIX}{getattr(reward, '__name__', type(reward).__name__)}"


def environment_in_config(environment: Any) -> Any:
    """`file.py:Class` of a class that was passed as an object, or of each in a mapping: environments live in processes
    of their own, which load the file."""
    if isinstance(environment, Mapping):
        return {name: environment_in_config(each) for name, each in environment.items()}
    if not isinstance(environment, type):
        return environment
    try:
        file = inspect.getsourcefile(environment)
    except (TypeError, OSError):
        file = None
    if file is None or not Path(file).is_file() or "<locals>" in environment.__qualname__:
        raise TypeError(
            f"environment: the class {environment.__name__} is in no file, and processes of their own load it; write "
            f"it to one: environment='tools.py:{environment.__name__}'"
        )
    return f"{file}:{environment.__qualname__}"


def checked_callbacks(callbacks: Any) -> list[Tracker]:
    several = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in several:
        if isinstance(callback, type) and issubclass(callback, Tracker):
            name = "mtrl.Callback" if callback is Tracker else callback.__name__
            raise TypeError(f"callbacks: {name} is a class; pass an instance: {name}(..)")
        if not isinstance(callback, Tracker):
            raise TypeError(f"callbacks: objects whose class inherits from mtrl.Callback, got {kind(callback)}")
    return several


def kind(value: Any) -> str:
    """The kind of a value, for messages: `a list`, `the function score`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
