"""A learning curve as a picture, drawn with Pillow alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, MARGIN = 900, 520, 70
COLOURS = ("#2a6fb0", "#d1603d", "#3a8f5c", "#8454a4", "#a08020", "#5a6570")
INK, GRID = "#303030", "#dddddd"


def draw_chart(path: Path, title: str, series: Mapping[str, Points], x_name: str, y_name: str) -> None:
    """One line a series; where it has few points, each gets a mark."""
    canvas = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(canvas)
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x_range, y_range = (min(xs), max(xs)), (min([0.0, *ys]), max([1.0, *ys]))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_range[0]) / ((x_range[1] - x_range[0]) or 1)
        up = (y - y_range[0]) / (y_range[1] - y_range[0])
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN)

    for part in range(6):
        y = y_range[0] + part / 5 * (y_range[1] - y_range[0])
        x = x_range[0] + part / 5 * (x_range[1] - x_range[0])
        draw.line([place(x_range[0], y), place(x_range[1], y)], fill=GRID)
        _text(draw, (MARGIN - 10, place(0, y)[1]), f"{y:.1f}", anchor="rm")
        _text(draw, (place(x, 0)[0], HEIGHT - MARGIN + 10), f"{x:.0f}", anchor="ma")
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(x, y) for x, y in points]
        if len(places) > 1:
            draw.line(places, fill=colour, width=3, joint="curve")
        if len(places) <= 12:
            for x, y in places:
                draw.ellipse((x - 5, y - 5, x + 5, y + 5), fill=colour)
        _text(draw, (WIDTH - MARGIN, HEIGHT - MARGIN - 20 - 22 * (len(series) - 1 - number)), name, "rs", colour)
    _text(draw, (WIDTH / 2, 24), title, anchor="ma", size=20)
    _text(draw, (WIDTH / 2, HEIGHT - 16), x_name, anchor="ms")
    _text(draw, (MARGIN, MARGIN - 12), y_name, anchor="ls")
    canvas.save(path)


def running_mean(points: Points, window: int) -> list[tuple[float, float]]:
    """Each point the mean of itself and the ones before it, up to `window`."""
    smooth = []
    for end in range(1, len(points) + 1):
        recent = points[max(0, end - window) : end]
        smooth.append((points[end - 1][0], sum(y for _, y in recent) / len(recent)))
    return smooth


def _text(
    draw: ImageDraw.ImageDraw, at: tuple[float, float], text: str, anchor: str, colour: str = INK, size: int = 14
) -> None:
    draw.text(at, text, fill=colour, font=ImageFont.load_default(size), anchor=anchor)
