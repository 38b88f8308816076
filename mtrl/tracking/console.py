"""One line that says how it goes: step, time left, reward, accuracy, length, speed. Plain lines off a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from mtrl.types import Rewards, Rollouts

BAR = 24  # characters
SHOWN = {
    "reward": ("reward/overall", "{:.3f}"),
    "accuracy": ("reward/success_rate", "{:.2f}"),
    "length": ("response_length/mean", "{:.1f}"),
    "tok/s": ("perf/tokens_per_second", "{:.0f}"),
}


class Console:
    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self.total, self.stream = total_steps, stream or sys.stderr
        self.live = self.stream.isatty()
        self.begin = time.perf_counter()
        self.first_step: int | None = None
        self.width = 0

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if self.first_step is None:  # steps done before this attempt tell nothing about its speed
            self.first_step = step - 1
            self.begin = time.perf_counter() - values.get("perf/seconds_step", 0.0)
        self._say(f"{self._progress(step)}  {self._eta(step)}  {self._numbers(values)}", step == self.total)

    def validation(self, step: int, values: Mapping[str, float], by: Mapping[str, Mapping[str, float]]) -> None:
        shown = {name.removeprefix("val/"): value for name, value in values.items() if "@" in name}
        shown = shown or {"reward": values["val/reward_score"]}
        self._say(f"validation at step {step}: " + "  ".join(f"{k} {v:.3f}" for k, v in shown.items()), True)
        for column, table in by.items():
            self._say(f"  by {column}: " + "  ".join(f"{k} {v:.2f}" for k, v in table.items()), True)

    def rollouts(self, step: int, rollouts: Rollouts, rewards: Rewards) -> None: ...

    def close(self) -> None:
        if self.live and self.width:
            print(file=self.stream)

    def _progress(self, step: int) -> str:
        full = BAR * step // self.total
        bar = f" [{'=' * full}{' ' * (BAR - full)}]" if self.live else ""
        return f"step {step}/{self.total}{bar}"

    def _eta(self, step: int) -> str:
        assert self.first_step is not None
        pace = (time.perf_counter() - self.begin) / (step - self.first_step)
        left = round(pace * (self.total - step))
        hours, minutes = left // 3600, left // 60 % 60
        return f"ETA {hours}:{minutes:02}:{left % 60:02}" if hours else f"ETA {minutes}:{left % 60:02}"

    def _numbers(self, values: Mapping[str, float]) -> str:
        return "  ".join(f"{name} {form.format(values[key])}" for name, (key, form) in SHOWN.items() if key in values)

    def _say(self, line: str, keep: bool) -> None:
        """On a terminal a line replaces the one before, unless that one was to be kept."""
        if not self.live:
            print(line, file=self.stream, flush=True)
            return
        print("\r" + line.ljust(self.width), end="\n" if keep else "", file=self.stream, flush=True)
        self.width = 0 if keep else len(line)
