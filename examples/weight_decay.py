"""Weight decay in a network with BatchNorm is a learning rate (arpit2019, "role of weight decay").

Where the length of w does not matter, shortening it by α = 1 - ηλ per step changes no output; it only makes the next
gradient longer. Write u_t = w_t/α^t, the weight without its decay: since ∇L(αw) = ∇L(w)/α,

    w_{t+1} = α·w_t - η∇L(w_t)     is     u_{t+1} = u_t - η α^(-2t-1) ∇L(u_t),

the same run without weight decay and with a learning rate that grows exponentially. Both are trained below.

    python examples/weight_decay.py FOLDER        draws weight_decay.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equinorm.diagnostics import effective_learning_rate, filter_norms, style

RATE, STEPS = 2.0, 300


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(512, 20, generator=draw, dtype=torch.float64)
    teacher = torch.randn(20, 4, generator=draw, dtype=torch.float64)
    return x, (x @ teacher + 2.0 * torch.randn(512, 4, generator=draw, dtype=torch.float64)).argmax(1)


def train(decay: float, growing: float = 0.0) -> dict[str, list[float]]:
    """Train the layer before BatchNorm; `growing` is the decay whose place a growing learning rate takes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64, eps=1e-30, affine=False), nn.ReLU(), nn.Linear(64, 4)
    )
    model = model.double()
    x, y = batch()
    optimizer = torch.optim.SGD([model[0].weight], lr=RATE, weight_decay=decay)
    alpha = 1 - RATE * growing
    found: dict[str, list[float]] = {"loss": [], "length": [], "rate": [], "lr": []}
    for step in range(STEPS):
        lr = RATE * alpha ** (-2 * step - 1)
        optimizer.param_groups[0]["lr"] = lr
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        found["loss"].append(float(loss.detach()))
        found["length"].append(float(filter_norms(model).norms["0.weight"].mean()))
        found["rate"].append(float(effective_learning_rate(model, lr).rates["0.weight"].mean()))
        found["lr"].append(lr)
        optimizer.step()
    return found


def main(folder: Path) -> dict[str, Any]:
    decay = 5e-3
    runs = {
        "no weight decay": train(0.0),
        f"weight decay {decay:g}": train(decay),
        "no weight decay, growing lr": train(0.0, growing=decay),
    }
    figure, panels = style.figure(
        1,
        3,
        width=12,
        title="With BatchNorm, weight decay is a learning rate: the second and third run are the same",
        caption="The layer before a BatchNorm, full-batch gradient descent. Left: the loss; the run with weight "
        "decay λ and the one without it whose learning rate grows as η(1 - ηλ)^(-2t-1) agree to rounding. Middle: "
        "the mean length of a filter, which decay keeps short. Right: what counts, lr/‖w‖²: weight decay raises it.",
    )
    for number, (name, run) in enumerate(runs.items()):
        look = style.line(number + 1, marker=None, linewidth=(2, 4, 1.6)[number], alpha=(1, 0.5, 1)[number])
        if number == 2:
            look["linestyle"] = "--"
        for axes, key in zip(panels, ("loss", "length", "rate"), strict=True):
            axes.plot(run[key], label=name, **look)
    for axes, label in zip(
        panels, ("loss", "mean length of a filter ‖w‖", "effective learning rate lr/‖w‖²"), strict=True
    ):
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.set_yscale("log")
    style.finish(panels)
    for axes in panels[1:]:
        axes.get_legend().remove()
    style.save(figure, folder / "weight_decay.png")
    return {"runs": runs}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
