"""The console table of a validation: values now, their change, and the best so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mtrl.tracking.colour import Paint
from mtrl.utils.terminal import sanitize

NAME_WIDTH = 26
ATTENTION = "val/attention/"
NO_SCORES = ("val/response_length", "val/truncated", ATTENTION)  # higher is not better, so they have no best value
SAME = 5e-4  # a smaller change does not show in three digits

Values = Mapping[str, float]
ColumnRates = Mapping[str, Values]  # data column -> its value -> success rate


@dataclass(frozen=True)
class Point:
    step: int
    value: float


@dataclass
class Validations:
    """The validations of a run so far, by metric name. `earlier` are those of former attempts, by step; only those
    before the first validation of this attempt count, since the later ones were undone."""

    earlier: Mapping[int, Values] = field(default_factory=dict)
    first: Mapping[str, Point] = field(default_factory=dict)
    last: Mapping[str, Point] = field(default_factory=dict)
    best: dict[str, Point] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        """Before the first validation of this attempt, add the earlier ones that still count."""
        for earlier_step in sorted(self.earlier):
            if earlier_step < step:
                self.add(earlier_step, self.earlier[earlier_step])
        self.earlier = {}

    def add(self, step: int, values: Values) -> None:
        self.last = {name: Point(step, value) for name, value in values.items()}
        self.first = self.first or self.last
        for name, point in self.last.items():
            if name not in self.best or point.value > self.best[name].value:
                self.best[name] = point

    @property
    def headline(self) -> str | None:
        """The main metric of a run: avg@k, or the reward if there is no accuracy."""
        accuracy = [name for name in self.last if name.startswith("val/avg@")]
        return [*accuracy, "val/reward_score"][0] if self.last else None


def flatten_rates(by: ColumnRates) -> dict[str, float]:
    """The rates of all columns under their names in metrics.jsonl."""
    return {f"val/by_{column}/{value}": rate for column, table in by.items() for value, rate in table.items()}


def validation_table(step: int, values: Values, by: ColumnRates, history: Validations, paint: Paint) -> list[str]:
    """The lines of a validation that is not yet in the history."""
    title, heads = f"validation at step {step}", f"{'now':>8}"
    if history.last:
        heads += f" {'change':>8}   best"
    names = sorted(filter(_is_listed, values), key=lambda name: name.startswith(NO_SCORES))
    width = max([NAME_WIDTH, *(len(name) - 2 for name in names)])  # without "val/", with two spaces
    lines = [paint(f"{title:<{width}} {heads}", "bold")]
    for name in names:
        lines.append(_line(name, name.removeprefix("val/"), width, values[name], history, paint))
    for column, rates in by.items():
        lines.append(f"  by {sanitize(column)}")
        for value, rate in rates.items():
            lines.append(_line(f"val/by_{column}/{value}", f"  {value}", width, rate, history, paint))
    return lines


def _is_listed(name: str) -> bool:
    """Attention is names as its mean over all layers only, the rest is in the files; pass@1 would repeat avg@1."""
    if name.startswith(ATTENTION):
        return name.endswith("_all")
    return name.startswith("val/") and name != "val/pass@1"


def _line(name: str, label: str, width: int, now: float, history: Validations, paint: Paint) -> str:
    label = sanitize(label).replace("\n", "\\n")  # columns, their values and reward parts come from the user
    line = f"  {label:<{width - 2}} {now:8.3f}"
    before, best = history.last.get(name), history.best.get(name)
    if before is None or best is None:
        return line
    change = now - before.value
    if name.startswith(NO_SCORES):
        return f"{line} {change:+8.3f}"
    line += " " + paint(f"{change:+8.3f}", "dim" if abs(change) < SAME else "green" if change > 0 else "red")
    return f"{line}   {best.value:.3f} at step {best.step}" if now <= best.value else f"{line}   now"
