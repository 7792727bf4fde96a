"""Why normalization helps gradient descent: it makes the loss round (arpit2019, "key idea behind normalization").

The Hessian of linear regression is the second moment of its inputs, H = Σ xxᵀ / N. Inputs with a mean, with different
scales or with correlations stretch it. Taking off the mean and dividing by the deviation, which is what BatchNorm does
to every unit, removes the first two; only whitening removes the third.

    python examples/conditioning.py FOLDER        draws conditioning.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equinorm.diagnostics import style

STEPS = 40


def inputs() -> Tensor:
    """500 points with a mean, unequal scales and some correlation."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(500, 2, generator=draw, dtype=torch.float64)
    mixed = x @ torch.tensor([[1.0, 0.35], [0.0, 0.6]], dtype=torch.float64)
    return mixed + torch.tensor([1.2, 0.8], dtype=torch.float64)


def normalized(x: Tensor) -> Tensor:
    """Zero mean and unit variance for each input: BatchNorm without its gain and offset."""
    return (x - x.mean(0)) / x.std(0, correction=0)


def whitened(x: Tensor) -> Tensor:
    """Zero mean, and the identity as covariance."""
    centred = x - x.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(x))
    return centred @ vectors / values.sqrt()


def descend(hessian: Tensor, start: Tensor) -> Tensor:
    """Gradient descent on ½ vᵀHv with the step size 1/λ_max."""
    path, step_size = [start], 1 / torch.linalg.eigvalsh(hessian)[-1]
    for _ in range(STEPS):
        path.append(path[-1] - step_size * hessian @ path[-1])
    return torch.stack(path)


def main(folder: Path) -> dict[str, Any]:
    raw = inputs()
    kinds = {"as they come": raw, "normalized": normalized(raw), "whitened": whitened(raw)}
    hessians = {name: x.T @ x / len(x) for name, x in kinds.items()}
    conditions = {name: float(torch.linalg.cond(h)) for name, h in hessians.items()}

    figure, panels = style.figure(
        1,
        4,
        width=13,
        height=3.3,
        title="Normalized inputs make the loss round, and a round loss takes fewer steps",
        caption="Linear regression on the same 500 points: as they come, with mean 0 and variance 1 per input (what "
        "BatchNorm does to a layer's units), and whitened. Lines of equal loss around the solution, and gradient "
        "descent with step size 1/λmax. λmax/λmin is the condition number of the Hessian, which is the second "
        "moment of the inputs.",
    )
    start = torch.tensor([-0.9, 0.75], dtype=torch.float64)
    x, y = torch.meshgrid(*[torch.linspace(-1.1, 1.1, 120, dtype=torch.float64)] * 2, indexing="xy")
    losses = {}
    for number, (axes, (name, h)) in enumerate(zip(panels[:3], hessians.items(), strict=True)):
        loss = 0.5 * (h[0, 0] * x * x + 2 * h[0, 1] * x * y + h[1, 1] * y * y)
        path = descend(h, start)
        losses[name] = 0.5 * (path @ h * path).sum(1)
        axes.contour(x, y, loss.sqrt(), levels=9, colors="0.8", linewidths=0.8)
        axes.plot(path[:, 0], path[:, 1], **style.line(number + 1, markersize=3.5, linewidth=1.2))
        axes.plot(0, 0, "*", color="black", markersize=9)
        axes.set_title(f"{name}: λmax/λmin = {conditions[name]:.3g}", loc="left", fontsize=10)
        axes.set_xlabel("θ₁, from the solution")
        axes.set_ylabel("θ₂, from the solution")
        solved = int((losses[name] > 1e-12).sum())
        shown = losses[name][: solved + 1].clamp_min(1e-12)
        panels[3].plot(shown, label=name, **style.line(number + 1, markersize=3))
    panels[3].set_yscale("log")
    panels[3].set_xlabel("step")
    panels[3].set_ylabel("loss above its minimum")
    style.finish(panels)
    for axes in panels[:3]:
        axes.grid(False)
        axes.set_aspect("equal")
    style.save(figure, folder / "conditioning.png")
    return {"conditions": conditions, "losses": losses}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
