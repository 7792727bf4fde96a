"""Accuracy against seconds and against batch size, from the logs.

`python -m equinorm.lab.record.picture`, from the checkout's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files import replacing
from ..report.style import COLOURS, looks
from .log import Log, Row, mean, spread

__all__ = ["NAMES", "by_batch", "curve", "draw", "draw_batches", "lengths", "of_final", "size_axes"]

RESULTS = Path("results/without-batch-statistics")
TWIN = "BatchNorm twin"
NAMES = {
    "unit": "unit filters",
    "batchnorm": "BatchNorm",
    "groupnorm": "GroupNorm",
    "msr": "mean shift rejection",
    "equinorm": "EquiNorm",
    "ws_agc": "scaled WS with AGC",
}
"""What the pictures and pages call the methods of the logs."""


def lengths(log: Log) -> dict[float, list[Row]]:
    """The runs of the probe's setting on held-out images, by their epochs."""
    found: dict[float, list[Row]] = {}
    for row in log.of("ladder", on="held-out", mode="captured"):
        if row["name"] == f"captured, {row['epochs']:g} epochs":
            found.setdefault(row["epochs"], []).append(row)
    return dict(sorted(found.items()))


def of_final(log: Log) -> dict[str, list[Row]]:
    """The runs on the test set, by name."""
    found: dict[str, list[Row]] = {}
    for row in log.of("final", on="test"):
        found.setdefault(row["name"], []).append(row)
    return found


def by_batch(log: Log, part: str = "batch") -> dict[str, dict[int, list[Row]]]:
    """The runs on the test set, by method and batch size, smallest first."""
    found: dict[str, dict[int, list[Row]]] = {method: {} for method in NAMES}
    for row in sorted(log.of(part, on="test"), key=lambda row: row["batch"]):
        found[row["method"]].setdefault(row["batch"], []).append(row)
    return found


def _point(rows: Sequence[Row]) -> tuple[float, float, float]:
    return mean(r["seconds"] for r in rows), mean(r["accuracy"] for r in rows), spread(r["accuracy"] for r in rows)


def draw(log: Log, path: Path) -> None:
    """The ladder's lengths, and the final runs beside their BatchNorm twin."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    axes = figure.subplots()
    tried = [_point(rows) for rows in lengths(log).values()]
    seconds, accuracies, spreads = zip(*tried, strict=True)
    first = "unit filters as first tried, 8 to 24 epochs, held-out images"
    axes.errorbar(seconds, accuracies, spreads, fmt="o-", color=COLOURS["sky"], label=first)
    for name, rows in of_final(log).items():
        x, y, bar = _point(rows)
        twin = name == TWIN
        label = f"BatchNorm, {rows[0]['epochs']:g} epochs" if twin else f"unit filters, {rows[0]['epochs']:g} epochs"
        colour, marker = (COLOURS["blue"], "s") if twin else (COLOURS["purple"], "^" if "seen" not in name else "v")
        label += f", compiled, test images, n {len(rows)}"
        axes.errorbar([x], [y], [bar], fmt=marker, color=colour, markersize=8, label=label)
    axes.axhline(94, color="0.6", linewidth=0.8, linestyle="--")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=90.6)
    axes.set_xlabel("seconds of training (H200)")
    axes.set_ylabel("accuracy on CIFAR-10 (%)")
    axes.set_title("Mean and standard deviation", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.legend(frameon=False, loc="lower right")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


# -- against batch size ------------------------------------------------------------------------------------------------


def curve(axes: Any, name: str, by_size: Mapping[int, Sequence[Row]], lowest: float) -> dict[int, float]:
    """Draw the means of a method with their spreads, down to `lowest`; all means, by batch size."""
    look = looks(NAMES.values())[name]
    means = {size: mean(row["accuracy"] for row in rows) for size, rows in by_size.items()}
    axes.plot(list(means), list(means.values()), color=look.colour, linestyle=look.line, linewidth=1.8)
    shown = [size for size in means if means[size] >= lowest]
    axes.errorbar(
        shown,
        [means[size] for size in shown],
        [spread(row["accuracy"] for row in by_size[size]) for size in shown],
        color=look.colour,
        fmt=look.marker,
        capsize=3,
    )
    return means


def size_axes(axes: Any, sizes: Sequence[int], lowest: float) -> None:
    """Axes for accuracy from `lowest` against batch size, with the sizes that were run."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(lowest, 92.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


LOWEST = 75.0


def draw_batches(log: Log, path: Path) -> None:
    """All methods, each with its name at the right end; what ends below `LOWEST` has its last number there."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 5.2), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.tick_params(labelsize=13)
    runs = by_batch(log)
    sizes = list(next(iter(runs.values())))
    outside = LOWEST
    for method, by_size in reversed(runs.items()):  # unit filters last, above the others
        name = NAMES[method]
        end = curve(axes, name, by_size, LOWEST)[sizes[-1]]
        colour = looks(NAMES.values())[name].colour
        if end >= LOWEST:
            at, shift, side, text = (float(sizes[-1]), end), 8, "left", name.replace(" with", "\nwith")
        else:
            outside += 0.9
            at, shift, side, text = (0.4 * sizes[-1], outside), 0, "right", f"{name} ↓ {end:.1f}"
        axes.annotate(
            text,
            at,
            (shift, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            color=colour,
            fontsize=13,
            annotation_clip=False,
        )
    size_axes(axes, sizes, LOWEST)
    axes.set_xlabel("batch size", fontsize=13)
    axes.set_ylabel("accuracy on CIFAR-10, %", fontsize=13)
    axes.set_title("Three epochs: mean and standard deviation, n = 3", loc="left", fontsize=13)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


if __name__ == "__main__":
    draw(Log(RESULTS), RESULTS / "accuracy_seconds.png")
    draw_batches(Log(RESULTS), RESULTS / "accuracy_batch.png")
