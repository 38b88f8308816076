"""The picture that a run ends with: `curve.png`, reward and accuracy over all its attempts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from mtrl.protocols import Tracker
from mtrl.report.run_curves import draw_runs
from mtrl.tracking.jsonl import read_rows_of
from mtrl.utils.metric_history import history

logger = logging.getLogger(__name__)


class CurveFile(Tracker):
    """A tracker that draws at the end, where anything was learnt. It reads the files of the run, so it must be closed
    after them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._learnt = False

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._learnt = True

    def close(self) -> None:
        if not self._learnt:
            return
        try:
            run = history(read_rows_of(self.directory / "metrics.jsonl"))
            draw_runs(self.directory / "curve.png", {self.directory.name: run})
        except Exception as error:  # a picture must never end a run
            again = f"`mtrl plot {self.directory}` tries again"
            logger.warning("curve.png cannot be drawn (%s: %s); %s", type(error).__name__, error, again)
