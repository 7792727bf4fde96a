"""BatchNorm as scale invariance: BN(cWx) = BN(Wx) (arpit2019, "effects of batch normalization").

The length of a filter before a BatchNorm does not matter to the output. Its gradient is therefore orthogonal to it, and
falls as 1/c when the filter is c times as long: a long filter turns slowly, as if its learning rate were lr/c². In a
plain network the same factor changes everything.

    python examples/scale_invariance.py FOLDER        draws scale_invariance.png
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equinorm.diagnostics import gradient_alignment, gradient_landscape, gradient_norms, style

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def network(norm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(64, eps=1e-30, affine=False)] if norm else []
    return nn.Sequential(nn.Linear(20, 64), *middle, nn.ReLU(), nn.Linear(64, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(256, 20, generator=draw, dtype=torch.float64)
    return x, (x[:, :3] + 0.3 * torch.randn(256, 3, generator=draw, dtype=torch.float64)).argmax(1)


def scaled(model: nn.Sequential, factor: float) -> nn.Sequential:
    """The same network with its first layer multiplied by a number."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin[0].parameters():
            parameter.mul_(factor)
    twin[-1].requires_grad_(False)  # the classifier stands still: this is about the first layer
    return twin


def main(folder: Path) -> dict[str, Any]:
    x, y = batch()
    models = {"BatchNorm": network(True), "no norm": network(False)}
    changes: dict[str, list[float]] = {}
    gradients: dict[str, list[float]] = {}
    for name, model in models.items():
        with torch.no_grad():
            reference = model(x)
            outputs = [scaled(model, factor)(x) for factor in FACTORS]
        changes[name] = [float((out - reference).norm() / reference.norm()) for out in outputs]
        found = [gradient_norms(scaled(model, factor), F.cross_entropy, (x, y)) for factor in FACTORS]
        gradients[name] = [float(f.parameter_norm[0]) for f in found]
    alignment = {
        name: float(gradient_alignment(m, F.cross_entropy, (x, y)).largest["0.weight"]) for name, m in models.items()
    }
    steps = [0.1 * i for i in range(1, 61)]
    landscapes = {
        factor: gradient_landscape(scaled(models["BatchNorm"], factor), F.cross_entropy, (x, y), steps)
        for factor in (0.5, 1.0, 2.0)
    }

    figure, (left, middle, right) = style.figure(
        1,
        3,
        width=12,
        title="A layer before BatchNorm does not feel its own length: longer filters only learn more slowly",
        caption="A two-layer network on 256 random points; its first layer is multiplied by c. Left: relative change "
        "of the output. Middle: norm of the first layer's gradient; 1/c with BatchNorm, where the largest cosine "
        f"between a filter and its gradient is {alignment['BatchNorm']:.0e} ({alignment['no norm']:.2f} without). "
        "Right: the loss along the gradient, with BatchNorm: the functions are equal at 0, but the same step size "
        "goes less far for longer filters.",
    )
    for number, name in enumerate(models):
        shown = [max(change, 1e-17) for change in changes[name]]
        left.plot(FACTORS, shown, label=name, **style.line(number + 1))
        middle.plot(FACTORS, gradients[name], label=name, **style.line(number + 1))
    middle.plot(
        FACTORS, [gradients["BatchNorm"][2] / c for c in FACTORS], ":", color="black", label="1/c", linewidth=1.2
    )
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
        axes.set_xticks(FACTORS, [f"{c:g}" for c in FACTORS])
        axes.set_xlabel("factor c on the first layer")
    left.set_yscale("symlog", linthresh=0.1)
    left.set_ylim(-0.02, 10)
    left.set_yticks([0, 0.1, 1, 10], ["0", "0.1", "1", "10"])
    left.set_ylabel("relative change of the output")
    middle.set_yscale("log")
    middle.set_ylabel("gradient of the first layer, norm")
    for number, (factor, found) in enumerate(landscapes.items()):
        curve = [float(found.loss), *found.losses.tolist()]
        right.plot([0, *steps], curve, label=f"c = {factor:g}", **style.line(number + 1, marker=None))
    right.set_xlabel("step size η along the gradient")
    right.set_ylabel("loss")
    style.finish([middle, right])
    style.finish(left)
    style.save(figure, folder / "scale_invariance.png")
    return {"changes": changes, "gradients": gradients, "alignment": alignment}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
