"""EquiNorm's balance: positive and negative weights contribute equally (defazio2018, section 4).

After a ReLU all inputs are positive, so a filter's output is what its positive weights add less what its negative ones
take away. By chance one side outweighs the other, the output has a mean, and the next layer sees it again. EquiNorm
shifts and scales the filter so that the positive side contributes 1 per output and the negative side -1.

    python examples/equilibrium.py FOLDER        draws equilibrium.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equinorm.diagnostics import channel_means, style
from equinorm.equilibrium import equilibrate, input_means
from equinorm.nn import EquiNormConv2d


def contributions(weight: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What the positive and the negative weights of each filter add to its mean output; v is the mean input."""
    per_channel = (weight * v.view(1, -1, 1, 1)).flatten(1)
    return per_channel.clamp_min(0).sum(1), per_channel.clamp_max(0).sum(1)


def chain(depth: int, equinorm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(depth):
        a = 3 if i == 0 else 32
        if equinorm:
            layers.append(EquiNormConv2d(a, 32, 3, padding=1, padding_mode="circular"))
        else:
            conv = nn.Conv2d(a, 32, 3, padding=1, padding_mode="circular", bias=False)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            layers.append(conv)
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def main(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    x = F.relu(torch.randn(64, 32, 8, 8)) * torch.rand(1, 32, 1, 1) * 2
    weight, v = torch.empty(64, 32, 3, 3), input_means(x)
    nn.init.kaiming_normal_(weight, nonlinearity="relu")
    kinds = {
        "He initialization": weight,
        "EquiNorm, one pass": equilibrate(weight, v),
        "EquiNorm, two passes": equilibrate(weight, v, two_pass=True),
    }
    sides = {name: contributions(w, v) for name, w in kinds.items()}
    depth, images = 20, torch.rand(32, 3, 8, 8)
    means = {
        "He initialization": channel_means(chain(depth, False), images),
        "EquiNorm": channel_means(chain(depth, True), images),
    }

    figure, (left, right) = style.figure(
        1,
        2,
        width=11,
        title="EquiNorm balances the positive weights of a filter against its negative ones",
        caption="Left: 64 filters of 3 x 3 x 32 on inputs after a ReLU; what the positive and the negative weights "
        "of each filter add to its mean output. On the dashed line they cancel and the output has mean 0. Two passes "
        "put every filter on the point (1, -1), one pass, which the paper uses, near it. Right: the part of each "
        "layer's output that is a constant per channel, in an untrained chain of 20 convolutions on images.",
    )
    for number, (name, (positive, negative)) in enumerate(sides.items()):
        look = style.line(number + 1, linewidth=0, markersize=(5, 5, 8)[number], alpha=0.75)
        left.plot(positive, negative, label=name, **look)
    reach = max(float(p.max()) for p, _ in sides.values()) * 1.1
    left.plot([0, reach], [0, -reach], "--", color="0.4", linewidth=1)
    left.set_xlabel("contribution of the positive weights")
    left.set_ylabel("contribution of the negative weights")
    for number, (name, found) in enumerate(means.items()):
        share = [100 * float(s) for s in found.share.values()]
        right.plot(range(1, depth + 1), share, label=name, **style.line(number + 1))
    right.set_ylim(-2, 100)
    right.set_xticks(range(2, depth + 1, 2))
    right.set_xlabel("layer, from input to output")
    right.set_ylabel("energy of the channel means (% of all)")
    style.finish([left, right])
    style.save(figure, folder / "equilibrium.png")
    return {"sides": sides, "means": means}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
