"""What stock2019 shows without training: table 1 (elements touched) and figures 6, 7 and 9 (ENorm on random nets)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ... import ENorm
from .. import nets as models
from .artifacts import Artifact, Cell, Claim, Compute
from .common import Means

__all__ = ["FIGURE_6", "FIGURE_7", "FIGURE_9", "TABLE_1"]

# -- table 1: elements accessed by a normalization ---------------------------------------------------------------------

NETS = {
    "ResNet-18": ("resnet18", "B"),
    "ResNet-50": ("resnet50", "B"),
    "ResNet-18, type C": ("resnet18", "C"),
    "ResNet-50, type C": ("resnet50", "C"),
}
TABLE_1_PAPER = {"ResNet-18": (12, 636, 40), "ResNet-50": (30, 2845, 178)}
TABLE_1_COLUMNS = ("ENorm", "BN (B=256)", "GN (B=16)")


def count_elements(model: nn.Module, in_shape: tuple[int, int, int]) -> dict[str, int]:
    """Weights that ENorm reads, and activations of one image that a norm behind every convolution reads."""
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    sizes: list[int] = []
    hooks = [m.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.numel())) for m in norms]
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *in_shape))
    finally:
        for hook in hooks:
            hook.remove()
    return {"weights": sum(layer.weight.numel() for layer in layers), "activations": sum(sizes)}


def table_1(toy: bool) -> dict[str, Any]:
    size, width = (32, 4) if toy else (224, 64)
    shape = (3, size, size)
    nets = {
        row: models.build(name, classes=1000, in_shape=shape, norm="batchnorm", skips=skips, width=width)
        for row, (name, skips) in NETS.items()
    }
    return {row: count_elements(net, shape) for row, net in nets.items()}


def table_1_cells(data: Mapping[str, Mapping[str, int]]) -> Means:
    """In millions, at the batch sizes of the paper."""
    return {
        (row, column): count / 1e6
        for row, counts in data.items()
        for column, count in zip(
            TABLE_1_COLUMNS, (counts["weights"], 256 * counts["activations"], 16 * counts["activations"]), strict=True
        )
    }


TABLE_1 = Artifact(
    name="stock2019/table1",
    title="Elements accessed during normalization, millions",
    says="ENorm accesses 12 M elements of a ResNet-18, BN 636 M (batch 256) and GN 40 M (batch 16); so it is about "
    "50 times faster in theory than BN and 3 times faster than GN.",
    protocol="Counted on our own models at 224 x 224: for ENorm the weights of convolutions and of the classifier, "
    "for BN and GN the outputs of all convolutions. The activations of the paper are those of the standard networks, "
    "whose skips are learned only where the shape changes (type B), not of type C; for its 30 M weights of ResNet-50 "
    "we know no reading: type B has 25.5 M, type C 40 M. A number is reproduced if it rounds to the paper's.",
    cells=tuple(
        Cell(row, column, (), paper=None if row not in TABLE_1_PAPER else TABLE_1_PAPER[row][i])
        for row in NETS
        for i, column in enumerate(TABLE_1_COLUMNS)
    ),
    claims=(
        Claim(
            "On ResNet-18, ENorm accesses 50 times fewer elements than BN and 3 times fewer than GN",
            lambda means: (
                means["ResNet-18", "BN (B=256)"] > 50 * means["ResNet-18", "ENorm"]
                and means["ResNet-18", "GN (B=16)"] > 3 * means["ResNet-18", "ENorm"]
            ),
        ),
    ),
    compute=Compute(table_1, table_1_cells),
    unit="million",
    tolerance=0.5,
)

# -- figures 6 and 7: a deep chain that was unbalanced by hand ---------------------------------------------------------

LAYERS, WIDTH = 20, 500
UNBALANCED = {6: 1.2, 12: 0.8}  # layer, counted from 1: factor
SHOWN = 50  # columns of a matrix that are drawn
CYCLES = (0, 1, 2, 5, 10, 20, 50, 100)


def unbalanced_chain(layers: int, width: int) -> nn.Sequential:
    """Square linear layers with Xavier initialization, two of which are scaled, and ReLUs between."""
    linear = [nn.Linear(width, width, bias=False) for _ in range(layers)]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for number, layer in enumerate(linear, start=1):
            nn.init.xavier_uniform_(layer.weight)
            layer.weight.mul_(UNBALANCED.get(number, 1.0))
    between = itertools.chain.from_iterable((layer, nn.ReLU()) for layer in linear[:-1])
    return nn.Sequential(*between, linear[-1])


def cycles(model: nn.Module, example: torch.Tensor, last: int) -> Iterator[int]:
    """ENorm cycles without training: yields the number of those done, from 0 to `last`."""
    enorm = ENorm(model, torch.optim.SGD(model.parameters(), lr=0.0), example)
    yield 0
    for cycle in range(1, last + 1):
        enorm.step()
        yield cycle


def column_energies(model: nn.Module) -> list[torch.Tensor]:
    """The l2 norm of every column of every weight matrix: a column of the paper's W is what makes one output."""
    weights = [m.weight.detach() for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return [torch.linalg.vector_norm(W.flatten(1), dim=1) for W in weights]


def total_norm(model: nn.Module) -> float:
    return math.sqrt(sum(float(e.double().square().sum()) for e in column_energies(model)))


def _chain(toy: bool) -> tuple[nn.Sequential, int]:
    width = 32 if toy else WIDTH
    return unbalanced_chain(LAYERS, width), width


def figure_6(toy: bool) -> dict[str, Any]:
    model, _ = _chain(toy)
    energies = column_energies(model)
    return {
        "columns": [[round(float(e), 5) for e in layer[:SHOWN]] for layer in energies],
        "mean": [float(layer.mean()) for layer in energies],
    }


def figure_6_cells(data: Mapping[str, Any]) -> Means:
    return {("column energy", str(k)): mean for k, mean in enumerate(data["mean"], start=1)}


def draw_figure_6(data: Mapping[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    for k, energies in enumerate(data["columns"], start=1):
        axes.scatter([k] * len(energies), energies, s=4, alpha=0.5, color="tab:red" if k in UNBALANCED else "tab:blue")
    axes.set(xlabel="layer", ylabel="l2 norm of a column", title="before ENorm")
    axes.set_xticks(range(1, len(data["columns"]) + 1))


def _ratio(means: Means, layer: int) -> float:
    """A layer's column energy over the mean of those that were not scaled."""
    others = [means["column energy", str(k)] for k in range(1, LAYERS + 1) if k not in UNBALANCED]
    return means["column energy", str(layer)] / (sum(others) / len(others))


CHAIN_PROTOCOL = (
    "20 linear layers of 500 x 500 with ReLUs between, Xavier initialization (uniform), no biases; layer 6 times "
    "1.2, layer 12 times 0.8. The energy of a column is the norm of the weights that make one output. Seed 0."
)

FIGURE_6 = Artifact(
    name="stock2019/figure6",
    title="Energy of an unbalanced network before ENorm",
    says="Layers 6 and 12, scaled by hand, stand out.",
    protocol=CHAIN_PROTOCOL,
    claims=(
        Claim(
            "Layer 6 has 1.2 and layer 12 has 0.8 times the energy of the others",
            lambda means: all(abs(_ratio(means, k) - factor) < 0.02 for k, factor in UNBALANCED.items()),
        ),
    ),
    compute=Compute(figure_6, figure_6_cells, draw_figure_6),
    unit="",
    x_label="layer",
)


def figure_7(toy: bool) -> dict[str, Any]:
    model, width = _chain(toy)
    wanted = CYCLES[:5] if toy else CYCLES
    data: dict[str, Any] = {"mean": {}, "norm": {}}
    for cycle in cycles(model, torch.zeros(1, width), last=wanted[-1]):
        if cycle in wanted:
            data["mean"][str(cycle)] = [float(layer.mean()) for layer in column_energies(model)]
            data["norm"][str(cycle)] = total_norm(model)
    return data


def figure_7_cells(data: Mapping[str, Any]) -> Means:
    """How far apart the layers are (largest over smallest mean column energy), and the norm of all weights."""
    spread = {("spread over layers", cycle): max(mean) / min(mean) for cycle, mean in data["mean"].items()}
    return spread | {("l2 norm", cycle): norm for cycle, norm in data["norm"].items()}


def draw_figure_7(data: Mapping[str, Any], figure: Any) -> None:
    import matplotlib

    axes = figure.subplots()
    shades = matplotlib.colormaps["viridis_r"]
    layers = range(1, len(data["mean"]["0"]) + 1)
    for i, (cycle, mean) in enumerate(data["mean"].items()):
        colour = shades((i + 1) / len(data["mean"]))
        axes.plot(layers, mean, marker=".", color=colour, label=f"{cycle} cycles")
    axes.set(xlabel="layer", ylabel="mean l2 norm of a column")
    axes.set_xticks(layers[1::2])
    axes.legend(fontsize="small", ncols=2)


def _falls(means: Means, row: str, numbers: list[int]) -> bool:
    values = [means[row, str(number)] for number in numbers]
    return all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(values))


FIGURE_7 = Artifact(
    name="stock2019/figure7",
    title="Energy of that network through ENorm cycles",
    says="ENorm re-balances the network without training.",
    protocol=f"{CHAIN_PROTOCOL} One ENorm cycle (c = 1) after the other; the paper does not say how many it draws.",
    claims=(
        Claim(
            "The norm of the weights falls from cycle to cycle", lambda means: _falls(means, "l2 norm", list(CYCLES))
        ),
        Claim(
            "The layers end within 1 % of each other",
            lambda means: means["spread over layers", str(CYCLES[-1])] < 1.01,
        ),
    ),
    compute=Compute(figure_7, figure_7_cells, draw_figure_7),
    unit="",
    x_label="cycles",
)

# -- figure 9: a random ResNet-18 --------------------------------------------------------------------------------------

FIGURE_9_CYCLES = 50


def random_resnet18(size: int, width: int) -> nn.Module:
    """Type C; He's initialization by fan-out, learned skips at the identity, the classifier as torch makes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        how: dict[str, Any] = {"norm": "none", "skips": "C", "init": "he_fan_out", "final_norm": "batchnorm"}
        model = models.build("resnet18", classes=1000, in_shape=(3, size, size), width=width, **how)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1):
            nn.init.dirac_(layer.weight)
    return model


def figure_9(toy: bool) -> dict[str, Any]:
    size, width = (32, 4) if toy else (224, 64)
    model = random_resnet18(size, width)
    return {"norm": [total_norm(model) for _ in cycles(model, torch.zeros(2, 3, size, size), FIGURE_9_CYCLES)]}


def figure_9_cells(data: Mapping[str, Any]) -> Means:
    return {("l2 norm", str(cycle)): data["norm"][cycle] for cycle in range(0, FIGURE_9_CYCLES + 1, 10)}


def draw_figure_9(data: Mapping[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    axes.plot(data["norm"])
    axes.set(xlabel="ENorm cycles", ylabel="l2 norm of the network")


FIGURE_9 = Artifact(
    name="stock2019/figure9",
    title="ENorm cycles on a randomly initialized ResNet-18, no training",
    says="The l2 norm of the weights decreases and converges (the axis of its plot runs from 92 to 86).",
    protocol="ResNet-18 with type C skips for 224 x 224 images and 1000 classes, no norms but the one behind the "
    "classifier, seed 0. The paper does not say how it was initialized. We draw convolutions by He's fan-out rule, "
    "set learned skips to the identity (its section 6.4 speaks of that) and leave the classifier as torch makes it: "
    "of four readings tried this is the one whose norm, 92.7, fits the axis of the paper's plot (He's fan-in gives "
    "116.8, and 106.2 with identity skips; fan-out with drawn skips 100.3). Where blocks meet the paper uses an "
    "approximate «equivalent weight»; ours balances the residual stream exactly, so it may end lower.",
    claims=(
        Claim(
            "The norm decreases from cycle to cycle",
            lambda means: _falls(means, "l2 norm", list(range(0, FIGURE_9_CYCLES + 1, 10))),
        ),
        Claim(
            "It converges: the last ten of 50 cycles do less than a twentieth of what the first ten do",
            lambda means: (
                means["l2 norm", "40"] - means["l2 norm", "50"] < (means["l2 norm", "0"] - means["l2 norm", "10"]) / 20
            ),
        ),
    ),
    compute=Compute(figure_9, figure_9_cells, draw_figure_9),
    unit="",
    x_label="cycles",
)
