"""The checkpoints of a run: Hugging Face folders with the trainer's state beside the weights.

checkpoints/
  step_40/        the actor: weights, config, tokenizer, trainer/ · trainer_state.json · the manifest
    critic/       any other learner, in a folder of its name
  best_model      a link to the checkpoint with the best validation
  .step_50/       being written; renamed to step_50 when all of it is on the disk

A save that fails (a full disk, a folder that cannot be written) costs nothing but itself: the last good checkpoint
stays, the run goes on, and the next save tries again.
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

from mtrl.checkpoint.manifest import MANIFEST, DamagedCheckpoint, move_to, seal, to_disk
from mtrl.utils.errors import RunError, StartError
from mtrl.utils.files import regular_file
from mtrl.utils.machine import free_memory

if TYPE_CHECKING:
    from mtrl.protocols import Snapshot, Stateful  # they import torch, which nothing here needs

STATE = "trainer_state.json"
BEST = "best_model"
ACTOR = "actor"  # its files lie at the top of a checkpoint, which so is a model for everybody else
SLACK = 16 << 20  # bytes for settings, manifest and the folder itself, in the estimate of a checkpoint's size

logger = logging.getLogger(__name__)


class FolderStore:
    """Saves while the training goes on, where main memory holds a copy of the state; one save at a time.

    The newest `limit` checkpoints stay (-1: all), at least one, and the best by `metric`. `before_saving` may prepare
    the place. Whoever makes a store must be the only one to write there.
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
        self._error: BaseException | None = None  # what the writing thread raised, for whoever waits for it
        for leftover in directory.glob(".step_*"):  # a run that was killed left them
            shutil.rmtree(leftover, ignore_errors=True)  # whoever saves that step again removes the rest
        self.best_score = -math.inf
        self._tidy(self._link_best)

    # --------------------------------------------------------------------------------------------------------- saving
    def is_best(self, score: float | None) -> bool:
        """Whether the score is better than that of every checkpoint there; an equal one comes too late."""
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
        )  # a thread in any case: a signal is answered while it writes
        self._writing.start()
        if not background:
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being written, and raises what went wrong in the writing thread."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Ends the saving: what the run asked for last must be there."""
        self.wait()
        if self.failure is not None:
            raise RunError(self.failure)

    def __enter__(self) -> FolderStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A run that fails still gets its last checkpoint; one that is told to leave at once does not wait for it."""
        if kind is None or issubclass(kind, Exception):
            self.wait()

    def _write(self, step: int, snapshots: Mapping[str, Snapshot], record: str) -> None:
        unfinished, target = self.directory / f".step_{step}", self.directory / f"step_{step}"
        try:
            remove(unfinished)
            unfinished.mkdir(parents=True)
            for name, snapshot in snapshots.items():
                folder = step_directory(unfinished, name)
                folder.mkdir(exist_ok=True)
                snapshot.write(folder)
            (unfinished / STATE).write_text(record)
            seal(unfinished)
            remove(target)
            move_to(unfinished, target)
            self.failure = None
            self._tidy(self._link_best, self._rotate)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            self._failed(step, error)
        except BaseException as error:  # a mistake of ours, raised where the run can see it
            self._error = error

    def _failed(self, step: int, error: OSError) -> None:
        last = next(reversed(self._seen()), None)
        kept = f"{last} is the last good one, and the same command goes on from there" if last else "there is no other"
        self.failure = f"the checkpoint of step {step} could not be saved: {error}; {kept}. Make room, or give access."
        logger.warning("%s Training goes on; the next save tries again.", self.failure)
        self.best_score = self._best()[1]  # the one that failed may have raised it

    # ------------------------------------------------------------------------------------------------------ restoring
    def restore(self, checkpoint: Path, learners: Mapping[str, Stateful]) -> None:
        """Restores each learner from what was saved under its name; all are looked for before any is changed."""
        folders = {name: step_directory(checkpoint, name) for name in learners}
        if missing := [name for name, folder in folders.items() if not folder.is_dir()]:
            told = f"{checkpoint} holds no {', '.join(missing)}, which this configuration trains"
            raise StartError(f"{told}; go on with the configuration it was saved under, or name another checkpoint")
        for name, learner in learners.items():
            learner.restore(folders[name])

    # --------------------------------------------------------------------------------------------------- what is kept
    def _tidy(self, *works: Callable[[], None]) -> None:
        """Updates best_model and rotates. The checkpoint is safe already: nothing here may count as its failure."""
        try:
            for work in works:
                work()
        except OSError as error:
            logger.warning("%s could not be tidied: %s", self.directory, error)

    def _rotate(self) -> None:
        best = (self.directory / BEST).resolve()
        old = checkpoints(self.directory)[: -max(1, self.limit)] if self.limit >= 0 else []
        for path in old:
            if path.resolve() != best:
                remove(path)

    def _link_best(self) -> None:
        best, self.best_score = self._best()
        link = self.directory / BEST
        if link.is_symlink() and not link.exists():  # the checkpoint was damaged, and is set aside
            link.unlink()
        if best is not None and (not link.is_symlink() or os.readlink(link) != best.name):
            beside = self.directory / f".{BEST}"
            beside.unlink(missing_ok=True)
            beside.symlink_to(best.name)
            beside.replace(link)
            to_disk(self.directory)

    def _seen(self) -> list[Path]:
        """The checkpoints; none where the folder cannot be read any more, which costs a save and not the run."""
        try:
            return checkpoints(self.directory)
        except OSError:
            return []

    def _best(self) -> tuple[Path | None, float]:
        """The checkpoint with the highest score, the first of equals."""
        scores = {path: saved_score(path, self.metric) for path in self._seen()}
        best = max(scores, key=lambda path: scores[path], default=None)
        return (None, -math.inf) if best is None or scores[best] == -math.inf else (best, scores[best])


def step_directory(checkpoint: Path, learner: str) -> Path:
    return checkpoint if learner == ACTOR else checkpoint / learner


def saved_score(checkpoint: Path, metric: str | None) -> float:
    """The score of a checkpoint's validation by that metric; -inf where it has none, or none that can be read."""
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
    raise DamagedCheckpoint(f"{STATE} is no state of a trainer")


def checkpoints(directory: Path) -> list[Path]:
    """`step_N`, the newest last. A folder that is there and cannot be read is an error: it is not empty."""
    names = os.listdir(directory) if os.path.lexists(directory) else []  # a link that leads nowhere is there
    return sorted((directory / name for name in names if re.fullmatch("step_[0-9]+", name)), key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def remove(folder: Path) -> None:
    """Removes a folder, hidden first: what is killed half-way must not look like a checkpoint."""
    if folder.exists():
        hidden = folder.with_name(f".{folder.name.lstrip('.')}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden)


def write_folder(target: Path, write: Callable[[Path], None], finish: Callable[[Path], None] = seal) -> None:
    """A folder of its own with what `write` puts into it: whole, or not at all. One that was sealed so is replaced;
    anything else that is there, the checkpoint of a run above all, is left alone. A folder whose files a user may
    change afterwards is settled in place of sealed."""
    target = target.absolute()
    replaced = (target / MANIFEST).exists() and not (target / STATE).exists()
    if target.exists() and not replaced and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there already, and was not saved by hand; name a new folder")
    unfinished = target.with_name(f".{target.name}")
    remove(unfinished)
    unfinished.mkdir(parents=True)
    try:
        write(unfinished)
        finish(unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    remove(target)
    move_to(unfinished, target)


# ---------------------------------------------------------------------------------------------------------------- room
def check_disk_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"it needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free in {directory}")
