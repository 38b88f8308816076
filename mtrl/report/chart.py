"""Curves over the steps of runs: panels side by side under one common legend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrl.report import style
from mtrl.report.style import LABEL, QUIET, TITLE, text_style, to_drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

PANEL = {1: (8.0, 3.6), 2: (4.8, 3.0), 3: (3.6, 2.6)}  # inches of a panel, by the number of columns
MARKED, MOST_MARKED = 40, 200  # points of a line up to which they get large and small markers
SMOOTHED, MOST_SMOOTHED = 5, 2000  # fewest and most steps of the running mean
EDGE, HEADLINE, ROW = 0.14, 0.32, 0.26  # inches: outer margin, title, each line of text below it
NAME_CHARS = 60  # characters of a name in the legend, at most
LETTER, SAMPLE = 0.085, 0.9  # approximate inches: one letter of the legend, the line sample before a name


@dataclass(frozen=True)
class Curve:
    """A line of a panel. A name has the same colour in all panels."""

    name: str
    points: Points
    noisy: bool = False  # values of single steps: drawn pale under their running mean, without markers
    reference: bool = False  # the line that the others are compared with: wide, grey, behind them
    band: Sequence[tuple[float, float, float]] = ()  # (x, lowest, highest), as over several seeds


@dataclass(frozen=True)
class Panel:
    """`bounds`: the least range of the y axis, such as (0, 1) for a rate."""

    title: str
    lines: Sequence[Curve]
    bounds: tuple[float, float] | None = None


def draw_chart(path: Path, title: str, panels: Sequence[Panel], note: str = "", x_name: str = "step") -> None:
    style.save_figure(make_chart(title, panels, note, x_name), path)


def make_chart(title: str, panels: Sequence[Panel], note: str = "", x_name: str = "step") -> Figure:
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    window = smoothing_window(line.points for panel in panels for line in panel.lines if line.noisy)
    if window > 1:
        note = f"{note} Pale: single steps; line: mean of {window} steps.".strip()
    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = -(-len(panels) // columns)
    wide, high = PANEL[columns]
    handles = legend_handles(names, panels) if len(names) > 1 else []  # the title names a single line
    longest = min(NAME_CHARS, max(map(len, names)))
    legend_columns = max(1, int(columns * wide / (LETTER * longest + SAMPLE)))
    head = EDGE + HEADLINE + ROW * bool(note) + ROW * -(-len(handles) // legend_columns)
    figure = style.new_figure(columns * wide, rows * high + head, head)
    write_head(figure, title, note, handles, legend_columns)
    steps = [x for panel in panels for line in panel.lines for x, _ in line.points]
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        draw_panel(axes, panel, names, window)
        set_limits(axes, panel, (min(steps), max(steps)))
        if index + columns >= len(panels):  # no panel below it
            axes.set_xlabel(x_name, **text_style(LABEL, QUIET))
    return figure


def draw_panel(axes: Axes, panel: Panel, names: Sequence[str], window: int) -> None:
    style.style_axes(axes)
    axes.set_title(to_drawable(panel.title, 60), loc="left", **text_style(LABEL))
    for line in panel.lines:
        look = line_style(line, names.index(line.name))
        if line.band:
            x, low, high = zip(*line.band, strict=True)
            axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
        points = line.points
        if line.noisy and window > 1:
            axes.plot(*zip(*line.points, strict=True), color=look["color"], linewidth=0.9, alpha=0.35)
            points = running_mean(line.points, window)
        axes.plot(*zip(*points, strict=True), **look)


def line_style(line: Curve, index: int) -> dict[str, Any]:
    """The matplotlib style of a line. Points get markers unless they are noisy or too many."""
    if line.reference:
        return {"color": style.REFERENCE, "linewidth": 4.5, "solid_capstyle": "round", "clip_on": False, "zorder": 2}
    repeat, colour = divmod(index, len(style.COLOURS))
    marked = not line.noisy and len(line.points) <= MOST_MARKED
    size = 6 if len(line.points) <= MARKED else 3
    mark = {"marker": style.MARKS[colour] if marked else "", "markersize": size, "markeredgecolor": "white"}
    stroke = {"linestyle": style.STROKES[repeat % len(style.STROKES)], "linewidth": 2.0}  # lines of one colour differ
    return {"color": style.COLOURS[colour], "clip_on": False, "zorder": 3, **mark, **stroke}


def legend_handles(names: Sequence[str], panels: Sequence[Panel]) -> list[Any]:
    from matplotlib.lines import Line2D

    lines = sorted((line for panel in panels for line in panel.lines), key=lambda line: not line.noisy)
    by_name = {line.name: line for line in lines}  # prefers a line with markers
    return [Line2D([], [], label=name, **line_style(by_name[name], index)) for index, name in enumerate(names)]


def write_head(figure: Figure, title: str, note: str, handles: Sequence[Any], columns: int) -> None:
    """Write title, note and legend above all panels."""
    wide, high = figure.get_size_inches()
    left, top = EDGE / wide, 1 - EDGE / high
    figure.text(left, top, to_drawable(title, int(8 * wide)), va="top", **text_style(TITLE, weight="bold"))
    top -= HEADLINE / high
    if note:
        figure.text(left, top, note, va="top", **text_style(LABEL, QUIET))
        top -= ROW / high
    if not handles:
        return
    columns = min(columns, len(handles))
    by_row = [each for column in range(columns) for each in handles[column::columns]]  # matplotlib fills columns first
    legend = figure.legend(
        handles=by_row, loc="upper left", bbox_to_anchor=(left, top), ncols=columns, frameon=False, borderpad=0,
        borderaxespad=0, handlelength=2.6, columnspacing=1.6, labelspacing=0.35,
    )  # fmt: skip
    legend.set_in_layout(False)
    for text in legend.get_texts():
        text.set(text=to_drawable(text.get_text(), NAME_CHARS), **text_style(LABEL))


def set_limits(axes: Axes, panel: Panel, steps: tuple[float, float]) -> None:
    """End the x axis with the data of all panels; start the y axis at 0 if 0 is near."""
    ys = [y for line in panel.lines for _, y in line.points]
    ys += [y for line in panel.lines for _, *ends in line.band for y in ends]
    if steps[0] < steps[1]:
        axes.set_xlim(steps)
    low, high = min(ys), max(ys)
    if panel.bounds is not None:
        axes.set_ylim(min(low, panel.bounds[0]), max(high, panel.bounds[1]))
    elif 0 <= low <= high / 2:
        axes.set_ylim(0, high * 1.08 or 1)
    style.round_ticks(axes)


def smoothing_window(noisy: Iterable[Points]) -> int:
    """The number of steps in the running mean: grows with the run; 1 if there are too few steps to smooth."""
    longest = max(map(len, noisy), default=0)
    return 1 if longest < 2 * SMOOTHED else min(max(SMOOTHED, longest // 50), MOST_SMOOTHED)


def running_mean(points: Points, window: int) -> list[tuple[float, float]]:
    """Each point as the mean of itself and up to `window` - 1 points before it."""
    sums = np.convolve([y for _, y in points], np.ones(window))[: len(points)]
    counts = np.arange(1, len(points) + 1).clip(max=window)
    return [(x, mean) for (x, _), mean in zip(points, (sums / counts).tolist(), strict=True)]
