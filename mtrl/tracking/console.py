"""The console: a progress line, a table and a few responses at each validation, a summary at the end.

On a terminal the progress line is updated in place and there are colours (unless NO_COLOR is set); elsewhere and in the
log these are plain lines.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from mtrl.protocols import Tracker
from mtrl.report.log_pages import DecodeTokens
from mtrl.tracking.colour import Paint, wants_colour
from mtrl.tracking.pace import Pace, format_duration
from mtrl.tracking.preview import TrainedResponse, select_most_trained, training_preview, validation_preview
from mtrl.tracking.table import ColumnRates, Validations, Values, flatten_rates, validation_table
from mtrl.types import Experience, ValidationSample
from mtrl.utils.terminal import sanitize, unwrap_stream

BAR_CHARS = 24
COLOUR_CODES = re.compile(r"\x1b\[[\d;]*m")  # our own: all text from outside is sanitized
PROGRESS_METRICS = {
    "reward": ("reward/overall", "{:.3f}"),
    "accuracy": ("reward/success_rate", "{:.2f}"),
    "length": ("response_length/mean", "{:.1f}"),
    "tok/s": ("perf/tokens_per_second", "{:.0f}"),
}


@dataclass(frozen=True)
class ConsoleSettings:
    val_freq: int = -1  # steps between two validations; -1: only at the end
    colorize_output: bool = True  # use colours if the terminal can show them
    log_preview_chars: int = 2000  # characters shown of a text in a preview; 0: no previews
    directory: Path | None = None  # the run's directory, for the summary


class Console(Tracker):
    """`earlier`: the validations of former attempts, by step. `decode` decodes the tokens of a training response;
    without it only validation responses are shown. `log` gets the same lines without colours."""

    def __init__(
        self,
        total_steps: int,
        settings: ConsoleSettings | None = None,
        *,
        earlier: Mapping[int, Values] | None = None,
        decode: DecodeTokens | None = None,
        stream: TextIO | None = None,
        log: TextIO | None = None,
    ) -> None:
        self.total, self.settings = total_steps, settings or ConsoleSettings()
        self.stream, self.log = unwrap_stream(stream or sys.stderr), log
        self.live = self.stream.isatty()
        self.paint = Paint(wants_colour(self.stream, self.settings.colorize_output))
        self.pace = Pace(total_steps, self.settings.val_freq)
        self.history = Validations(earlier or {})
        self.decode = decode
        self._begin = time.monotonic()
        self._first_step = self._last_step = 0
        self._tokens = self._step_seconds = 0.0
        self._trained: TrainedResponse | None = None
        self._width = 0  # width of the progress line
        self._handlers = logging.getLogger().handlers[:] if self.live else []
        for handler in self._handlers:
            handler.addFilter(self._end_progress)

    def metrics(self, step: int, values: Values) -> None:
        seconds = values.get("perf/seconds_step", 0.0)
        self.pace.step(seconds)
        self._first_step, self._last_step = self._first_step or step, step
        self._tokens += values.get("perf/tokens_per_second", 0.0) * seconds
        self._step_seconds += seconds
        eta = format_duration(self.pace.seconds_left(step))
        self._write_progress(step, f"  ETA {eta}  {format_progress(values)}".rstrip())

    def validation(self, step: int, values: Values, by: ColumnRates, samples: Sequence[ValidationSample] = ()) -> None:
        self.pace.validation(values.get("perf/seconds_validation", 0.0))
        self.history.begin(step)
        self._write_lines(validation_table(step, values, by, self.history, self.paint))
        self.history.add(step, {name: x for name, x in values.items() if name.startswith("val/")} | flatten_rates(by))
        if self.settings.log_preview_chars and samples:
            self._write_lines(self._previews(samples))

    def rollouts(self, step: int, experience: Experience) -> None:
        if self.decode is not None:
            self._trained = select_most_trained(experience)

    def close(self) -> None:
        self._end_progress()
        if self._last_step:
            self._write_lines(self._summary())
        for handler in self._handlers:
            handler.removeFilter(self._end_progress)

    # ---------------------------------------------------------------------------------------------------------- pieces

    def _previews(self, samples: Sequence[ValidationSample]) -> list[str]:
        limit, lines = self.settings.log_preview_chars, [self.paint("responses", "bold")]
        for sample in samples:
            lines += validation_preview(sample, limit, self.paint)
        if self._trained is not None and self.decode is not None:
            lines.append(self.paint("a training response of this step and its trained tokens", "bold"))
            lines += training_preview(self._trained, self.decode, limit, self.paint)
        return lines

    def _summary(self) -> list[str]:
        done = self._last_step - self._first_step + 1
        end = "finished" if self._last_step >= self.total else "stopped"
        speed = f", {self._tokens / self._step_seconds:.0f} tokens/s" if self._tokens else ""
        took = f"{done} step{'s' if done > 1 else ''} in {format_duration(time.monotonic() - self._begin)}{speed}"
        lines = [self.paint(f"{end} at step {self._last_step} of {self.total}: {took}", "bold")]
        name = self.history.headline
        if name is not None:
            first, last, best = (points[name] for points in (self.history.first, self.history.last, self.history.best))
            lines.append(
                f"  {sanitize(name)}: {first.value:.3f} at step {first.step}, {last.value:.3f} at step {last.step}; "
                f"best {best.value:.3f} at step {best.step}"
            )
        if self.settings.directory is not None:
            run_dir = sanitize(str(self.settings.directory))
            lines.append(f"  files: {run_dir}")
            if (self.settings.directory / "curve.png").is_file():
                lines.append(f"  curve: {run_dir}/curve.png")
            lines.append(f"  next:  mtrl eval {run_dir} [--data FILE]")
        return lines

    # --------------------------------------------------------------------------------------------------------- writing
    def _write_progress(self, step: int, text: str) -> None:
        """Write a progress line; on a terminal it has a bar and replaces the previous one."""
        label = f"step {step}/{self.total}"
        self._copy(f"{label}{text}\n")
        if not self.live:
            write_to(self.stream, f"{label}{text}\n")
            return
        full = BAR_CHARS * step // self.total
        line = f"{label} [{'=' * full}{' ' * (BAR_CHARS - full)}]{text}"
        line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be replaced
        write_to(self.stream, "\r" + line.ljust(self._width))
        self._width = len(line)

    def _write_lines(self, lines: Sequence[str]) -> None:
        self._end_progress()
        text = "\n".join([*lines, ""])
        self._copy(COLOUR_CODES.sub("", text))
        write_to(self.stream, text)

    def _end_progress(self, record: logging.LogRecord | None = None) -> bool:
        """End the progress line, so that the next output gets its own line; also a filter of log handlers."""
        if self._width:
            write_to(self.stream, "\n")
            self._width = 0
        return True

    def _copy(self, text: str) -> None:
        if self.log is not None:
            write_to(self.log, text)


def format_progress(values: Values) -> str:
    """The numbers of a progress line, those of its metrics that a step has."""
    known = {name: form.format(values[key]) for name, (key, form) in PROGRESS_METRICS.items() if key in values}
    return "  ".join(f"{name} {value}" for name, value in known.items())


def write_to(stream: TextIO, text: str) -> None:
    """Write and flush. A closed pipe or a full disk behind the stream must not end a run."""
    with suppress(OSError):
        stream.write(text)
        stream.flush()
