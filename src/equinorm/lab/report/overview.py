"""The picture of the first page: `python -m equinorm.lab.report.overview`, from the checkout's folder.

Left, the energy of each layer of one network before and after balancing; right, what the methods add to a training
step, from the committed log of `equinorm bench steps`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files import replacing
from .style import COLOURS

__all__ = ["STEPS", "added", "draw", "energies"]

STEPS = "bench_steps_resnet18_compiled_gpu.json"
_NAMES = {
    "GN": "GroupNorm",
    "BN": "BatchNorm",
    "EquiNorm": "EquiNorm",
    "EquiNorm, a quarter": "EquiNorm, a quarter",
    "WN": "weight norm",
    "ENorm": "ENorm",
    "MSR": "mean shift rejection",
}
"""The variants of the log that are shown."""


def energies(model: Any, example: Any) -> tuple[list[float], list[float]]:
    """Squared norm of each weight of a model before and after `balance_`, which changes the model."""
    import equinorm

    weights = [w for w in model.parameters() if w.dim() > 1]
    before = [float(w.detach().double().square().sum()) for w in weights]
    equinorm.balance_(model, example)
    return before, [float(w.detach().double().square().sum()) for w in weights]


def added(results: Path) -> dict[str, float]:
    """Milliseconds that each method adds to a step, by its name."""
    rows = json.loads((results / STEPS).read_text())["rows"]
    return {_NAMES[row["variant"]]: row["adds"] for row in rows if row["variant"] in _NAMES}


def draw(before: Sequence[float], after: Sequence[float], costs: Mapping[str, float], path: Path) -> None:
    """Both panels, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.9), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
    layers = range(1, len(before) + 1)
    left.plot(layers, before, "o-", color=COLOURS["black"], linewidth=1.6, label="as PyTorch starts it")
    left.plot(layers, after, "D-", color=COLOURS["green"], linewidth=1.6, label="after balance_, same outputs")
    left.set_yscale("log")
    left.set_xlabel("layer of VGG-16, from input to output")
    left.set_ylabel("energy ‖W‖²")
    left.set_title("Energy of each layer, before and after", loc="left", fontsize=11)
    left.legend(frameon=False)
    left.grid(axis="y", color="0.9", linewidth=0.8)
    names = sorted(costs, key=lambda name: -costs[name])
    norms = ("BatchNorm", "GroupNorm")
    right.barh(
        names, [costs[name] for name in names], color=[COLOURS["blue" if n in norms else "green"] for n in names]
    )
    for row, name in enumerate(names):
        right.annotate(f"{costs[name]:.1f}", (costs[name], row), (5, 0), textcoords="offset points", va="center")
    right.invert_yaxis()
    right.set_xlabel("milliseconds added to a step of 11.4 (H200, compiled)")
    right.set_title("What a method adds to a step of ResNet-18", loc="left", fontsize=11)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def main() -> None:
    """Draw it where README.md shows it."""
    import torch
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.vgg16(num_classes=10)
    draw(*energies(model, torch.rand(1, 3, 224, 224)), added(Path("results")), Path("docs/images/overview.png"))


if __name__ == "__main__":
    main()
