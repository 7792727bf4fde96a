"""Gradient descent on a quadratic, with three step sizes (arpit2019, key insights).

Near a minimum every smooth loss is a quadratic, L = ½ vᵀΛv in the directions of its Hessian's eigenvectors, and a step
of gradient descent multiplies each coordinate by itself: v_i ← (1 - η λ_i) v_i. So

- η < 1/λ_max: every coordinate shrinks, the flat ones slowly;
- η = 1/λ_max: the steepest coordinate is done in one step, the flat ones are still slow;
- 1/λ_max < η < 2/λ_max: the steepest coordinate jumps from side to side, and from 2/λ_max on it diverges.

The steepest direction limits the step, the flattest one needs it: λ_max/λ_min decides how long training takes.

    python examples/quadratics.py FOLDER        draws quadratics.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equinorm.diagnostics import style, top_eigenvalue

EIGENVALUES = torch.tensor([10.0, 1.0], dtype=torch.float64)
START = torch.tensor([1.0, 2.2], dtype=torch.float64)
STEPS = 30


class Quadratic(nn.Module):
    """½ vᵀΛv as a model without inputs: its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(START.clone())

    def forward(self) -> Tensor:
        return 0.5 * (EIGENVALUES * self.v.square()).sum()


def descend(step_size: float) -> Tensor:
    """The path of plain gradient descent."""
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=step_size)
    path = [START.clone()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        path.append(model.v.detach().clone())
    return torch.stack(path)


def main(folder: Path) -> dict[str, Any]:
    # the instrument finds the eigenvalue that matters without being told the Hessian
    steepest = float(top_eigenvalue(Quadratic(), lambda loss, _: loss, ((), None), tolerance=1e-9).value)
    chosen = {"η = 0.3 / λmax": 0.3 / steepest, "η = 1 / λmax": 1 / steepest, "η = 1.9 / λmax": 1.9 / steepest}
    paths = {name: descend(step_size) for name, step_size in chosen.items()}

    figure, panels = style.figure(
        1,
        4,
        width=13,
        height=3.3,
        title="The steepest direction limits the step size, the flattest one pays for it",
        caption=f"Gradient descent on ½(λ₁v₁² + λ₂v₂²), λ = {EIGENVALUES.tolist()}, {STEPS} steps from the same "
        "point. Left: the path over the lines of equal loss. Right: the loss after each step. A small step creeps, "
        "1/λmax finishes the steep direction at once, and close to 2/λmax the path jumps across the valley at "
        "every step.",
    )
    x, y = torch.meshgrid(torch.linspace(-1.3, 1.3, 120), torch.linspace(-0.9, 2.6, 120), indexing="xy")
    loss = 0.5 * (EIGENVALUES[0] * x.square() + EIGENVALUES[1] * y.square())
    for number, (axes, (name, path)) in enumerate(zip(panels[:3], paths.items(), strict=True)):
        axes.contour(x, y, loss.sqrt(), levels=10, colors="0.8", linewidths=0.8)
        axes.plot(path[:, 0], path[:, 1], **style.line(number + 1, markersize=3.5, linewidth=1.2))
        axes.plot(0, 0, "*", color="black", markersize=9)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("v₁, steep")
        axes.set_ylabel("v₂, flat")
        losses = 0.5 * (EIGENVALUES * path.square()).sum(1)
        panels[3].plot(losses, label=name, **style.line(number + 1, markersize=3))
    panels[3].set_yscale("log")
    panels[3].set_xlabel("step")
    panels[3].set_ylabel("loss")
    style.finish(panels)
    for axes in panels[:3]:
        axes.grid(False)
    style.save(figure, folder / "quadratics.png")
    return {"steepest": steepest, "paths": paths, "step_sizes": chosen}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
