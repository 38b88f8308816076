"""Chooses where a run starts: at its own newest checkpoint, at a given one, or at step 0."""

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

from mtrl.checkpoint.folder_store import STATE, list_checkpoints, read_state
from mtrl.checkpoint.learner_snapshot import OPTIMIZER_STATE
from mtrl.checkpoint.manifest import MANIFEST, DamagedCheckpoint, check_manifest
from mtrl.checkpoint.run_directory import CONFIG, RunDirectory
from mtrl.config import Config, ConfigError, load_config
from mtrl.config.tree import known_leaves
from mtrl.data.row_settings import DataError
from mtrl.protocols import TaskSource
from mtrl.training.off_policy import RUN_STATE
from mtrl.utils.errors import Finished, StartError

ANOTHER = "choose another training.experiment_name for a new run (or overwrite=True in Python)"
MOVE_AWAY = "move the folder away to resume from the checkpoint before it"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """The state to start with; without a checkpoint, the given model at step 0."""

    checkpoint: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    own: bool = False  # whether the checkpoint belongs to this run

    @property
    def step(self) -> int:
        return self.state.get("step", 0)

    def describe(self) -> str:
        if self.checkpoint is None:
            return "starting at step 0"
        return f"{'resuming' if self.own else 'starting'} after step {self.step}, from {self.checkpoint}"


def claim(path: Path, config: Config, fresh: bool) -> RunDirectory:
    """Open the run directory exclusively for this process."""
    directory = RunDirectory(path)
    try:
        check_same_run(directory, config, fresh)
    except StartError:
        directory.close()
        raise
    return directory


def check_same_run(directory: RunDirectory, config: Config, fresh: bool) -> None:
    """Raise StartError if the directory belongs to another run."""
    if not directory.used:
        return
    if fresh:
        raise StartError(f"training.fresh: {directory.path} holds a run already; {ANOTHER}")
    saved = directory.path / CONFIG
    if not saved.exists():
        why = f"its {CONFIG} is missing, so it cannot be checked that the run was started with this configuration"
        logger.warning("%s holds a run, but %s; if it was not, %s", directory.path, why, ANOTHER)
        return
    check_same_configuration(directory.path, config)


def check_same_configuration(directory: Path, config: Config) -> None:
    """Raise StartError if the run there was started with other settings."""
    try:
        before = load_config(directory / CONFIG, saved=True)
    except ConfigError as error:
        raise StartError(f"{directory} holds a run whose {CONFIG} cannot be read; {ANOTHER}. {error}") from error
    if differing := differing_keys(before, config):
        problem = f"{directory} holds a run of another configuration and would not resume to the same numbers"
        raise StartError("\n  ".join([f"{problem}; set these back to resume it, or {ANOTHER}:", *differing]))


def differing_keys(before: Config, now: Config) -> list[str]:
    """`key: was .., is ..` for each key that differs and may not change within a run."""
    fixed = [key for key, leaf in known_leaves().items() if not leaf.may_change]
    values = {key: (attrgetter(key)(before), attrgetter(key)(now)) for key in fixed}
    return [f"{key}: was {old!r}, is {new!r}" for key, (old, new) in values.items() if old != new]


def find_start(directory: Path, steps: int | None, *, find_last: bool = True, given: str | None = None) -> Start:
    """The run's own newest checkpoint, else a `given` one, else step 0. Raises `Finished` if the run has done all its
    `steps`; None skips that check, for runs that are only read."""
    start = _own_start(directory, find_last) or _given_start(given, directory)
    owes_validation = start.own and bool(start.state.get("unvalidated"))  # an error came before it
    if steps is None or start.step < steps or (start.step == steps and owes_validation):
        return start
    done = f"step {start.step} of {steps}, {start.checkpoint}"
    if start.own:
        more = "raise training.max_steps to continue, or choose another training.experiment_name for a new run"
        raise Finished(directory, f"{directory} is finished: {done}; {more}")
    raise StartError(f"training.load_checkpoint_path: nothing is left to do at {done}; raise training.max_steps")


def _own_start(directory: Path, find_last: bool) -> Start | None:
    saves = directory / "checkpoints"
    if find_last:
        newest = newest_intact(saves, set_aside=True)
        return None if newest is None else Start(newest, saved_state(newest), own=True)
    if existing := list_checkpoints(saves):
        problem = f"{directory} holds checkpoints already (the newest: {existing[-1].name})"
        raise StartError(f"training.find_last_checkpoint: {problem}; choose another training.experiment_name")
    return None


def _given_start(given: str | None, directory: Path) -> Start:
    if given is None:
        return Start()
    path = Path(given).expanduser()
    if not path.exists() and (meant := _find_meant(path, directory)):
        raise StartError(f"training.load_checkpoint_path: there is no {path}; did you mean {meant}?")
    checkpoint = checkpoint_at(path)
    return Start(checkpoint, saved_state(checkpoint))


def _find_meant(path: Path, directory: Path) -> Path | None:
    """The checkpoint of a run next to `directory` that EasyR1's `checkpoints/EXPERIMENT/global_step_N` names."""
    name = path.name.removeprefix("global_")
    runs = (directory.with_name(path.parent.name), *sorted(directory.parent.parent.glob(f"*/{path.parent.name}")))
    return next((found for run in runs if (found := run / "checkpoints" / name).is_dir()), None)


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """Read the trainer state. The file may be invalid although its checksum fits, if somebody edited both."""
    try:
        return read_state(checkpoint)
    except DamagedCheckpoint as error:
        raise StartError(f"{checkpoint}: {error}; {MOVE_AWAY}") from error


@contextmanager
def restoring(checkpoint: Path) -> Iterator[None]:
    """Turn any error of restoring an edited checkpoint into one line that names it."""
    try:
        yield
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, SafetensorError) as error:
        if str(checkpoint) in str(error):
            raise
        problem = f"{STATE} or trainer/ of {checkpoint} was changed since it was written"
        raise StartError(f"{problem} ({type(error).__name__}: {error}); {MOVE_AWAY}") from error


def fitting_state(start: Start, source: TaskSource) -> dict[str, Any]:
    """The state of another run, to start from. Its position in the data is used only if data and order are the same."""
    try:
        source.restore(start.state["source"])
    except DataError as error:
        message = "weights and optimizer come from %s; the data start at the beginning, since they differ: %s"
        logger.warning(message, start.checkpoint, error)
    state = {name: value for name, value in start.state.items() if name not in RUN_STATE}
    return {**state, "source": source.state()}


def checkpoint_at(path: Path) -> Path:
    """The checkpoint at a step directory, best_model, or a run directory (its newest one)."""
    if (path / "checkpoints").is_dir():
        if (newest := newest_intact(path / "checkpoints")) is None:
            raise StartError(f"{path} is a run without a checkpoint")
        return newest
    if not path.is_dir():
        raise StartError(
            f"there is no checkpoint {path} (from {Path.cwd()}); name a run directory, or a step directory or "
            "best_model in it: OUTPUT_DIR/PROJECT/EXPERIMENT/checkpoints/step_N"
        )
    try:
        check_manifest(path)
    except DamagedCheckpoint as error:
        raise StartError(
            f"{path} is no complete checkpoint of a run: {error}. To start from the weights of a model alone, set "
            "worker.actor.model.model_path"
        ) from error
    return path.resolve()  # best_model is a link and may change


def check_undamaged(model: Path) -> None:
    """Raise StartError if the model is a damaged checkpoint of a run. Its optimizer state is not needed."""
    if (model / MANIFEST).exists():
        try:
            check_manifest(model, skip=(OPTIMIZER_STATE,))
        except DamagedCheckpoint as error:
            raise StartError(f"the checkpoint {model} is damaged: {error}; use another one") from error


def newest_intact(directory: Path, set_aside: bool = False, but: Collection[str] = ()) -> Path | None:
    """The newest checkpoint whose files match their checksums (except those of `but`); None if there is no checkpoint.
    Damaged ones are logged, and with `set_aside` renamed, so that they are skipped but not lost."""
    damaged: dict[Path, DamagedCheckpoint] = {}
    for checkpoint in reversed(list_checkpoints(directory)):
        try:
            check_manifest(checkpoint, but)
        except DamagedCheckpoint as error:
            damaged[checkpoint] = error
            logger.warning("%s is damaged (%s); the checkpoint before it is used", checkpoint, error)
            continue
        if set_aside:
            for bad in damaged:
                bad.rename(free_name(bad.with_name(f"{bad.name}.damaged")))
        return checkpoint
    if damaged:
        problems = "; ".join(f"{path.name}: {error}" for path, error in damaged.items())
        raise StartError(f"every checkpoint in {directory} is damaged: {problems}. Move them away to start from step 0")
    return None


def free_name(path: Path) -> Path:
    """The path, with a number if it exists already: the same step may be damaged twice."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return next(each for each in chain([path], numbered) if not each.exists())
