"""A run that is ready to train: it saves what it can when it is interrupted or fails, and restarts after a loss."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrl.config import Config
from mtrl.data import DataError
from mtrl.training.interrupt import Interrupt
from mtrl.training.loop import Loop
from mtrl.training.resume import Start
from mtrl.utils.errors import Diverged, PassesCut, RankLost, RunError
from mtrl.utils.machine import started_by_torchrun
from mtrl.utils.terminal import say_at_once

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """A run that is ready to train."""

    config: Config
    directory: Path
    id: str  # the same for every attempt of the run
    start: Start
    loop: Loop
    interrupt: Interrupt
    closing: ExitStack  # closes everything the run has opened
    # Runs the passes at their maximum size, before the first step; returns the seconds of each phase.
    preflight: Callable[[], dict[str, float]] = dict
    loaded: Any = None  # the trained `compose.policy.LoadedModel` of a single process, which outlives the run

    def train(self) -> None:
        """Train to the last step. On a signal, save after the current step and raise what the signal would have raised:
        KeyboardInterrupt or SystemExit."""
        with self.closing, _data_errors_as_run_errors():
            if self.config.training.val_only:
                self.loop.validate()
                return
            self.preflight()
            with self.interrupt, self._save_on_error():
                self.loop.run()
                self.loop.components.store.close()
        if self.interrupt.asked():
            self._report_saved()
            self.interrupt.leave()

    @contextmanager
    def _save_on_error(self) -> Iterator[None]:
        """On an error, save the last complete step, unless an update has begun to change the weights."""
        try:
            yield
        except Diverged:
            raise  # these weights are useless; resume from an earlier checkpoint
        except Exception:
            if self.loop.whole is not None and self.loop.saved < self.loop.done:
                self._save_last_step()
            raise

    def _save_last_step(self) -> None:
        try:
            self.loop.save()
            self.loop.components.store.close()
        except Exception as error:  # the error that ended the run is more important
            logger.warning("step %d could not be saved: %s", self.loop.done, error)
        else:
            self._report_saved()

    def _report_saved(self) -> None:
        name = self.config.training.experiment_name  # needed to resume: `mtrl demo` chooses a new one each time
        resume = f"the same command (in Python train()) resumes from there, with training.experiment_name={name}"
        say_at_once(f"saved after step {self.loop.done} in {self.directory}; {resume}")


@contextmanager
def _data_errors_as_run_errors() -> Iterator[None]:
    """Users can repair unreadable data, so it is reported without a traceback."""
    try:
        yield
    except DataError as error:
        raise RunError(str(error)) from error


def train_with_restarts(config: Config, begin: Callable[[Config], Run]) -> Run:
    """Train to the end. A run that loses a process restarts from its last checkpoint, `training.max_restarts` times; a
    run whose passes were reduced restarts as often as needed."""
    left = config.training.max_restarts
    while True:
        try:
            return _trained(begin(config))
        except PassesCut as error:
            if started_by_torchrun():  # which ends all processes and restarts them
                raise RunError(f"{error}the same command resumes from the last checkpoint") from error
            say_at_once(f"{error}the run resumes from its last checkpoint")
        except RankLost as error:
            if not left:
                raise
            say_at_once(f"{error}the run resumes from its last checkpoint ({left} more restarts)")
            left -= 1
        config = replace(config, training=replace(config.training, fresh=False))  # its directory exists now
        gc.collect()  # the models of the lost attempt, if they were in this process


def _trained(run: Run) -> Run:
    run.train()
    return run
