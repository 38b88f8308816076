"""Writing for people off the training path: a step hands its work over and goes on."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LIMIT_BYTES = 16 * 2**20  # size of one log; a full one becomes `name.1.md` in place of the one before
PATIENCE_S = 30.0  # how long the end of a run waits for the last jobs

logger = logging.getLogger(__name__)


class Background:
    """Does jobs in a thread, one after the other. Where it falls behind, jobs are dropped and counted, never waited
    for; one that fails is told once and stops nothing."""

    def __init__(self, name: str, waiting: int = 4) -> None:
        self.name, self.dropped = name, 0
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(waiting)
        self._told = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Waits for what was handed over, with patience but not for ever."""
        with suppress(queue.Full):  # the thread hangs in a job: told below
            self._jobs.put(None, timeout=PATIENCE_S)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            logger.warning("%s: the last entries are not written after %.0f s and are given up", self.name, PATIENCE_S)
        if self.dropped:
            logger.warning(
                "%s: %d entries were left out, since writing was slower than training", self.name, self.dropped
            )

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # a log must never end a run
                if not self._told:
                    ours = not isinstance(error, OSError)  # a disk's refusal says all there is to know
                    told = "%s: an entry cannot be written (%s); the run goes on"
                    logger.warning(told, self.name, error, exc_info=ours)
                self._told = True


def append_bounded(path: Path, text: str, limit: int = LIMIT_BYTES) -> None:
    """Adds to a Markdown file. One that would pass the limit is put aside first; the newest two parts stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    if path.exists() and path.stat().st_size + len(data) > limit:
        path.replace(path.with_suffix(f".1{path.suffix}"))
    with path.open("ab") as file:
        file.write(data)
