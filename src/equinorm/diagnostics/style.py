"""One look for every picture: readable in print and on screen, for colour-blind readers too.

>>> figure, axes = style.figure(1, 2, title="What the picture says", caption="What was measured, and how.")
>>> axes[0].plot(x, y, **style.line(0)); style.finish(axes); style.save(figure, Path("picture.svg"))

Figures are `matplotlib.figure.Figure` objects without any global state; matplotlib is imported when one is made.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, without its yellow, which vanishes on white paper
COLOURS = {
    "black": "#000000",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
}
MARKERS = ("o", "s", "^", "v", "D", "P", "X")
GREY = "#767676"
_TITLE, _CAPTION, _LABEL = 11.5, 8.5, 9.5
_INCH = 72.0


def line(number: int, **more: Any) -> dict[str, Any]:
    """Colour and marker of the n-th line of a picture: told apart by either."""
    names = list(COLOURS)
    shape = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4.5, "linewidth": 1.6}
    return {"color": COLOURS[names[number % len(names)]], **shape, **more}


def shades(count: int) -> list[Any]:
    """Colours from light to dark for an ordered set, such as cycles or depths."""
    from matplotlib import colormaps

    return [colormaps["viridis_r"](0.08 + 0.92 * i / max(count - 1, 1)) for i in range(count)]


def figure(
    rows: int = 1,
    columns: int = 1,
    *,
    title: str = "",
    caption: str = "",
    width: float | None = None,
    height: float | None = None,
    **options: Any,
) -> tuple[Figure, Any]:
    """A figure with room for a title that says the message and a caption that says what was measured.

    Returns it with its axes: a list, or a list of rows if there are several of both. `options` are those of
    `Figure.subplots`. Sizes are in inches.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'equinorm[lab]'") from error

    width = (5.6 if columns == 1 else min(4.4 * columns, 12.0)) if width is None else width
    above, heading = _wrapped(title, width, _TITLE)
    below, text = _wrapped(caption, width, _CAPTION)
    panels = 3.5 * rows**0.85 if height is None else height
    whole = panels + above + below
    made = Figure(figsize=(width, whole), dpi=160, layout="constrained")
    FigureCanvasAgg(made)
    engine: Any = made.get_layout_engine()
    engine.set(rect=(0, below / whole, 1, panels / whole), w_pad=0.06, h_pad=0.06)
    if heading:
        made.text(0.10 / width, 1 - 0.09 / whole, heading, ha="left", va="top", fontsize=_TITLE, fontweight="bold")
    if text:
        made.text(0.10 / width, 0.09 / whole, text, ha="left", va="bottom", fontsize=_CAPTION, color="0.25")
    grid = made.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        axes.tick_params(labelsize=_CAPTION)
        axes.xaxis.label.set_size(_LABEL)
        axes.yaxis.label.set_size(_LABEL)
        axes.title.set_size(_LABEL)
    if rows == 1 or columns == 1:
        return made, list(grid.flat)
    return made, [list(row) for row in grid]


def finish(axes: Axes | Iterable[Any]) -> None:
    """The last touches: no box, a light grid, a legend without a frame where lines have labels."""
    from matplotlib.axes import Axes

    if not isinstance(axes, Axes):
        for one in axes:
            finish(one)
        return
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    _plain_log_ticks(axes)
    if axes.get_legend() is None and axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=_CAPTION)


def _plain_log_ticks(axes: Axes) -> None:
    """2 instead of 2 × 10⁰ along logarithmic axes, and enough ticks on those that span little."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    def text(value: float, _: Any) -> str:
        return f"{value:g}" if 1e-3 <= value < 1e4 else f"$10^{{{round(math.log10(value))}}}$"

    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() != "log" or isinstance(axis.get_major_locator(), FixedLocator):
            continue
        decades = math.log10(max(limits) / min(limits))
        subs = (1, 2, 3, 4, 5, 6, 8) if decades < 0.8 else (1, 2, 5) if decades < 2.2 else (1,)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(text))


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the name's suffix says (.svg, .png, .pdf), atomically; the same figure gives the same bytes."""
    from ..files import replacing

    kind = path.suffix.removeprefix(".")
    if kind not in ("svg", "png", "pdf"):
        raise ValueError(f"{path.name}: pictures are written as .svg, .png or .pdf")
    with replacing(path) as temporary:
        _write(figure, temporary, kind)


def svg(figure: Figure) -> str:
    """The figure as SVG text, to put into a page."""
    import io

    buffer = io.BytesIO()
    _write(figure, buffer, "svg")
    text = buffer.getvalue().decode()
    return text[text.index("<svg") :]


def _write(figure: Figure, target: Any, kind: str) -> None:
    import matplotlib

    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with matplotlib.rc_context({"svg.hashsalt": "equinorm"}):
        figure.savefig(target, format=kind, metadata=dated)


def _wrapped(text: str, width: float, size: float) -> tuple[float, str]:
    """Text broken into lines that fit, and the height they need in inches."""
    if not text:
        return 0.0, ""
    letters = int((width - 0.2) * _INCH / (size * (0.60 if size == _TITLE else 0.55)))
    lines = [piece for part in text.split("\n") for piece in textwrap.wrap(part, letters)]
    return len(lines) * size * 1.25 / _INCH + 0.2, "\n".join(lines)


__all__ = ["COLOURS", "GREY", "MARKERS", "figure", "finish", "line", "save", "shades", "svg"]
