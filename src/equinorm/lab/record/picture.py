"""Accuracy against seconds, from the logs: `python -m equinorm.lab.record.picture`, from the checkout's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...files import replacing
from ..report.style import COLOURS
from .log import Log, Row, mean, spread

__all__ = ["draw", "lengths", "of_final"]

RESULTS = Path("results/without-batch-statistics")
TWIN = "BatchNorm twin"


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
        colour, marker = (COLOURS["blue"], "s") if twin else (COLOURS["vermillion"], "^" if "seen" not in name else "v")
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


if __name__ == "__main__":
    draw(Log(RESULTS), RESULTS / "accuracy_seconds.png")
