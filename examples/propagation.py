"""Scaled weight norm keeps signals over depth, width and residual blocks (arpit2019, section 5).

Weight norm with unit filters shrinks the signal at every ReLU layer, to nothing in a deep network. With the factor √(2
fan-in / fan-out) a layer keeps the norm of its input in expectation, E‖v‖² = ‖u‖², and the gradient is kept likewise.
In a residual network with B blocks each branch is divided by B, which bounds ‖f(x)‖ between ‖x‖/e and e‖x‖.

    python examples/propagation.py FOLDER        draws propagation.png
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equinorm
from equinorm.diagnostics import forward_norms, gradient_norms, style

DEPTH, WIDTH, SEEDS = 30, 200, 5
BLOCKS, WIDTHS = (1, 2, 5, 10, 20, 40), (10, 20, 50, 100, 200, 400)


def chain(scaled: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.normal_(layer.weight)
        layers += [layer, nn.ReLU()]
    model = nn.Sequential(*layers)
    if scaled:
        equinorm.scaled_weight_norm_(model)
    else:
        equinorm.weight_norm_(model)
        for name, parameter in model.named_parameters():
            if name.endswith("original0"):
                nn.init.ones_(parameter)  # unit filters
    return model


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.relu(self.one(x)))


def residual_ratio(blocks: int, width: int, seed: int) -> float:
    """‖f(x)‖/‖x‖ of a residual network with scaled weight norm."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(Residual(width) for _ in range(blocks)))
    equinorm.scaled_weight_norm_(model, branch_ends=[f"{i}.two" for i in range(blocks)])
    x = torch.randn(16, width)
    with torch.no_grad():
        return float((model(x).norm(dim=1) / x.norm(dim=1)).mean())


def main(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(32, WIDTH)
    chains = {"weight norm": chain(False), "scaled weight norm": chain(True)}
    forward = {name: forward_norms(model, x).ratio for name, model in chains.items()}
    # a gradient of the same size enters at the top of both, so that only the way down differs
    down = torch.randn(32, WIDTH) / math.sqrt(32 * WIDTH)
    backward = {name: gradient_norms(m, lambda out, t: (out * t).sum(), (x, down)).norm for name, m in chains.items()}
    by_blocks = {b: [residual_ratio(b, 100, seed) for seed in range(SEEDS)] for b in BLOCKS}
    by_width = {w: [residual_ratio(10, w, seed) for seed in range(SEEDS)] for w in WIDTHS}

    figure, panels = style.figure(
        1,
        4,
        width=14,
        height=3.3,
        title="Scaled weight norm keeps the size of signals and gradients; plain weight norm loses both",
        caption=f"At initialization. Left: {DEPTH} ReLU layers of width {WIDTH}, one network each; the norm of a "
        "layer's output (before its ReLU) over that of the input, and the norm of the gradient there for a random "
        f"gradient of norm 1 at the top. Right: residual networks, width 100 or 10 blocks; {SEEDS} seeds each; "
        "dotted: the bounds 1/e and e.",
    )
    for number, name in enumerate(chains):
        layers = range(1, DEPTH + 1)
        panels[0].plot(layers, forward[name], label=name, **style.line(number + 1, markersize=3))
        panels[1].plot(layers, backward[name], label=name, **style.line(number + 1, markersize=3))
    for axes, label in zip(panels[:2], ("‖h‖ / ‖x‖", "norm of the gradient at h"), strict=True):
        axes.set_yscale("log")
        axes.set_xlabel("layer, from input to output")
        axes.set_ylabel(label)
    for axes, found, label in ((panels[2], by_blocks, "residual blocks"), (panels[3], by_width, "width")):
        for bound in (math.e, 1 / math.e):
            axes.axhline(bound, linestyle=":", color="black", linewidth=1)
        places = list(found)
        axes.plot([p for p in places for _ in range(SEEDS)], [r for p in places for r in found[p]], ".", color="0.6")
        axes.plot(places, [sum(found[p]) / SEEDS for p in places], label="scaled weight norm", **style.line(2))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(0.25, 4)
        axes.set_xlabel(label)
        axes.set_ylabel("‖f(x)‖ / ‖x‖")
    style.finish(panels)
    for axes in panels[1:]:
        axes.get_legend().remove()
    style.save(figure, folder / "propagation.png")
    return {"forward": forward, "backward": backward, "by_blocks": by_blocks, "by_width": by_width}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
