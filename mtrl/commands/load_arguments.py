"""What the commands have in common: their arguments, and how they speak."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from mtrl.config import Config, ConfigError, load_config, take_file
from mtrl.embedded.embedded_rows import CONFIG_FILES, MODELS
from mtrl.utils.errors import StartError, opening
from mtrl.utils.terminal import separate_log

Result = TypeVar("Result")


def started(begin: Callable[..., Result], *arguments: Any) -> Result:
    """Calls `begin`. Before training a ValueError is about the user's data, model or reward file, so it becomes a
    StartError; later it would be our mistake."""
    try:
        with opening():
            return begin(*arguments)
    except ConfigError:
        raise
    except ValueError as error:
        raise StartError(str(error)) from error


def say(text: str, log: TextIO | None = None) -> None:
    for stream in filter(None, (sys.stderr, log)):
        with suppress(OSError):  # nobody listens any more
            print(text, file=stream, flush=True)


def warnings_to_log() -> TextIO | None:
    """The log of a run on stdout, where that leads to a place of its own; warnings go there from now on, too."""
    log = separate_log()
    if log is not None:
        handler = logging.StreamHandler(log)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logging.getLogger().addHandler(handler)
    return log


def take_option(arguments: Sequence[str], name: str, wanted: str) -> tuple[str | None, list[str]]:
    """The value of `--name value` or `--name=value`, and the other arguments; `wanted` is said where there is none."""
    others = [part for word in arguments for part in (word.split("=", 1) if word.startswith(f"{name}=") else [word])]
    if name not in others:
        return None, others
    if others.count(name) > 1:
        raise ConfigError([f"{name}: given {others.count(name)} times; keep one"])
    place = others.index(name)
    value = "".join(others[place + 1 : place + 2])
    if not value or value.startswith("--"):
        raise ConfigError([f"{name}: {wanted}"])
    del others[place : place + 2]
    return value, others


def take_path_and_data(arguments: Sequence[str], question: str) -> tuple[str, str | None, list[str]]:
    """PATH [--data F] and the overrides; the question is asked where there is no path."""
    data, others = take_option(arguments, "--data", "name a file, a directory or a dataset")
    path, overrides = take_file(others)
    if not path:
        raise ConfigError([question])
    return path, data, overrides


@opening()
def run_and_checkpoint(path: str) -> tuple[Path | None, Path]:
    """What a user means by RUN|CHECKPOINT: a run and its newest checkpoint, or a checkpoint and the run it lies in."""
    from mtrl.checkpoint.learner_snapshot import OPTIMIZER_STATE
    from mtrl.training.resume import newest_intact  # here, since these import torch and not every command needs that

    place = Path(path)
    run = next((each for each in (place, place.absolute().parent.parent) if (each / "config.yaml").is_file()), None)
    checkpoint = newest_intact(place / "checkpoints", but=(OPTIMIZER_STATE,)) if run == place else place
    if checkpoint is None:
        raise ConfigError([f"{path} is a run without a checkpoint"])
    return run, checkpoint


@opening()
def evaluation_config(path: str, overrides: list[str]) -> Config:
    """A run's own configuration with its newest checkpoint; for a bare checkpoint the defaults, and for the model of an
    embedded task, by its name or place, the settings of that."""
    place = Path(path)
    names = [n for n, folder in MODELS.items() if place.resolve() == folder or (path == n and not place.exists())]
    run, checkpoint = run_and_checkpoint(str(MODELS[names[0]]) if names else path)
    file = run / "config.yaml" if run else CONFIG_FILES[names[0]] if names else None
    return load_config(file, [f"worker.actor.model.model_path={checkpoint}", *overrides], saved=True)
