"""ENorm on an unbalanced network of 20 layers (stock2019, appendix A, figures 6 and 7).

Layers of 500 x 500, Xavier initialization, no training; layer 6 is multiplied by 1.2 and layer 12 by 0.8. One ENorm
cycle sets every hidden unit to the scale at which its incoming and outgoing weights have equal norms, from the first
layer to the last. The function never changes, the norm of the network never rises, and the energy of all layers becomes
equal.

    python examples/unbalanced_net.py FOLDER        draws unbalanced_columns.png and unbalanced_cycles.png
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import equinorm
from equinorm.diagnostics import column_energy, energy_by_cycle, plot_column_energy, plot_energy_by_cycle, style

LAYERS, WIDTH, CYCLES = 20, 500, 40


def network(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(1, LAYERS + 1):
        layer = nn.Linear(width, width, bias=False)
        nn.init.xavier_normal_(layer.weight)
        with torch.no_grad():
            layer.weight.mul_({6: 1.2, 12: 0.8}.get(number, 1.0))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def main(folder: Path, width: int = WIDTH) -> dict[str, Any]:
    model, x = network(width), torch.randn(4, width)
    symmetry = equinorm.trace(model, x)
    balanced = copy.deepcopy(model)
    report = equinorm.balance_(balanced, symmetry=symmetry.bind(balanced))
    cycles = energy_by_cycle(model, cycles=CYCLES, symmetry=symmetry)
    with torch.no_grad():
        change = float((model(x) - balanced(x)).norm() / model(x).norm())

    columns = {"as it is": column_energy(model), "balanced": column_energy(balanced)}
    about = f"{LAYERS} layers of {width} x {width}, layer 6 multiplied by 1.2 and layer 12 by 0.8, not trained."
    figure = plot_column_energy(
        columns,
        title="Balancing takes the bumps out of a network without changing what it computes",
        caption=f"{about} Each dot is the norm of one column: of all weights that enter one unit. Outputs of the two "
        f"networks differ by {change:.0e}. The first and last layer keep one side each: nothing rescales inputs and "
        "outputs.",
    )
    style.save(figure, folder / "unbalanced_columns.png")
    figure = plot_energy_by_cycle(
        cycles,
        title="ENorm cycles even out the energy of all layers, and the norm of the network falls",
        caption=f"{about} Left: the squared norm of each layer, a darker line for a later cycle. Right: the norm of "
        f"the whole network; balance_ finds the least norm {report.norm_after:.3f} at once (dashed). After stock2019, "
        "figures 7 and 9.",
    )
    figure.axes[1].axhline(report.norm_after, linestyle="--", color="0.3", linewidth=1.2)
    style.save(figure, folder / "unbalanced_cycles.png")
    return {"change": change, "cycles": cycles, "report": report}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
