"""Weight norm's updates are orthogonal to the weight, so its length can only grow (arpit2019, section 4).

With w = g·v/‖v‖ the loss does not depend on ‖v‖, so Δv ⊥ v and ‖v_{t+1}‖² = ‖v_t‖² + ‖Δv‖²: with c = ‖Δv‖/‖v‖ the
length grows by √(1 + c²) at every step. A step that is too large makes v long, and a long v turns slowly: weight norm
lowers its own learning rate until it fits.

    python examples/weight_norm.py FOLDER        draws weight_norm.png
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import equinorm
from equinorm.diagnostics import effective_learning_rate, filter_norms, style

RATES = (0.1, 1.0, 5.0)
STEPS = 40
V = "parametrizations.weight.original1"


def problem() -> tuple[Tensor, Tensor]:
    """A regression in two dimensions whose answer lies in the direction (-0.6, 0.8)."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=draw, dtype=torch.float64)
    return x, x @ torch.tensor([[-0.6], [0.8]], dtype=torch.float64)


def train(lr: float) -> dict[str, Any]:
    """Only v is trained, so that the picture is in a plane."""
    x, y = problem()
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.8, 0.6]]))
    equinorm.weight_norm_(model)
    v = model.get_parameter(V)
    optimizer = torch.optim.SGD([v], lr=lr)
    path, rates, angles = [v.detach().clone()], [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        rates.append(float(effective_learning_rate(model, lr).rates[V]))
        before = v.detach().clone()
        optimizer.step()
        step = v.detach() - before
        angles.append(float((step * before).sum() / (step.norm() * before.norm()).clamp_min(1e-300)))
        path.append(v.detach().clone())
    return {"path": torch.cat(path), "rates": rates, "cosines": angles, "length": float(filter_norms(model).norms[V])}


def main(folder: Path) -> dict[str, Any]:
    runs = {lr: train(lr) for lr in RATES}
    figure, (left, middle, right) = style.figure(
        1,
        3,
        width=12,
        title="Weight norm turns a weight without shortening it, and so lowers its own learning rate",
        caption="w = g·v/‖v‖ learns a direction in the plane (dashed), from the same start with three learning "
        "rates. Left: v; every step is at a right angle to v, so v only moves outwards. Middle: its length. Right: "
        "the effective learning rate lr/‖v‖²: the larger lr was, the more v grew, and the rates come closer to each "
        "other.",
    )
    goal = torch.tensor([-0.6, 0.8])
    reach = max(float(run["path"].norm(dim=1).max()) for run in runs.values()) * 1.08
    left.plot([0, float(goal[0]) * reach], [0, float(goal[1]) * reach], "--", color="0.4", linewidth=1)
    turn = torch.linspace(0, 2 * math.pi, 200)
    left.plot(turn.cos(), turn.sin(), color="0.85", linewidth=1)
    for number, (lr, run) in enumerate(runs.items()):
        look = style.line(number + 1, markersize=3)
        left.plot(run["path"][:, 0], run["path"][:, 1], label=f"lr {lr:g}", **look)
        middle.plot(run["path"].norm(dim=1), label=f"lr {lr:g}", **look)
        right.plot(run["rates"], label=f"lr {lr:g}", **look)
    left.set_aspect("equal")
    left.set_xlim(-0.75 * reach, 1.25)
    left.set_ylim(-0.25, reach)
    left.set_xlabel("v₁")
    left.set_ylabel("v₂")
    middle.set_yscale("log")
    right.set_yscale("log")
    for axes, label in ((middle, "length ‖v‖"), (right, "effective learning rate lr/‖v‖²")):
        axes.set_xlabel("step")
        axes.set_ylabel(label)
    style.finish([left, middle, right])
    middle.get_legend().remove()
    right.get_legend().remove()
    style.save(figure, folder / "weight_norm.png")
    return {"runs": runs}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
