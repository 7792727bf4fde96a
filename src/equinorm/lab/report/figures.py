"""An artifact as a picture, in the paper's form: lines over columns, curves over epochs, bars, or a table's dots.

    made = draw(result)          # a matplotlib Figure; None if there is nothing to show yet

Methods keep their colours across figures (`style.looks`). What the paper prints is hollow. Diverged runs are crosses.
"""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ...diagnostics.style import GREY, finish
from ..training.store import Record
from .results import Number, Result, metric_of
from .style import Look, canvas, looks
from .wording import metric_name, value

__all__ = ["draw"]

_PANELS = 6  # a table with more columns than this is drawn as lines
_END, _CLOSE = 0.2, 0.2  # the last epochs are drawn larger if all curves are there within this part of the axis


def draw(result: Result) -> Figure | None:
    """The artifact's figure; None if nothing was run, or there is nothing to draw."""
    artifact = result.artifact
    if result.computed is not None and artifact.compute is not None and artifact.compute.draw is not None:
        made = canvas()
        artifact.compute.draw(result.computed.data, made)
        for axes in made.axes:
            finish(axes)
    elif any(number.was_run for number in result.numbers):
        kind = artifact.kind
        if kind == "table" and len(result.columns) > _PANELS:
            if not _are_numbers(result.columns):  # a long list of settings is read as a table, not as a picture
                return None
            kind = "lines"
        made = {"lines": _lines, "curves": _curves, "bars": _bars, "table": _dots}[kind](result)
    else:
        return None
    _title(made, result)
    if result.toy:
        made.text(
            0.5, 0.5, "TOY", fontsize=110, color="#d9a0a0", alpha=0.45, rotation=20, ha="center", va="center", zorder=10
        )
    return made


def _title(made: Figure, result: Result) -> None:
    width = int(12 * made.get_figwidth())
    toy = "TOY run, not a measurement: " if result.toy else ""
    lines = textwrap.wrap(f"{toy}{result.artifact.title} ({result.artifact.name})", width)
    made.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11)


def _caption(result: Result, shown: Sequence[Number]) -> str:
    counts = {number.n for number in shown if number.n}
    if not counts or not result.records:
        return ""
    n = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    if counts == {1}:
        return "one run each"
    middle = "median and quartiles" if result.artifact.band == "quartiles" else "mean ± standard deviation"
    return f"{middle}, n = {n}"


def _axis_name(result: Result) -> str:
    artifact = result.artifact
    if not result.records:
        return artifact.unit
    name = metric_name(artifact.metric.partition("@")[0])
    return f"{name} ({artifact.unit})" if artifact.unit else name


def _legend(made: Figure, handles: Sequence[Artist]) -> None:
    """Below the axes, where it hides nothing, in as many columns as fit; read line by line."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    across = max(1, min(len(handles), int(made.get_figwidth() * 13 / (longest + 7))))
    down = math.ceil(len(handles) / across)
    filled = [*handles, *(Line2D([], [], linestyle="", label=" ") for _ in range(across * down - len(handles)))]
    ordered = [filled[row * across + column] for column in range(across) for row in range(down)]
    made.legend(handles=ordered, loc="outside lower left", ncols=across, frameon=False, fontsize=9, handlelength=2.6)


def _line_handles(shown: dict[str, Look]) -> list[Artist]:
    return [
        Line2D([], [], color=look.colour, marker=look.marker, linestyle=look.line, label=row)
        for row, look in shown.items()
    ]


def _paper_handle(label: str = "hollow: the paper") -> Line2D:
    return Line2D([], [], color=GREY, marker="D", linestyle="", fillstyle="none", markeredgewidth=1.3, label=label)


def _diverged_handle() -> Line2D:
    return Line2D([], [], color=GREY, marker="x", linestyle="", markersize=7, markeredgewidth=2, label="diverged")


def _extras(shown: Sequence[Number]) -> list[Line2D]:
    papers = any(_paper(number) is not None for number in shown)
    return [_paper_handle()] * papers + [_diverged_handle()] * any(number.diverged for number in shown)


def _paper(number: Number) -> float | None:
    """What the paper prints, where it can be compared: not beside toy runs."""
    paper = number.cell.paper
    return None if paper is None or not math.isfinite(paper) or number.toy else paper


# -- lines -------------------------------------------------------------------------------------------------------------


def _are_numbers(columns: Sequence[str]) -> bool:
    return all(re.fullmatch(r"-?\d+(\.\d+)?", column) for column in columns)


def _positions(columns: Sequence[str]) -> tuple[list[float], str]:
    """Where columns stand on the axis: at their value if they are numbers in order, otherwise side by side."""
    found = [float(column) for column in columns] if _are_numbers(columns) else []
    if len(found) < 2 or found != sorted(set(found)):
        return [float(i) for i in range(len(columns))], "linear"
    gaps = [b - a for a, b in pairwise(found)]
    if min(gaps) * 8 > max(gaps):
        return found, "linear"
    return (found, "log") if found[0] > 0 else ([float(i) for i in range(len(columns))], "linear")


def _moved(where: Sequence[float], scale: str, part: float) -> list[float]:
    """All positions moved by a part of the smallest step between two of them."""
    if scale == "log":
        return [x * min(b / a for a, b in pairwise(where)) ** part for x in where]
    return [x + part * min((b - a for a, b in pairwise(where)), default=1.0) for x in where]


def _cut(values: Sequence[float]) -> float:
    """Where the axis may be cut: above a few values that lie so low that they would flatten all others; -∞: nowhere."""
    ordered = sorted(values)
    if len(ordered) < 6 or ordered[0] == ordered[-1]:
        return -math.inf
    gaps = [b - a for a, b in pairwise(ordered)]
    below = gaps.index(max(gaps)) + 1
    if max(gaps) < 0.6 * (ordered[-1] - ordered[0]) or below > len(ordered) / 3:
        return -math.inf
    return ordered[below] - 0.08 * (ordered[-1] - ordered[below])


def _lines(result: Result) -> Figure:
    made = canvas(7.4, 4.8)
    axes = made.subplots()
    where, scale = _positions(result.columns)
    axes.set_xscale(scale)
    shown = [number for number in result.numbers if number.was_run]
    chosen = looks(result.rows)
    drawn = {row: chosen[row] for row in result.rows if any(number.cell.row == row for number in shown)}
    cut = _cut([number.value for number in shown if number.values])
    lost: list[tuple[float, Look, Number]] = []
    low: list[tuple[float, Look, Number]] = []
    for i, (row, look) in enumerate(drawn.items()):
        # moved a little, so that the bars of two methods do not hide each other
        moved = _moved(where, scale, 0.045 * (i - (len(drawn) - 1) / 2))
        found = [result.by_cell.get((row, column)) for column in result.columns]
        cells = [(x, number) for x, number in zip(moved, found, strict=True) if number is not None]
        points = [(x, number) for x, number in cells if number.values]
        _one_line(axes, [(x, number) for x, number in points if number.value >= cut], look, result.artifact.band)
        low += [(x, look, number) for x, number in points if number.value < cut]
        papers = [(x, _paper(number)) for x, number in cells if _paper(number) is not None]
        if papers:
            axes.plot(
                *zip(*papers, strict=True),
                color=look.colour,
                marker=look.marker,
                linestyle="",
                markersize=9,
                markerfacecolor="none",
                markeredgewidth=1.2,
                alpha=0.9,
            )
        lost += [(x, look, number) for x, number in cells if number.diverged]
    if low:
        most = max(Counter(number.cell.column for *_, number in low).values())
        axes.set_ylim(bottom=cut - 0.04 * most * (axes.get_ylim()[1] - cut))  # room for what is noted there
    _note_low(axes, low)
    _mark_diverged(axes, lost)
    axes.set_xticks(where, result.columns, rotation=0 if sum(map(len, result.columns)) < 70 else 25)
    axes.minorticks_off()
    axes.set_xlabel(result.artifact.x_label)
    axes.set_ylabel(_axis_name(result))
    axes.set_title(_caption(result, shown), loc="right", fontsize=9, color=GREY)
    finish(axes)
    _legend(made, [*_line_handles(drawn), *_extras(shown)])
    return made


def _one_line(axes: Any, points: Sequence[tuple[float, Number]], look: Look, band: str) -> None:
    xs, ys = [x for x, _ in points], [number.value for _, number in points]
    axes.plot(xs, ys, color=look.colour, marker=look.marker, linestyle=look.line, markersize=5.5, linewidth=1.6)
    edges = [number.low_high or (number.value, number.value) for _, number in points]
    if band == "quartiles":
        axes.fill_between(
            xs, [low for low, _ in edges], [high for _, high in edges], color=look.colour, alpha=0.15, linewidth=0
        )
    else:
        axes.vlines(xs, [low for low, _ in edges], [high for _, high in edges], color=look.colour, linewidth=1.1)


def _note_low(axes: Any, low: Sequence[tuple[float, Look, Number]]) -> None:
    """What lies under the axes, at their foot; several in one column above each other."""
    above: Counter[str] = Counter()
    for x, look, number in low:
        column = number.cell.column
        axes.annotate(
            f"↓ {number.value:.3g}",
            (x, 0),
            (0, 3 + 10 * above[column]),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=8,
            color=look.colour,
            ha="center",
            va="bottom",
        )
        above[column] += 1


def _mark_diverged(axes: Any, lost: Sequence[tuple[float, Look, Number]]) -> None:
    """Crosses at the foot of the axes; with a count where only some of the runs diverged."""
    for x, look, number in lost:
        axes.plot(
            [x],
            [0.0],
            "x",
            color=look.colour,
            markersize=8,
            markeredgewidth=2,
            clip_on=False,
            zorder=5,
            transform=axes.get_xaxis_transform(),
        )
        if number.values:
            share = f"{number.diverged}/{number.n + number.diverged}"
            axes.annotate(
                share,
                (x, 0),
                (0, 8),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                fontsize=8,
                color=look.colour,
                ha="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
            )


# -- curves ------------------------------------------------------------------------------------------------------------


def _panels(count: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Any]]:
    """Axes for `count` panels, up to three in a row."""
    across = min(count, 3 if count != 4 else 2)
    down = math.ceil(count / across)
    made = canvas(max(7.0, min(across * width, 11.5)), down * height + 0.9)
    grid = made.subplots(down, across, squeeze=False, **options)
    flat = list(grid.flat)
    for unused in flat[count:]:
        unused.set_visible(False)
    return made, flat[:count]


def _curves(result: Result) -> Figure:
    columns = [c for c in result.columns if any(n.was_run and n.cell.column == c for n in result.numbers)]
    made, panels = _panels(len(columns), 4.6, 3.6)
    shown = [number for number in result.numbers if number.was_run]
    chosen = looks(result.rows)
    drawn = {
        row: Look(chosen[row].colour, "", chosen[row].line)
        for row in result.rows
        if any(number.cell.row == row for number in shown)
    }
    for axes, column in zip(panels, columns, strict=True):
        here = [(number, drawn[number.cell.row]) for number in shown if number.cell.column == column]
        for number, look in here:
            _one_curve(axes, number, look)
        if len(result.columns) > 1:
            axes.set_title(f"{result.artifact.x_label} {column}".strip(), loc="left", fontsize=10)
        axes.set_xlabel("epoch")
        axes.set_ylabel(_axis_name(result))
        finish(axes)
        _enlarge_end(axes, here)
    panels[-1].set_title(_caption(result, shown), loc="right", fontsize=9, color=GREY)
    _legend(made, [*_line_handles(drawn), *_extras(shown)])
    return made


def _one_curve(axes: Any, number: Number, look: Look) -> None:
    metric = number.artifact.metric
    finished = [_series(record, metric) for record in number.records if record.status == "finished"]
    epochs = sorted({x for series in finished for x in series})
    if epochs:
        at = [[series[x] for series in finished if x in series] for x in epochs]
        middle = statistics.median if number.artifact.band == "quartiles" else statistics.fmean
        axes.plot(epochs, [middle(values) for values in at], color=look.colour, linestyle=look.line, linewidth=1.6)
        edges = [_edges(values, number.artifact.band) for values in at]
        axes.fill_between(
            epochs, [low for low, _ in edges], [high for _, high in edges], color=look.colour, alpha=0.18, linewidth=0
        )
        paper = _paper(number)
        if paper is not None:
            at_epoch = float(metric.partition("@")[2] or epochs[-1])
            axes.plot(
                [at_epoch],
                [paper],
                "D",
                color=look.colour,
                markersize=6,
                markerfacecolor="none",
                markeredgewidth=1.3,
                clip_on=False,
                zorder=5,
            )
    for record in number.records:
        if record.status == "diverged":
            series = _series(record, metric)
            xs, ys = list(series) or [0.0], list(series.values())
            axes.plot(xs[: len(ys)], ys, color=look.colour, linestyle=look.line, linewidth=0.9, alpha=0.7)
            if ys:
                axes.plot(xs[-1:], ys[-1:], "x", color=look.colour, markersize=8, markeredgewidth=2, zorder=5)
            else:
                axes.plot(
                    [0.0],
                    [0.0],
                    "x",
                    color=look.colour,
                    markersize=8,
                    markeredgewidth=2,
                    clip_on=False,
                    transform=axes.get_xaxis_transform(),
                    zorder=5,
                )


def _enlarge_end(axes: Any, shown: Sequence[tuple[Number, Look]]) -> None:
    """Draw the last epochs once more, larger, where several curves come to lie on each other."""
    (first, last), (low, high) = axes.dataLim.intervalx, axes.dataLim.intervaly
    start = last - _END * (last - first)
    ends = [y for line in axes.lines for x, y in zip(*line.get_data(), strict=True) if x >= start]
    if len(shown) < 2 or len(ends) < 2 * len(shown) or not 0 < max(ends) - min(ends) < _CLOSE * (high - low):
        return
    above = statistics.fmean(ends) > (low + high) / 2  # then there is room below
    inset = axes.inset_axes((0.42, 0.1 if above else 0.5, 0.55, 0.42))
    for number, look in shown:
        _one_curve(inset, number, look)
    margin = 0.08 * (max(ends) - min(ends))
    inset.set_xlim(start, last)
    inset.set_ylim(min(ends) - margin, max(ends) + margin)
    inset.xaxis.set_major_locator(MaxNLocator(4))
    inset.yaxis.set_major_locator(MaxNLocator(4))
    inset.tick_params(labelsize=8)
    inset.set_title(f"from epoch {start:.0f} on", loc="left", fontsize=8, color=GREY, pad=3)
    finish(inset)


def _series(record: Record, metric: str) -> dict[float, float]:
    """The metric by epoch, without the epochs that lack it."""
    found = ((metric_of(epoch, "epoch"), metric_of(epoch, metric)) for epoch in record.epochs)
    return {x: y for x, y in found if x is not None and y is not None}


def _edges(values: Sequence[float], band: str) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    if band == "quartiles":
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return low, high
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return mean - deviation, mean + deviation


# -- bars and tables ---------------------------------------------------------------------------------------------------


def _bars(result: Result) -> Figure:
    shown = [number for number in result.numbers if number.was_run]
    chosen = looks(result.rows)
    drawn = {row: chosen[row] for row in result.rows if any(number.cell.row == row for number in shown)}
    made = canvas(max(6.4, min(11.5, 1.6 + 0.42 * len(shown))), 4.4)
    axes = made.subplots()
    width = 0.8 / len(drawn)
    values = [v for number in shown for v in _seen(number)]
    cut = min(values, default=0.0) > 0.5 * max(values, default=0.0)  # far from 0: show the differences
    foot = math.floor(min(values) - 0.3 * (max(values) - min(values)) - 0.2) if cut else 0.0
    for i, (row, look) in enumerate(drawn.items()):
        for j, column in enumerate(result.columns):
            number = result.by_cell.get((row, column))
            if number is not None and number.was_run:
                x = j + width * (i - (len(drawn) - 1) / 2)
                _one_bar(axes, x, 0.9 * width, foot, number, look)
    if values:
        axes.set_ylim(bottom=foot)
    axes.set_xticks(range(len(result.columns)), result.columns)
    axes.set_xlabel(result.artifact.x_label)
    axes.set_ylabel(_axis_name(result) + (f", from {foot:g}" if cut else ""))
    axes.set_title(_caption(result, shown), loc="right", fontsize=9, color=GREY)
    finish(axes)
    patches = [Patch(label=row, **_filling(look)) for row, look in drawn.items()]
    _legend(made, [*patches, *_extras(shown)])
    return made


def _filling(look: Look) -> dict[str, Any]:
    hatch = {"--": "//", ":": "..", "-.": "xx"}.get(look.line)
    return {"facecolor": look.colour, "alpha": 0.85, "hatch": hatch, "edgecolor": "white", "linewidth": 0}


def _one_bar(axes: Any, x: float, width: float, foot: float, number: Number, look: Look) -> None:
    if number.values:
        axes.bar(x, number.value - foot, width, foot, **_filling(look))
        if number.low_high is not None:
            axes.vlines(x, *number.low_high, color=GREY, linewidth=1.4)
    paper = _paper(number)
    if paper is not None:
        axes.plot(
            [x], [paper], "D", color="black", markersize=6, markerfacecolor="white", markeredgewidth=1.2, zorder=4
        )
    _mark_diverged(axes, [(x, Look("black", "x"), number)] if number.diverged else [])


def _dots(result: Result) -> Figure:
    """A table as a picture: ours with its spread, the paper's hollow, a panel per column."""
    shown = [number for number in result.numbers if number.was_run]
    columns = [c for c in result.columns if any(number.cell.column == c for number in shown)]
    rows = [row for row in result.rows if any(number.cell.row == row for number in shown)]
    made, panels = _panels(len(columns), 3.4, 0.9 + 0.3 * len(rows), sharey=True)
    chosen = looks(result.rows)
    values = [[v for n in shown if n.cell.column == column for v in _seen(n)] for column in columns]
    for axes, column, own, limits in zip(panels, columns, values, _common_limits(values), strict=True):
        ours = [number.value for number in shown if number.cell.column == column and number.values]
        cut = _cut(ours) if limits is None else -math.inf
        own = [v for v in own if v >= cut]
        for y, row in enumerate(rows):
            number = result.by_cell.get((row, column))
            if number is not None:
                _one_dot(axes, y, number, chosen[row], cut)
        positive = [v for v in own if v > 0]
        if positive and max(positive) > 50 * min(positive):
            axes.set_xscale("log")
        elif limits is not None:
            axes.set_xlim(*limits)
        elif positive:  # an axis of less than a hundredth of its values would make much of nothing
            middle, reach = (max(own) + min(own)) / 2, max(0.65 * (max(own) - min(own)), 0.005 * max(positive))
            axes.set_xlim(middle - reach, middle + reach)
        if len(result.columns) > 1:
            axes.set_title(f"{result.artifact.x_label} {column}".strip(), loc="left", fontsize=9.5)
        axes.set_xlabel(textwrap.fill(_axis_name(result) or column, 24), fontsize=9)
        if axes.get_xscale() == "linear":
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: value(x, "")))  # 11,000,000, not 1.1 and 1e7
            axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        finish(axes)
        axes.grid(axis="x", color="0.9", linewidth=0.8)
    name = f"ours: {_caption(result, shown)}" if result.records else "ours: computed"
    dot = Line2D([], [], color=GREY, marker="o", linestyle="-" if result.records else "", label=name)
    papers = [_paper_handle("the paper")] * any(_paper(number) is not None for number in shown)
    _legend(made, [dot, *papers, *[_diverged_handle()] * any(number.diverged for number in shown)])
    return made


def _seen(number: Number) -> list[float]:
    """What is drawn of a number."""
    found = (number.value, _paper(number), *(number.low_high or ()))
    return [v for v in found if v is not None and math.isfinite(v)]


def _common_limits(panels: Sequence[Sequence[float]]) -> list[tuple[float, float] | None]:
    """One axis for all panels, so that they can be compared; None for those with which it would flatten the others."""
    kept = [i for i, values in enumerate(panels) if values]
    while len(kept) > 1:
        low, high = min(min(panels[i]) for i in kept), max(max(panels[i]) for i in kept)
        if 0 < high - low <= 4 * statistics.median(max(panels[i]) - min(panels[i]) for i in kept):
            room = 0.1 * (high - low)
            return [(low - room, high + room) if i in kept else None for i in range(len(panels))]
        middles = {i: (max(panels[i]) + min(panels[i])) / 2 for i in kept}
        centre = statistics.median(middles.values())
        kept.remove(max(kept, key=lambda i: abs(middles[i] - centre)))
    return [None] * len(panels)


def _one_dot(axes: Any, y: int, number: Number, look: Look, cut: float) -> None:
    if number.values and number.value < cut:
        axes.annotate(
            f"← {number.value:.3g}",
            (0, y),
            (3, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=8,
            color=look.colour,
            va="center",
        )
    elif number.values:
        axes.plot([number.value], [y], "o", color=look.colour, markersize=6.5, zorder=4)
        if number.low_high is not None:
            axes.hlines(y, *number.low_high, color=look.colour, linewidth=1.8, zorder=3)
    paper = _paper(number)
    if paper is not None:
        axes.plot([paper], [y], "D", color=look.colour, markersize=9, markerfacecolor="none", markeredgewidth=1.2)
    if number.diverged:
        axes.plot(
            [0.0],
            [y],
            "x",
            color=look.colour,
            markersize=8,
            markeredgewidth=2,
            clip_on=False,
            transform=axes.get_yaxis_transform(),
        )
