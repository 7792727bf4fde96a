"""The demo's picture: accuracy against depth, energy by layer before and after balancing, accuracy of every family."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...files import replacing
from .demo import DEEP, LAYERS, RESIDUAL, Energies, Score


def draw(scores: Sequence[Score], energies: Energies, path: Path) -> None:
    """Accuracy against depth, energy per layer before and after balancing, and accuracy of every family."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.8), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    panels = figure.subplot_mosaic(
        [["depth", "energy"], ["family", "family"]], width_ratios=[1.25, 1], height_ratios=[1.6, 1]
    )
    _draw_accuracy(panels["depth"], [r for r in scores if r.net == DEEP.net])
    _draw_energies(panels["energy"], energies)
    _draw_families(panels["family"], [r for r in scores if r.net == RESIDUAL.net])
    for name, axes in panels.items():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if name == "family" else "y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_accuracy(axes: Any, scores: Sequence[Score]) -> None:
    from matplotlib.ticker import MultipleLocator

    depths = sorted({r.depth for r in scores})
    lost_at = {(r.method, r.depth) for r in scores if r.accuracy is None}
    shown = [r for r in scores if (r.method, r.depth) not in lost_at]
    floor = max(0.0, 5 * math.floor((min(r.accuracy or 0.0 for r in shown) - 1) / 5)) if shown else 0.0
    for number, method in enumerate(DEEP.rows):
        shift = 0.16 * (number - (len(DEEP.rows) - 1) / 2)  # so that the bars of two methods do not hide each other
        points: dict[int, list[float]] = {}
        for r in shown:
            if r.method == method.name:
                points.setdefault(r.depth, []).append(r.accuracy or 0.0)
        kept, lost = sorted(points), [d for d in depths if (method.name, d) in lost_at]
        middle = [statistics.median(points[d]) for d in kept]
        below = [m - min(points[d]) for m, d in zip(middle, kept, strict=True)]
        above = [max(points[d]) - m for m, d in zip(middle, kept, strict=True)]
        style = {"color": method.colour, "marker": method.marker, "markersize": 6, "linewidth": 1.6}
        where = [d + shift for d in kept]
        axes.errorbar(where, middle, [below, above], label=method.name, elinewidth=1, capsize=0, **style)
        if lost:
            gone = [d + shift for d in lost]
            axes.plot(
                gone, [floor] * len(gone), "x", color=method.colour, markersize=9, markeredgewidth=2.2, clip_on=False
            )
            axes.plot([*where[-1:], gone[0]], [*middle[-1:], floor][-2:], ":", color=method.colour, linewidth=1.4)
            for x in gone:
                axes.annotate(
                    "diverged",
                    (x, floor),
                    (-9, 7),
                    textcoords="offset points",
                    ha="right",
                    va="center",
                    color=method.colour,
                    fontsize=8.5,
                )
    axes.set_ylim(floor, 100)
    axes.yaxis.set_major_locator(MultipleLocator(5))
    axes.set_xticks(depths)
    axes.set_xlabel("intermediary layers")
    axes.set_ylabel("test accuracy (%)")
    seeds = len({r.seed for r in scores})
    note = f": median, lowest and highest of {seeds} seeds" if seeds > 1 else ""
    axes.set_title(f"Deep fully connected nets{note}", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8.5, loc="lower left")


def _draw_energies(axes: Any, energies: Energies) -> None:
    layers = range(1, len(energies.before) + 1)
    axes.plot(layers, energies.before, "o-", color="#000000", label="as trained", linewidth=1.6)
    for c, colour, marker in (("1", "#56B4E9", "v"), ("1.2", "#D55E00", "^")):
        axes.plot(layers, energies.after[c], color=colour, marker=marker, label=f"balanced, c = {c}", linewidth=1.6)
    axes.set_yscale("log")
    axes.set_xlabel("layer, from input to output")
    axes.set_ylabel("energy ‖W‖²")
    axes.set_title(f"One net, {energies.depth} intermediary layers, same function", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8.5)


def _draw_families(axes: Any, scores: Sequence[Score]) -> None:
    """A line for each method: the median, and from the lowest to the highest seed."""
    names = list(dict.fromkeys(r.method for r in scores))
    found = {name: [r.accuracy or 0.0 for r in scores if r.method == name] for name in names}  # 0: diverged
    middles = {name: statistics.median(values) for name, values in found.items()}
    floor = max(0.0, 5 * math.floor((min(middles.values()) - 1) / 5))
    for row, name in enumerate(names):
        method, middle, low, high = RESIDUAL.row(name), middles[name], min(found[name]), max(found[name])
        axes.plot([max(low, floor), high], [row, row], color=method.colour, linewidth=1.6)
        axes.plot(middle, row, color=method.colour, marker=method.marker, markersize=8)
        axes.annotate(f"{middle:.1f}", (high, row), (10, 0), textcoords="offset points", va="center", fontsize=8.5)
        if low < floor:  # a seed that failed does not set the scale
            axes.annotate(
                f"lowest seed {low:.0f}",
                (floor, row),
                (6, 7),
                textcoords="offset points",
                va="center",
                color=method.colour,
                fontsize=8.5,
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(floor, 100)
    axes.set_xlabel("test accuracy (%)")
    axes.set_title(f"Every family on a residual net of {LAYERS - 1} convolutions", loc="left", fontsize=11)
