"""`curve.png`, drawn at the end of a run: reward and accuracy over all its attempts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from mtrl.protocols import Tracker
from mtrl.report.run_curves import draw_runs
from mtrl.tracking.jsonl import iter_rows
from mtrl.utils.metric_history import history

logger = logging.getLogger(__name__)


class CurveFile(Tracker):
    """A tracker that draws at the end of a run that has done a step. Close it after the run's files: it reads them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._has_steps = False

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._has_steps = True

    def close(self) -> None:
        if not self._has_steps:
            return
        try:
            run = history(iter_rows(self.directory / "metrics.jsonl"))
            draw_runs(self.directory / "curve.png", {self.directory.name: run})
        except Exception as error:  # a picture must never end a run
            message = "curve.png cannot be drawn (%s: %s); `mtrl plot %s` tries again"
            logger.warning(message, type(error).__name__, error, self.directory)
