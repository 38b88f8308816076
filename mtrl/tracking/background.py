"""Writes logs in a thread: a training step hands its work over and continues."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LIMIT_BYTES = 16 * 2**20  # size of one log; a full one replaces the previous `name.1.md`
PATIENCE_S = 30.0  # how long the end of a run waits for the last jobs

logger = logging.getLogger(__name__)


class Background:
    """Runs jobs in a thread, one after another. If it falls behind, jobs are dropped and counted: training never waits
    for it. Only the first failure of a job is logged, and it stops nothing."""

    def __init__(self, name: str, waiting: int = 4) -> None:
        self.name, self.dropped = name, 0
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(waiting)
        self._has_failed = False
        self._thread: threading.Thread | None = None  # from the first job on: a build that fails leaves none

    def submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Wait a limited time for the submitted jobs."""
        if self._thread is None:
            return
        with suppress(queue.Full):  # the thread hangs in a job, which is logged below
            self._jobs.put(None, timeout=PATIENCE_S)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            logger.warning("%s: the last entries were not written within %.0f s and are lost", self.name, PATIENCE_S)
        if self.dropped:
            logger.warning("%s: %d entries were dropped: writing was slower than training", self.name, self.dropped)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # a log must never end a run
                if not self._has_failed:
                    message = "%s: an entry cannot be written (%s); the run continues"
                    logger.warning(message, self.name, error, exc_info=not isinstance(error, OSError))
                self._has_failed = True


def append_bounded(path: Path, text: str, limit: int = LIMIT_BYTES) -> None:
    """Append to a Markdown file. A file that would pass the limit is renamed first; the newest two parts stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    if path.exists() and path.stat().st_size + len(data) > limit:
        path.replace(path.with_suffix(f".1{path.suffix}"))
    with path.open("ab") as file:
        file.write(data)
