"""How it goes, for a person: a line of progress, a table at each validation with a few responses, a summary at the end.

On a terminal the line moves and there are colours (not with NO_COLOR); elsewhere and in the log these are plain lines.
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
from mtrl.tracking.colour import Paint, wants_colour
from mtrl.tracking.pace import Pace, as_clock
from mtrl.tracking.preview import DecodeTokens, Trained, most_taught, training_preview, validation_preview
from mtrl.tracking.table import By, Validations, Values, by_name, table
from mtrl.types import Experience, ValidationSample
from mtrl.utils.terminal import behind_door, sanitize

BAR = 24  # characters of the progress bar
PAINTED = re.compile(r"\x1b\[[\d;]*m")  # our own colours: all that comes from outside is sanitized
SHOWN = {
    "reward": ("reward/overall", "{:.3f}"),
    "accuracy": ("reward/success_rate", "{:.2f}"),
    "length": ("response_length/mean", "{:.1f}"),
    "tok/s": ("perf/tokens_per_second", "{:.0f}"),
}


@dataclass(frozen=True)
class ConsoleSettings:
    validate_every: int = -1  # steps between two validations; -1: only at the end
    colours: bool = True  # colours, where the terminal can show them
    preview_chars: int = 2000  # characters shown of a text in a preview; 0: no previews
    directory: Path | None = None  # the run's directory, named in the summary


class Console(Tracker):
    """`earlier`: what former attempts validated, by step. `decode` makes the tokens of a training response readable;
    without it only validation responses are shown. `log` gets the same lines, always plain."""

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
        self.stream, self.log = behind_door(stream or sys.stderr), log
        self.live = self.stream.isatty()
        self.paint = Paint(wants_colour(self.stream, self.settings.colours))
        self.pace = Pace(total_steps, self.settings.validate_every)
        self.history = Validations(earlier or {})
        self.decode = decode
        self._begin = time.monotonic()
        self._first_step = self._last_step = 0
        self._tokens = self._step_seconds = 0.0
        self._trained: Trained | None = None
        self._width = 0
        self._handlers = logging.getLogger().handlers[:] if self.live else []
        for handler in self._handlers:
            handler.addFilter(self._make_room)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        seconds = values.get("perf/seconds_step", 0.0)
        self.pace.step(seconds)
        self._first_step, self._last_step = self._first_step or step, step
        self._tokens += values.get("perf/tokens_per_second", 0.0) * seconds
        self._step_seconds += seconds
        told = f"  ETA {as_clock(self.pace.left(step))}  {numbers(values)}".rstrip()
        self._say(f"step {step}/{self.total}", self._bar(step), told)

    def validation(
        self, step: int, values: Mapping[str, float], by: By, samples: Sequence[ValidationSample] = ()
    ) -> None:
        self.pace.validation(values.get("perf/seconds_validation", 0.0))
        self.history.begin(step)
        self._keep(table(step, values, by, self.history, self.paint))
        self.history.add(step, {name: x for name, x in values.items() if name.startswith("val/")} | by_name(by))
        if self.settings.preview_chars and samples:
            self._keep(self._previews(samples))

    def rollouts(self, step: int, experience: Experience) -> None:
        if self.decode is not None:
            self._trained = most_taught(experience)

    def close(self) -> None:
        self._make_room()
        if self._last_step:
            self._keep(self._summary())
        for handler in self._handlers:
            handler.removeFilter(self._make_room)

    # ---------------------------------------------------------------------------------------------------------- pieces
    def _bar(self, step: int) -> str:
        full = BAR * step // self.total
        return f" [{'=' * full}{' ' * (BAR - full)}]"

    def _previews(self, samples: Sequence[ValidationSample]) -> list[str]:
        limit, lines = self.settings.preview_chars, [self.paint("responses", "bold")]
        for sample in samples:
            lines += validation_preview(sample, limit, self.paint)
        if self._trained is not None and self.decode is not None:
            lines.append(self.paint("a training response of this step, and the tokens that learn from it", "bold"))
            lines += training_preview(self._trained, self.decode, limit, self.paint)
        return lines

    def _summary(self) -> list[str]:
        done = self._last_step - self._first_step + 1
        end = "finished" if self._last_step >= self.total else "stopped"
        speed = f", {self._tokens / self._step_seconds:.0f} tokens/s" if self._tokens else ""
        took = f"{done} step{'s' if done > 1 else ''} in {as_clock(time.monotonic() - self._begin)}{speed}"
        lines = [self.paint(f"{end} at step {self._last_step} of {self.total}: {took}", "bold")]
        name = self.history.headline
        if name is not None:
            first, last, best = (part[name] for part in (self.history.first, self.history.last, self.history.best))
            lines.append(
                f"  {sanitize(name)}: {first.value:.3f} at step {first.step}, {last.value:.3f} at step {last.step}; "
                f"best {best.value:.3f} at step {best.step}"
            )
        if self.settings.directory is not None:
            place = sanitize(str(self.settings.directory))
            lines.append(f"  files: {place}")
            if (self.settings.directory / "curve.png").is_file():
                lines.append(f"  curve: {place}/curve.png")
            lines.append(f"  next:  mtrl eval {place} [--data FILE]")
        return lines

    # --------------------------------------------------------------------------------------------------------- writing
    def _say(self, step: str, bar: str, told: str) -> None:
        """Writes a line of progress; on a terminal it has a bar, and replaces the one before."""
        self._copy(f"{step}{told}\n")
        if not self.live:
            self._write(f"{step}{told}\n")
            return
        line = f"{step}{bar}{told}"[: shutil.get_terminal_size().columns - 1]  # one that wraps could not be replaced
        self._write("\r" + line.ljust(self._width))
        self._width = len(line)

    def _keep(self, lines: Sequence[str]) -> None:
        self._make_room()
        text = "\n".join([*lines, ""])
        self._copy(PAINTED.sub("", text))
        self._write(text)

    def _make_room(self, record: logging.LogRecord | None = None) -> bool:
        """Ends the line of progress, so that what comes next has a line of its own; also a filter of log handlers."""
        if self._width:
            self._write("\n")
            self._width = 0
        return True

    def _copy(self, text: str) -> None:
        if self.log is not None:
            write_to(self.log, text)

    def _write(self, text: str) -> None:
        write_to(self.stream, text)


def write_to(stream: TextIO, text: str) -> None:
    """Writes at once. A reader that went away, or a full disk behind the stream, must not end a run."""
    with suppress(OSError):
        stream.write(text)
        stream.flush()


def numbers(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {form.format(values[key])}" for name, (key, form) in SHOWN.items() if key in values)
