"""The style of every picture. Uses matplotlib's objects only: no pyplot, no global settings.

The colours follow Okabe and Ito, so that people with any kind of colour vision can distinguish them; each has its own
marker, which identifies a line without its colour.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from functools import cache
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl.report.markdown_text import shorten
from mtrl.utils.terminal import sanitize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7A5C00", "#56B4E9", "#E69F00", "#4D4D4D")
MARKS = ("o", "s", "^", "D", "v", "<", ">", "p")  # one for each colour
STROKES = ("-", "--", ":", "-.")
INK, QUIET, REFERENCE, GRID = "#222222", "#5F5F5F", "#B8B8B8", "#E3E3E3"
TITLE, LABEL, TICK = 13, 11, 10  # points
PIXELS_AN_INCH = 160
PIXELS_IN_A_CELL = 90  # an inch, in a notebook
# Fallbacks after matplotlib's own font: the first of these that is installed draws Chinese, Japanese and Korean.
EAST_ASIAN = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "Microsoft YaHei",
              "PingFang SC", "SimHei", "Arial Unicode MS")  # fmt: skip


def new_figure(width: float, height: float, head: float = 0.0) -> Figure:
    """An empty figure on the Agg canvas, sizes in inches. The layout leaves `head` inches free at the top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - head / height), w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.04)
    figure = Figure(figsize=(width, height), dpi=PIXELS_AN_INCH, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write the picture atomically: somebody may be looking at the previous one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(part, format=path.suffix.removeprefix(".").lower() or "png", facecolor="white")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def to_html(figure: Figure, alt: str) -> str:
    """The picture as an image tag for a notebook, which includes its data."""
    file = BytesIO()
    figure.savefig(file, format="png", facecolor="white", dpi=PIXELS_IN_A_CELL)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{escape(alt)}" style="max-width: 100%" src="data:image/png;base64,{data}">'


def text_style(size: float = LABEL, colour: str = INK, **more: Any) -> dict[str, Any]:
    """Arguments that draw text literally: a $ in a name must not start a formula."""
    plain = {"parse_math": False, "usetex": False, "fontfamily": list(fonts())}
    return {**plain, "fontsize": size, "color": colour, **more}


def to_drawable(text: str, max_chars: int) -> str:
    """The text on one line of about `max_chars` characters; signs that no font has are spelled out, as \\u9ec4."""
    line = shorten(sanitize(text).replace("\n", "\\n"), max_chars)
    return "".join(sign if has_glyph(sign) else ascii(sign)[1:-1] for sign in line)


@cache
def has_glyph(sign: str) -> bool:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return any(get_font(findfont(FontProperties(family=name))).get_char_index(ord(sign)) for name in fonts())


@cache
def fonts() -> tuple[str, ...]:
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    return ("DejaVu Sans", *(name for name in EAST_ASIAN if name in installed))


def style_axes(axes: Axes) -> None:
    """Draw only the bottom spine and horizontal grid lines."""
    axes.set_facecolor("white")
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", color=QUIET, linewidth=0.8)
    axes.grid(visible=False)
    axes.yaxis.grid(visible=True, color=GRID, linewidth=0.8, linestyle="-")
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", which="both", labelsize=TICK, labelcolor=QUIET, color=QUIET, direction="out")
    axes.tick_params(axis="x", length=4, width=0.8, bottom=True, top=False, labelbottom=True)
    axes.tick_params(axis="y", length=0, pad=8, left=False, right=False, labelleft=True)


def round_ticks(axes: Axes) -> None:
    """Set round ticks within the limits of the axes, whole numbers on the x axis."""
    x, y = ticks_within(*axes.get_xlim(), count=7, integer=True), ticks_within(*axes.get_ylim(), count=6)
    axes.set_xticks(x, labels=plain_numbers(x))
    axes.set_yticks(y, labels=plain_numbers(y))


def ticks_within(low: float, high: float, count: int, integer: bool = False) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten, or also of 2.5 times one if not `integer`."""
    from matplotlib.ticker import MaxNLocator

    steps = [1, 2, 5, 10] if integer else [1, 2, 2.5, 5, 10]
    ticks = MaxNLocator(count, integer=integer, steps=steps).tick_values(low, high)
    rounding = 1e-9 * (high - low)
    return [float(tick) for tick in ticks if low - rounding <= tick <= high + rounding]


def plain_numbers(values: Sequence[float]) -> list[str]:
    """Numbers with as many decimals as the one that needs the most.

    >>> plain_numbers([0.0, 0.1 + 0.2, 1.0]), plain_numbers([-2.0, 12500.0]), plain_numbers([0, 2e-6])
    (['0.0', '0.3', '1.0'], ['\N{MINUS SIGN}2', '12,500'], ['0', '2e-06'])
    """
    largest = max(map(abs, values), default=0.0)
    if largest >= 1e7 or 0 < largest < 1e-3:
        texts = [f"{value:.4g}" for value in values]
    else:
        decimals = max((len(f"{value:.6f}".rstrip("0").partition(".")[2]) for value in values), default=0)
        texts = [f"{value + 0.0:,.{decimals}f}" for value in values]
    return ["\N{MINUS SIGN}" + text[1:] if text.startswith("-") else text for text in texts]
