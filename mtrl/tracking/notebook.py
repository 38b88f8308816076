"""Progress in a notebook: one output of the cell, updated in place, with the numbers of the run and its curves."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from mtrl.protocols import Tracker
from mtrl.report.chart import make_chart
from mtrl.report.run_curves import usual_panels
from mtrl.report.style import to_html
from mtrl.tracking.console import format_progress
from mtrl.tracking.pace import Pace, format_duration
from mtrl.tracking.table import ColumnRates, Validations, Values
from mtrl.types import ValidationSample
from mtrl.utils.metric_history import MetricCurves

DRAWN_SHARE = 0.1  # of the time, at most, is spent on drawing

logger = logging.getLogger(__name__)

Show = Callable[[str], None]  # displays HTML, in place of what it displayed before


def find_shell() -> Any:
    """The shell of the kernel of a notebook, if this process is one. IPython in a terminal is none: it cannot show
    pictures. Nothing is imported: a kernel has IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if hasattr(shell, "kernel") else None


def display_in_cell(shell: Any) -> Show:
    """Displays HTML as an output of the cell that runs now."""
    publish, name = shell.display_pub.publish, {"display_id": uuid.uuid4().hex}
    publish({"text/html": ""}, transient=name)
    return lambda text: publish({"text/html": text}, transient=name, update=True)


class NotebookProgress(Tracker):
    """`earlier`: the rows of metrics.jsonl of former attempts."""

    def __init__(
        self, title: str, total_steps: int, val_freq: int, show: Show, earlier: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.title, self.total, self.show = title, total_steps, show
        self.pace = Pace(total_steps, val_freq)
        validated = {row["step"]: val_metrics(row) for row in earlier if "val/reward_score" in row}
        self.validations = Validations(validated)
        self._curves = MetricCurves()
        for row in earlier:
            self._curves.add(row)
        self._attempt = object()  # differs from those of the rows, so that undone steps are removed
        self._step, self._line, self._numbers = 0, "starting", ""
        self._drawn_at, self._cost = float("-inf"), 0.0
        self._update("")

    def metrics(self, step: int, values: Values) -> None:
        self.pace.step(values.get("perf/seconds_step", 0.0))
        self._add(step, values)
        self._numbers = format_progress(values)
        eta = format_duration(self.pace.seconds_left(step))
        self._line = f"step {step}/{self.total}  ETA {eta}  {self._numbers}"
        if step == self.total or time.monotonic() - self._drawn_at > self._cost / DRAWN_SHARE:
            self._update()

    def validation(self, step: int, values: Values, by: ColumnRates, samples: Sequence[ValidationSample] = ()) -> None:
        self.pace.validation(values.get("perf/seconds_validation", 0.0))
        self._add(step, values)
        self.validations.begin(step)
        self.validations.add(step, val_metrics(values))
        self._update()

    def close(self) -> None:
        if self._step:
            end = "finished" if self._step >= self.total else "stopped"
            self._line = f"{end} at step {self._step}/{self.total}  {self._numbers}"
        self._update()

    def _add(self, step: int, values: Values) -> None:
        self._step = step
        self._curves.add({"step": step, "attempt": self._attempt, **values})

    def _update(self, picture: str | None = None) -> None:
        """A picture must never end a run."""
        begin = time.monotonic()
        try:
            self.show(self._head() + (self._picture() if picture is None else picture))
        except Exception as error:
            logger.warning("the progress cannot be shown in this cell (%s: %s)", type(error).__name__, error)
            self.show = lambda text: None
        self._drawn_at = time.monotonic()
        self._cost = self._drawn_at - begin

    def _head(self) -> str:
        bar = f'<progress value="{self._step}" max="{self.total}" style="width: 16em"></progress>'
        lines = [f"{bar} {escape(self._line)}"]
        if (name := self.validations.headline) is not None:
            first, last, best = (
                points[name] for points in (self.validations.first, self.validations.last, self.validations.best)
            )
            lines.append(
                f"{escape(name)}: {first.value:.3f} at step {first.step}, {last.value:.3f} at step {last.step}; "
                f"best {best.value:.3f} at step {best.step}"
            )
        return "".join(f'<div style="white-space: pre-wrap">{line}</div>' for line in lines)

    def _picture(self) -> str:
        """The curves as an image; none before the first point."""
        panels = usual_panels(self._curves.to_history())
        if not panels:
            return ""
        return to_html(make_chart(self.title, panels), "reward and accuracy over the steps")


def val_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("val/")}
