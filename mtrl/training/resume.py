"""Where a run starts: at its own newest checkpoint, at one that it was given, or at the beginning."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mtrl.checkpoint.folder_store import STATE, checkpoints, read_state
from mtrl.checkpoint.learner_snapshot import OPTIMIZER_STATE
from mtrl.checkpoint.manifest import MANIFEST, DamagedCheckpoint, check
from mtrl.checkpoint.run_directory import CONFIG, RunDirectory
from mtrl.config import Config, ConfigError, load_config
from mtrl.config.tree import known_leaves
from mtrl.data.row_settings import DataError
from mtrl.protocols import TaskSource
from mtrl.training.off_policy import OWN
from mtrl.utils.errors import Finished, StartError

ANOTHER = "choose another training.experiment_name for a new run"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """The state to begin with; no checkpoint: the model as it was given."""

    checkpoint: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    own: bool = False  # whether the checkpoint is of this run, rather than of another one

    @property
    def step(self) -> int:
        return self.state.get("step", 0)

    def told(self) -> str:
        """Where the run starts, in words for the user."""
        if self.checkpoint is None:
            return "starting at step 0"
        return f"{'going on' if self.own else 'starting'} after step {self.step}, from {self.checkpoint}"


def claim(path: Path, config: Config, fresh: bool) -> RunDirectory:
    """The run's folder, for this process alone."""
    directory = RunDirectory(path)
    try:
        check_same_run(directory, config, fresh)
    except StartError:
        directory.close()
        raise
    return directory


def check_same_run(directory: RunDirectory, config: Config, fresh: bool) -> None:
    """Raises StartError where another run has used the folder: it belongs to that run."""
    if not directory.used:
        return
    if fresh:
        raise StartError(f"training.fresh: {directory.path} holds a run already; {ANOTHER}")
    saved = directory.path / CONFIG
    if not saved.exists():
        told = f"its {CONFIG} is gone, so nobody can tell whether this configuration is the one it was started with"
        logger.warning("%s holds a run, but %s; if it is not, %s", directory.path, told, ANOTHER)
        return
    check_same_configuration(directory.path, config)


def check_same_configuration(directory: Path, config: Config) -> None:
    """Raises StartError where the run there was started with other settings."""
    try:
        before = load_config(directory / CONFIG, saved=True)
    except ConfigError as error:
        told = f"{directory} holds a run whose configuration cannot be read any more"
        raise StartError(f"{told}; {ANOTHER}. {error}") from error
    if differing := differing_keys(before, config):
        told = f"{directory} holds a run of another configuration, which would not go on to the same numbers"
        raise StartError("\n  ".join([f"{told}; set these back to go on with it, or {ANOTHER}:", *differing]))


def differing_keys(before: Config, now: Config) -> list[str]:
    """`key: was .., is ..` for each key that differs and may not change within a run."""
    kept = [key for key, leaf in known_leaves().items() if not leaf.may_change]
    values = {key: (attrgetter(key)(before), attrgetter(key)(now)) for key in kept}
    return [f"{key}: was {old!r}, is {new!r}" for key, (old, new) in values.items() if old != new]


def find_start(directory: Path, steps: int | None, *, find_last: bool = True, given: str | None = None) -> Start:
    """Where to begin: the run's own newest checkpoint comes before one that is `given`. `steps` is the length of the
    run, which is `Finished` after so many; None where the run is only looked at."""
    start = _own_start(directory, find_last) or _given_start(given)
    if steps is None or start.step < steps:
        return start
    done = f"step {start.step} of {steps}, {start.checkpoint}"
    if start.own:
        more = "raise training.max_steps to go on, or choose another training.experiment_name for a new run"
        raise Finished(directory, f"{directory} is finished: {done}; {more}")
    raise StartError(f"training.load_checkpoint_path: nothing is left to do at {done}; raise training.max_steps")


def _own_start(directory: Path, find_last: bool) -> Start | None:
    saves = directory / "checkpoints"
    if find_last:
        newest = newest_intact(saves, set_aside=True)
        return None if newest is None else Start(newest, saved_state(newest), own=True)
    if found := checkpoints(saves):
        told = f"{directory} holds checkpoints (the newest: {found[-1].name}), which a new start would mix with its own"
        raise StartError(f"training.find_last_checkpoint: {told}; choose another training.experiment_name")
    return None


def _given_start(given: str | None) -> Start:
    if given is None:
        return Start()
    checkpoint = checkpoint_at(Path(given).expanduser())
    return Start(checkpoint, saved_state(checkpoint))


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """The trainer's state. A file that somebody changed and sealed again is whole by its checksum, and yet no state."""
    try:
        return read_state(checkpoint)
    except DamagedCheckpoint as error:
        raise StartError(f"{checkpoint}: {error}; move the folder away to go on from the checkpoint before") from error


@contextmanager
def restoring(checkpoint: Path) -> Iterator[None]:
    """What a state that somebody changed does to whoever takes it up becomes one line with its name."""
    try:
        yield
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, SafetensorError) as error:
        if str(checkpoint) in str(error):
            raise
        told = f"{checkpoint} is not as a run wrote it, in {STATE} or in trainer/ ({type(error).__name__}: {error})"
        raise StartError(f"{told}; move the folder away to go on from the checkpoint before") from error


def fitting_state(start: Start, source: TaskSource) -> dict[str, Any]:
    """The state of another run, to start from. Its place in the data counts only where data and order are the same."""
    try:
        source.restore(start.state["source"])
    except DataError as error:
        told = f"weights and optimizer are those of {start.checkpoint}; the data start at their beginning"
        logger.warning("%s, since they are not that run's: %s", told, error)
    state = {name: value for name, value in start.state.items() if name not in OWN}  # what it saw is not ours to see
    return {**state, "source": source.state()}


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a user means by a step directory, best_model, or a run directory (its newest one)."""
    if (path / "checkpoints").is_dir():
        if (newest := newest_intact(path / "checkpoints")) is None:
            raise StartError(f"{path} is a run without a checkpoint")
        return newest
    if not path.is_dir():
        raise StartError(f"there is no checkpoint {path}; name a step directory, a run directory or best_model")
    try:
        check(path)
    except DamagedCheckpoint as error:
        raise StartError(
            f"{path} is no whole checkpoint of a run: {error}. To start from the weights alone of some model, set "
            "worker.actor.model.model_path"
        ) from error
    return path.resolve()  # best_model is a link, and moves


def check_undamaged(model: Path) -> None:
    """A model that is a checkpoint of a run must be whole. Its optimizer is not needed to look at it."""
    if (model / MANIFEST).exists():
        try:
            check(model, but=(OPTIMIZER_STATE,))
        except DamagedCheckpoint as error:
            raise StartError(f"the checkpoint {model} is damaged: {error}; use another one") from error


def newest_intact(directory: Path, set_aside: bool = False, but: Collection[str] = ()) -> Path | None:
    """The newest checkpoint there that is as it was written, files of `but` aside; None where there are none at all.
    Damaged ones are said, and with `set_aside` renamed, so that they neither count nor get lost."""
    damaged: dict[Path, DamagedCheckpoint] = {}
    for checkpoint in reversed(checkpoints(directory)):
        try:
            check(checkpoint, but)
        except DamagedCheckpoint as error:
            damaged[checkpoint] = error
            logger.warning("%s is damaged (%s) and is left out for the one before", checkpoint, error)
            continue
        if set_aside:
            for bad in damaged:
                bad.rename(free_name(bad.with_name(f"{bad.name}.damaged")))
        return checkpoint
    if damaged:
        told = "; ".join(f"{path.name}: {error}" for path, error in damaged.items())
        raise StartError(f"no checkpoint in {directory} is whole: {told}. Move them away to start again from step 0")
    return None


def free_name(path: Path) -> Path:
    """The path, with a number where there is something of that name: a disk may damage the same step twice."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return next(each for each in chain([path], numbered) if not each.exists())
