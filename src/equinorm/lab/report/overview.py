"""The picture of the first page: `python -m equinorm.lab.report.overview`, from the checkout's folder.

Left, accuracy against batch size, from the log of `equinorm.lab.record`; right, what the methods add to a training
step, from the log of `equinorm bench steps`. Words are large enough for a phone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files import replacing
from ..record.log import Log, Row
from ..record.picture import NAMES, RESULTS, by_batch, curve, size_axes
from .style import looks

__all__ = ["STEPS", "added", "draw"]

STEPS = "bench_steps_resnet18_compiled_gpu.json"
_COSTS = {
    "GN": "GroupNorm",
    "BN": "BatchNorm",
    "EquiNorm": "EquiNorm",
    "WN": "weight norm",
    "ENorm": "ENorm",
    "MSR": "mean shift rejection",
}
"""The variants of the log that are shown."""
_LABELS = {
    "groupnorm": (170, 85.3, "right"),
    "msr": (170, 84.5, "right"),
    "batchnorm": (45, 91.5, "right"),
    "unit": (1150, 90.5, "right"),
}
"""The methods that are shown, the one drawn last on top, and where their names stand."""
_SHOWN = [NAMES[method] for method in _LABELS]
_LOWEST = 84.0
_SIZE = 15


def added(results: Path) -> dict[str, float]:
    """Milliseconds that each method adds to a step, by its name."""
    rows = json.loads((results / STEPS).read_text())["rows"]
    return {_COSTS[row["variant"]]: row["adds"] for row in rows if row["variant"] in _COSTS}


def draw(runs: Mapping[str, Mapping[int, Sequence[Row]]], costs: Mapping[str, float], path: Path) -> None:
    """Both panels, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), dpi=180, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1], gridspec_kw={"wspace": 0.06})
    _accuracies(left, runs)
    _costs(right, costs)
    for axes in (left, right):
        axes.tick_params(labelsize=_SIZE - 1)
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _accuracies(axes: Any, runs: Mapping[str, Mapping[int, Sequence[Row]]]) -> None:
    colours = looks(NAMES.values())
    for method, (size, height, side) in _LABELS.items():
        name = NAMES[method]
        end = list(curve(axes, name, runs[method], _LOWEST).values())[-1]
        text = name if end >= _LOWEST else f"{name} ↓ {end:.0f}"
        axes.text(size, height, text, color=colours[name].colour, ha=side, va="center", fontsize=_SIZE)
    size_axes(axes, list(runs["unit"]), _LOWEST)
    axes.set_xlabel("batch size (3 epochs, n = 3)", fontsize=_SIZE)
    axes.set_title("CIFAR-10 accuracy, %", loc="left", fontsize=_SIZE + 1)


def _costs(axes: Any, costs: Mapping[str, float]) -> None:
    """Names stand at the ends of the bars, that of the longest inside; colours are those of the other panel."""
    names = sorted(costs, key=lambda name: -costs[name])
    known = looks(NAMES.values())
    colours = [known[name].colour if name in _SHOWN else "0.7" for name in names]
    axes.barh(names, [costs[name] for name in names], color=colours)
    for row, name in enumerate(names):
        inside = costs[name] > 0.6 * costs[names[0]]
        shift, side = (-6, "right") if inside else (6, "left")
        text, at = f"{name} {costs[name]:.1f}", (costs[name], row)
        axes.annotate(text, at, (shift, 0), textcoords="offset points", ha=side, va="center", fontsize=_SIZE)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel("ms (ResNet-18, H200, compiled)", fontsize=_SIZE)
    axes.set_title("Added to a step of 11.4 ms", loc="left", fontsize=_SIZE + 1)


if __name__ == "__main__":
    draw(by_batch(Log(RESULTS)), added(Path("results")), Path("docs/images/overview.png"))
