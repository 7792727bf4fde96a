"""The picture of docs/enorm.md: `python -m equinorm.lab.report.energies`, from the checkout's folder.

The energy of each layer of VGG-16 before and after balancing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...files import replacing
from .style import COLOURS

__all__ = ["draw", "energies"]


def energies(model: Any, example: Any) -> tuple[list[float], list[float]]:
    """Squared norm of each weight of a model before and after `balance_`, which changes the model."""
    import equinorm

    weights = [w for w in model.parameters() if w.dim() > 1]
    before = [float(w.detach().double().square().sum()) for w in weights]
    equinorm.balance_(model, example)
    return before, [float(w.detach().double().square().sum()) for w in weights]


def draw(before: Sequence[float], after: Sequence[float], path: Path) -> None:
    """Both lines, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.9), dpi=180, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    axes = figure.subplots()
    layers = range(1, len(before) + 1)
    axes.plot(layers, before, "o-", color=COLOURS["black"], linewidth=1.6, label="as PyTorch starts it")
    axes.plot(layers, after, "D-", color=COLOURS["green"], linewidth=1.6, label="after balance_, same outputs")
    axes.set_yscale("log")
    axes.tick_params(labelsize=13)
    axes.set_xlabel("layer of VGG-16, from input to output", fontsize=13)
    axes.set_ylabel("energy ‖W‖²", fontsize=13)
    axes.legend(frameon=False, fontsize=13)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def main() -> None:
    """Draw it where docs/enorm.md shows it."""
    import torch
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.vgg16(num_classes=10)
    draw(*energies(model, torch.rand(1, 3, 224, 224)), Path("docs/images/energies.png"))


if __name__ == "__main__":
    main()
