"""What all commands share: options, runs and checkpoints by path, messages."""

from __future__ import annotations

import logging
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from mtrl.config import Config, ConfigError, load_config, take_file
from mtrl.utils.embedded_models import MODELS
from mtrl.utils.errors import StartError, explain_os_errors
from mtrl.utils.terminal import separate_log

Result = TypeVar("Result")


class OptionParser(ArgumentParser):
    """Reads `--name value` and `--name=value`, each at most once, and leaves everything else in its order.

    Paths are no positional arguments of argparse: in `--a.b c FILE` it would take the override's value for the path.
    """

    def __init__(self, help_page: str | None, *names: str) -> None:
        usage = next((line for line in (help_page or "").splitlines() if line.startswith("mtrl ")), "mtrl --help")
        super().__init__(usage=usage, add_help=False, allow_abbrev=False)
        self.register("action", None, _StoreOnce)
        for name in names:
            self.add_argument(name)

    def parse_path(self, arguments: Sequence[str], question: str) -> tuple[Namespace, str, list[str]]:
        """The options, the path and the overrides; `question` is the error if there is no path."""
        options, others = self.parse_known_args(arguments)
        path, overrides = take_file(others)
        if not path:
            self.error(question)
        return options, path, overrides

    def parse_paths(self, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
        """The options and all other arguments, which may not look like options."""
        options, others = self.parse_known_args(arguments)
        if unknown := next((argument for argument in others if argument.startswith("-")), None):
            self.error(f"there is no option {unknown}")
        return options, others

    def error(self, message: str) -> NoReturn:
        raise StartError(f"{message.removeprefix('argument ')}{' ' if message.endswith('?') else '; '}{self.usage}")


class _StoreOnce(Action):
    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None) -> None:
        if values == "":
            parser.error(f"{option}: expected one argument")
        if getattr(namespace, self.dest) is not self.default:
            parser.error(f"{option}: given 2 times, keep one")
        setattr(namespace, self.dest, values)


def whole_number(least: int = 1) -> Callable[[str], int]:
    """The type of an option that takes a whole number."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text} is no whole number of at least {least}")
        return int(text)

    return parse


def check_call(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call `function` before training starts, when a ValueError is about the user's data, model or reward file: it
    becomes a StartError."""
    try:
        with explain_os_errors():
            return function(*arguments)
    except ConfigError:
        raise
    except ValueError as error:
        raise StartError(str(error)) from error


def check_new_file(name: str) -> Path:
    """The path of --out, if it can be written: better checked before a model is loaded."""
    path = Path(name).expanduser()
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:  # such as a name that is too long
        raise StartError(f"--out: {name}: {error.strerror}") from error
    else:
        raise StartError(f"--out: {name} exists already; name another file, or remove it")
    if not path.parent.is_dir():
        raise StartError(f"--out: {path.parent} is no directory")
    return path


def log_line(text: str, log: TextIO | None = None) -> None:
    """Print to stderr and to the log."""
    for stream in filter(None, (sys.stderr, log)):
        with suppress(OSError):  # nobody reads the stream any more
            print(text, file=stream, flush=True)


def open_log() -> TextIO | None:
    """The log of a run on stdout, if that is no terminal and not the same as stderr; warnings go there from now on."""
    log = separate_log()
    if log is not None:
        handler = logging.StreamHandler(log)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logging.getLogger().addHandler(handler)
    return log


@explain_os_errors()
def find_run_and_checkpoint(path: str) -> tuple[Path | None, Path]:
    """Resolve RUN|CHECKPOINT: a run and its newest checkpoint, or a checkpoint and its run, if any."""
    from mtrl.checkpoint.learner_snapshot import OPTIMIZER_STATE
    from mtrl.training.resume import newest_intact  # here, since these import torch and not every command needs that

    given = Path(path)
    run_dir = next((each for each in (given, given.absolute().parent.parent) if (each / "config.yaml").is_file()), None)
    checkpoint = newest_intact(given / "checkpoints", but=(OPTIMIZER_STATE,)) if run_dir == given else given
    if checkpoint is None:
        raise ConfigError([f"{path} is a run without a checkpoint"])
    return run_dir, checkpoint


@explain_os_errors()
def load_evaluation_config(path: str, overrides: Sequence[str], data: str | None = None) -> Config:
    """The configuration of a run with its newest checkpoint; the settings of an embedded task for its model, given by
    name or path; the defaults for any other checkpoint. `data` replaces the validation data."""
    from mtrl.embedded.embedded_rows import CONFIG_FILES  # here for the same reason

    given = Path(path)
    names = [n for n, folder in MODELS.items() if given.resolve() == folder or (path == n and not given.exists())]
    run_dir, checkpoint = find_run_and_checkpoint(str(MODELS[names[0]]) if names else path)
    file = run_dir / "config.yaml" if run_dir else CONFIG_FILES[names[0]] if names else None
    named = [f"worker.actor.model.model_path={checkpoint}", *([f"dataset.val_files={data}"] if data else [])]
    return load_config(file, [*named, *overrides], saved=True)
