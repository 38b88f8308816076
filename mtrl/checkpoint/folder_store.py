"""The checkpoints of a run: Hugging Face folders with the trainer's state next to the weights.

checkpoints/
  step_40/        the actor: weights, config, tokenizer, trainer/ · trainer_state.json · the manifest
    critic/       any other learner, in a folder of its name
  best_model      a link to the checkpoint with the best validation score
  .step_50/       being written; renamed to step_50 when all of it is on the disk

If a save fails (a full disk, a folder that cannot be written), the last good checkpoint stays, the run continues, and
the next save tries again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl.checkpoint.manifest import MANIFEST, DamagedCheckpoint, rename_folder, seal
from mtrl.utils.errors import RunError, StartError
from mtrl.utils.files import regular_file, sync_path
from mtrl.utils.machine import free_memory

if TYPE_CHECKING:
    from mtrl.protocols import Snapshot, Stateful  # they import torch, which this module does not need

STATE = "trainer_state.json"
BEST = "best_model"
ACTOR = "actor"  # its files are at the top of a checkpoint, so that other tools load it as a model
SLACK = 16 << 20  # bytes for settings, manifest and the folder itself in the estimate of a checkpoint's size

logger = logging.getLogger(__name__)


class FolderStore:
    """Saves in the background if CPU memory has room for a copy of the state; one save at a time.

    Keeps the newest `limit` checkpoints (-1: all), at least one, and the best by `metric`. `before_saving` may prepare
    the directory, which nobody else may write to.
    """

    def __init__(
        self,
        directory: Path,
        limit: int = -1,
        metric: str | None = None,
        before_saving: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory, self.limit, self.metric, self.before_saving = directory, limit, metric, before_saving
        self.failure: str | None = None  # why the last save failed
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None  # raised in the writing thread, for `wait`
        for leftover in directory.glob(".step_*"):  # from a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)  # the next save of that step removes the rest
        self.best_score = -math.inf
        self._tidy(self._link_best)

    # --------------------------------------------------------------------------------------------------------- saving
    def is_best(self, score: float | None) -> bool:
        """Whether the score is better than that of every existing checkpoint."""
        return score is not None and score > self.best_score

    def save(
        self, step: int, snapshots: Mapping[str, Snapshot], state: Mapping[str, Any], score: float | None = None
    ) -> None:
        self.wait()
        record = json.dumps({**state, "metric": self.metric, "score": score}, indent=1)
        if self.is_best(score):
            self.best_score = score  # type: ignore[assignment]
        nbytes = sum(snapshot.nbytes for snapshot in snapshots.values())
        copied = sum(snapshot.nbytes for snapshot in snapshots.values() if not snapshot.copied)
        background = 2 * copied <= free_memory()
        try:
            self.before_saving()
            self.directory.mkdir(parents=True, exist_ok=True)
            check_disk_space(self.directory, nbytes + SLACK)
        except OSError as error:
            self._failed(step, error)
            return
        if background:
            snapshots = {name: snapshot.detached() for name, snapshot in snapshots.items()}
        self._writing = threading.Thread(
            target=self._write, args=(step, snapshots, record), name="mtrl-save", daemon=True
        )  # a thread in any case, so that signals are handled while it writes
        self._writing.start()
        if not background:
            self.wait()

    def wait(self) -> None:
        """Waits for the writing thread, and raises its error."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits for the last save; raises RunError if it failed."""
        self.wait()
        if self.failure is not None:
            raise RunError(self.failure)

    def __enter__(self) -> FolderStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A run that fails still gets its last checkpoint; one that must exit at once does not wait for it."""
        if kind is None or issubclass(kind, Exception):
            self.wait()

    def _write(self, step: int, snapshots: Mapping[str, Snapshot], record: str) -> None:
        unfinished, target = self.directory / f".step_{step}", self.directory / f"step_{step}"
        try:
            remove_folder(unfinished)
            unfinished.mkdir(parents=True)
            for name, snapshot in snapshots.items():
                folder = learner_directory(unfinished, name)
                folder.mkdir(exist_ok=True)
                snapshot.write(folder)
            (unfinished / STATE).write_text(record)
            seal(unfinished)
            remove_folder(target)
            rename_folder(unfinished, target)
            self.failure = None
            self._tidy(self._link_best, self._rotate)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            self._failed(step, error)
        except BaseException as error:  # a bug, raised in the main thread by `wait`
            self._error = error

    def _failed(self, step: int, error: OSError) -> None:
        last = next(reversed(self._existing()), None)
        left = f"{last} is the last good one, and the same command resumes from it" if last else "there is no other"
        self.failure = (
            f"the checkpoint of step {step} could not be saved: {error}; {left}. Free disk space, or grant access."
        )
        logger.warning("%s Training continues; the next save tries again.", self.failure)
        self.best_score = self._find_best()[1]  # the one that failed may have raised it

    # ------------------------------------------------------------------------------------------------------ restoring
    def restore(self, checkpoint: Path, learners: Mapping[str, Stateful]) -> None:
        """Restores each learner from the folder of its name; all must be there before any is changed."""
        folders = {name: learner_directory(checkpoint, name) for name in learners}
        if missing := [name for name, folder in folders.items() if not folder.is_dir()]:
            message = f"{checkpoint} holds no {', '.join(missing)}, which this configuration trains"
            raise StartError(f"{message}; use the configuration it was saved with, or another checkpoint")
        for name, learner in learners.items():
            learner.restore(folders[name])

    # ------------------------------------------------------------------------------------------------------- retention
    def _tidy(self, *tasks: Callable[[], None]) -> None:
        """Runs tasks whose failure must not count as that of the checkpoint, which is safe already."""
        try:
            for task in tasks:
                task()
        except OSError as error:
            logger.warning("old checkpoints or best_model in %s could not be updated: %s", self.directory, error)

    def _rotate(self) -> None:
        best = (self.directory / BEST).resolve()
        old = list_checkpoints(self.directory)[: -max(1, self.limit)] if self.limit >= 0 else []
        for path in old:
            if path.resolve() != best:
                remove_folder(path)

    def _link_best(self) -> None:
        best, self.best_score = self._find_best()
        link = self.directory / BEST
        if link.is_symlink() and not link.exists():  # the checkpoint was damaged and moved away
            link.unlink()
        if best is not None and (not link.is_symlink() or os.readlink(link) != best.name):
            new_link = self.directory / f".{BEST}"
            new_link.unlink(missing_ok=True)
            new_link.symlink_to(best.name)
            new_link.replace(link)
            sync_path(self.directory)

    def _existing(self) -> list[Path]:
        """The checkpoints; none if the directory can no longer be read, which must not end the run."""
        try:
            return list_checkpoints(self.directory)
        except OSError:
            return []

    def _find_best(self) -> tuple[Path | None, float]:
        """The checkpoint with the highest score, the oldest of equals."""
        scores = {path: read_score(path, self.metric) for path in self._existing()}
        best = max(scores, key=lambda path: scores[path], default=None)
        return (None, -math.inf) if best is None or scores[best] == -math.inf else (best, scores[best])


def learner_directory(checkpoint: Path, learner: str) -> Path:
    return checkpoint if learner == ACTOR else checkpoint / learner


def read_score(checkpoint: Path, metric: str | None) -> float:
    """The validation score of a checkpoint by this metric; -inf if it has none that can be read."""
    try:
        state = read_state(checkpoint)
    except DamagedCheckpoint:
        return -math.inf
    score = state.get("score") if metric is not None and state.get("metric") == metric else None
    return -math.inf if not isinstance(score, (int, float)) or math.isnan(score) else score


def read_state(checkpoint: Path) -> dict[str, Any]:
    try:
        state = json.loads(regular_file(checkpoint / STATE).read_text(encoding="utf-8"))
        if isinstance(state, dict) and type(state.get("step")) is int and state["step"] >= 0:
            return state
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{STATE} cannot be read ({error})") from error
    raise DamagedCheckpoint(f"{STATE} does not hold the state of a trainer")


def list_checkpoints(directory: Path) -> list[Path]:
    """`step_N`, the newest last. A directory that exists and cannot be read is an error: it may not be empty."""
    names = os.listdir(directory) if os.path.lexists(directory) else []  # a broken link exists
    return sorted((directory / name for name in names if re.fullmatch("step_[0-9]+", name)), key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def remove_folder(folder: Path) -> None:
    """Hides the folder before removing it: if this is killed half-way, the rest must not look like a checkpoint."""
    if folder.exists():
        hidden = folder.with_name(f".{folder.name.lstrip('.')}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden)


def write_folder(target: Path, write: Callable[[Path], None], finish: Callable[[Path], None] = seal) -> None:
    """Makes a folder with the files that `write` puts into it, completely or not at all. It replaces a folder made by
    this function; anything else at the path, such as the checkpoint of a run, is an error. If users may change the
    files afterwards, `finish` syncs the folder instead of sealing it."""
    target = target.absolute()
    replaced = (target / MANIFEST).exists() and not (target / STATE).exists()
    if target.exists() and not replaced and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists already, and was not saved by hand; name a new folder")
    unfinished = target.with_name(f".{target.name}")
    remove_folder(unfinished)
    unfinished.mkdir(parents=True)
    try:
        write(unfinished)
        finish(unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    remove_folder(target)
    rename_folder(unfinished, target)


def check_disk_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"it needs {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free in {directory}")
