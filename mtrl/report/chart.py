"""Curves over the steps of runs: panels side by side, with one legend that covers no data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrl.report.style import (
    COLOURS,
    LABEL,
    MARKS,
    QUIET,
    REFERENCE,
    STROKES,
    TITLE,
    drawable,
    dress,
    new_figure,
    round_ticks,
    save,
    words,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

PANEL = {1: (8.0, 3.6), 2: (4.8, 3.0), 3: (3.6, 2.6)}  # inches of a panel, by how many stand in a row
MARKED, MOST_MARKED = 40, 200  # points of a line up to which each is marked, and up to which with a small mark
SMOOTHED, MOST_SMOOTHED = 5, 2000  # steps that a running mean spans
EDGE, HEADLINE, ROW = 0.14, 0.32, 0.26  # inches: around everything, for the title, for a line of text below it
NAME = 60  # characters of a name in the legend, at most
LETTER, SAMPLE = 0.085, 0.9  # inches, about: a letter of the legend, and the piece of line before its words


@dataclass(frozen=True)
class Curve:
    """A name has one colour in all panels."""

    name: str
    points: Points
    noisy: bool = False  # values of single steps: drawn pale, under their running mean, and not marked
    reference: bool = False  # what the others are compared with: wide and grey, behind them
    band: Sequence[tuple[float, float, float]] = ()  # (x, lowest, highest), as over several seeds


@dataclass(frozen=True)
class Panel:
    """`bounds`: what the axis spans in any case, such as (0, 1) for a rate."""

    title: str
    lines: Sequence[Curve]
    bounds: tuple[float, float] | None = None


def draw_chart(path: Path, title: str, panels: Sequence[Panel], note: str = "", x_name: str = "step") -> None:
    save(chart(title, panels, note, x_name), path)


def chart(title: str, panels: Sequence[Panel], note: str = "", x_name: str = "step") -> Figure:
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    window = smoothing_window(line.points for panel in panels for line in panel.lines if line.noisy)
    if window > 1:
        note = f"{note} Pale: single steps; line: mean of {window} steps.".strip()
    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = -(-len(panels) // columns)
    wide, high = PANEL[columns]
    handles = legend_handles(names, panels) if len(names) > 1 else []  # a single line is what the title says
    longest = min(NAME, max(map(len, names)))
    beside = max(1, int(columns * wide / (LETTER * longest + SAMPLE)))  # names in a row of the legend
    head = EDGE + HEADLINE + ROW * bool(note) + ROW * -(-len(handles) // beside)
    figure = new_figure(columns * wide, rows * high + head, head)
    write_head(figure, title, note, handles, beside)
    steps = [x for panel in panels for line in panel.lines for x, _ in line.points]
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        draw_panel(axes, panel, names, window)
        limit(axes, panel, (min(steps), max(steps)))
        if place + columns >= len(panels):  # nothing stands below it
            axes.set_xlabel(x_name, **words(LABEL, QUIET))
    return figure


def draw_panel(axes: Axes, panel: Panel, names: Sequence[str], window: int) -> None:
    dress(axes)
    axes.set_title(drawable(panel.title, 60), loc="left", **words(LABEL))
    for line in panel.lines:
        look = line_style(line, names.index(line.name))
        if line.band:
            x, low, high = zip(*line.band, strict=True)
            axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
        shown = line.points
        if line.noisy and window > 1:
            axes.plot(*zip(*line.points, strict=True), color=look["color"], linewidth=0.9, alpha=0.35)
            shown = running_mean(line.points, window)
        axes.plot(*zip(*shown, strict=True), **look)


def line_style(line: Curve, place: int) -> dict[str, Any]:
    """How a line is drawn. Points are marked one by one unless they are the noise of single steps, or too many."""
    if line.reference:
        return {"color": REFERENCE, "linewidth": 4.5, "solid_capstyle": "round", "clip_on": False, "zorder": 2}
    again, place = divmod(place, len(COLOURS))
    marked = not line.noisy and len(line.points) <= MOST_MARKED
    size = 6 if len(line.points) <= MARKED else 3
    mark = {"marker": MARKS[place] if marked else "", "markersize": size, "markeredgecolor": "white"}
    stroke = {"linestyle": STROKES[again % len(STROKES)], "linewidth": 2.0}  # where colours come again, strokes differ
    return {"color": COLOURS[place], "clip_on": False, "zorder": 3, **mark, **stroke}


def legend_handles(names: Sequence[str], panels: Sequence[Panel]) -> list[Any]:
    from matplotlib.lines import Line2D

    lines = sorted((line for panel in panels for line in panel.lines), key=lambda line: not line.noisy)
    shown = {line.name: line for line in lines}  # with its mark, where it has one in any panel
    return [Line2D([], [], label=name, **line_style(shown[name], place)) for place, name in enumerate(names)]


def write_head(figure: Figure, title: str, note: str, handles: Sequence[Any], beside: int) -> None:
    """Title, note and legend above all panels, one below the other."""
    wide, high = figure.get_size_inches()
    left, top = EDGE / wide, 1 - EDGE / high
    figure.text(left, top, drawable(title, int(8 * wide)), va="top", **words(TITLE, weight="bold"))
    top -= HEADLINE / high
    if note:
        figure.text(left, top, note, va="top", **words(LABEL, QUIET))
        top -= ROW / high
    if not handles:
        return
    beside = min(beside, len(handles))
    across = [each for column in range(beside) for each in handles[column::beside]]  # matplotlib fills columns first
    legend = figure.legend(
        handles=across, loc="upper left", bbox_to_anchor=(left, top), ncols=beside, frameon=False, borderpad=0,
        borderaxespad=0, handlelength=2.6, columnspacing=1.6, labelspacing=0.35,
    )  # fmt: skip
    legend.set_in_layout(False)
    for text in legend.get_texts():
        text.set(text=drawable(text.get_text(), NAME), **words(LABEL))


def limit(axes: Axes, panel: Panel, steps: tuple[float, float]) -> None:
    """The x axis ends with the data of all panels; the y axis begins at 0 where 0 is not far."""
    ys = [y for line in panel.lines for _, y in line.points]
    ys += [y for line in panel.lines for _, *ends in line.band for y in ends]
    if steps[0] < steps[1]:
        axes.set_xlim(steps)
    low, high = min(ys), max(ys)
    if panel.bounds is not None:
        axes.set_ylim(min(low, panel.bounds[0]), max(high, panel.bounds[1]))
    elif 0 <= low <= high / 2:
        axes.set_ylim(0, high * 1.08 or 1)
    round_ticks(axes)


def smoothing_window(noisy: Iterable[Points]) -> int:
    """Steps that a running mean spans: the longer the run, the more; 1 where there are too few to be smoothed."""
    longest = max(map(len, noisy), default=0)
    return 1 if longest < 2 * SMOOTHED else min(max(SMOOTHED, longest // 50), MOST_SMOOTHED)


def running_mean(points: Points, window: int) -> list[tuple[float, float]]:
    """Each point the mean of itself and the ones before it, up to `window`."""
    sums = np.convolve([y for _, y in points], np.ones(window))[: len(points)]
    counts = np.arange(1, len(points) + 1).clip(max=window)
    return [(x, mean) for (x, _), mean in zip(points, (sums / counts).tolist(), strict=True)]
