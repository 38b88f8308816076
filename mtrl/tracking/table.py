"""Validations side by side: now, before, and the best so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mtrl.tracking.colour import Paint
from mtrl.utils.terminal import sanitize

NAME_WIDTH = 26
ATTENTION = "val/attention/"
NO_SCORES = ("val/response_length", "val/truncated", ATTENTION)  # more of them is not better, so they have no best
SAME = 5e-4  # a smaller change does not show in three digits

Values = Mapping[str, float]
By = Mapping[str, Values]  # column -> its value -> success


@dataclass(frozen=True)
class Point:
    step: int
    value: float


@dataclass
class Validations:
    """What a run's validations said so far, by the names of metrics.jsonl. `earlier` are those of former attempts, by
    step; only the ones before the first validation of this attempt count, since what came after them was undone."""

    earlier: Mapping[int, Values] = field(default_factory=dict)
    first: Mapping[str, Point] = field(default_factory=dict)
    last: Mapping[str, Point] = field(default_factory=dict)
    best: dict[str, Point] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        """Takes over the earlier validations that still count, before the first one of this attempt."""
        for before in sorted(self.earlier):
            if before < step:
                self.add(before, self.earlier[before])
        self.earlier = {}

    def add(self, step: int, values: Values) -> None:
        self.last = {name: Point(step, value) for name, value in values.items()}
        self.first = self.first or self.last
        for name, point in self.last.items():
            if name not in self.best or point.value > self.best[name].value:
                self.best[name] = point

    @property
    def headline(self) -> str | None:
        """The number a run is judged by: avg@k, or the reward where nothing tells right from wrong."""
        accuracy = [name for name in self.last if name.startswith("val/avg@")]
        return next(iter([*accuracy, "val/reward_score"])) if self.last else None


def by_name(by: By) -> dict[str, float]:
    """The rates of all columns under their names in metrics.jsonl."""
    return {f"val/by_{column}/{value}": rate for column, table in by.items() for value, rate in table.items()}


def table(step: int, values: Values, by: By, history: Validations, paint: Paint) -> list[str]:
    """The lines of a validation that the history does not hold yet."""
    title, heads = f"validation at step {step}", f"{'now':>8}"
    if history.last:
        heads += f" {'change':>8}   best"
    shown = sorted(filter(_is_shown, values), key=lambda name: name.startswith(NO_SCORES))
    width = max([NAME_WIDTH, *(len(name) - 2 for name in shown)])  # "val/" goes, two spaces come
    lines = [paint(f"{title:<{width}} {heads}", "bold")]
    for name in shown:
        lines.append(_line(name, name.removeprefix("val/"), width, values[name], history, paint))
    for column, rates in by.items():
        lines.append(f"  by {sanitize(column)}")
        names = {value: f"val/by_{column}/{value}" for value in rates}
        lines += [_line(names[value], f"  {value}", width, rates[value], history, paint) for value in rates]
    return lines


def _is_shown(name: str) -> bool:
    """Attention shows only its means over all layers, the others are in the files; pass@1 would repeat avg@1."""
    if name.startswith(ATTENTION):
        return name.endswith("_all")
    return name.startswith("val/") and name != "val/pass@1"


def _line(name: str, label: str, width: int, now: float, history: Validations, paint: Paint) -> str:
    label = sanitize(label).replace("\n", "\\n")  # columns, their values and parts of rewards are the user's
    line = f"  {label:<{width - 2}} {now:8.3f}"
    before, best = history.last.get(name), history.best.get(name)
    if before is None or best is None:
        return line
    change = now - before.value
    if name.startswith(NO_SCORES):
        return f"{line} {change:+8.3f}"
    line += " " + paint(f"{change:+8.3f}", "dim" if abs(change) < SAME else "green" if change > 0 else "red")
    return f"{line}   {best.value:.3f} at step {best.step}" if now <= best.value else f"{line}   now"
