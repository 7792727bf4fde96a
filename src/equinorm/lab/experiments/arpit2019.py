"""arpit2019: "Normalization techniques", lecture slides. Quadratics, weight norm on CIFAR-10, scaled weight norm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...weightnorm import scaled_weight_norm_, weight_norm_
from ..training.runs import Data, Model, Optim, Run
from ..training.schedules import Linear
from .artifacts import Artifact, Claim, Compute, seeds
from .common import Means, changed, grid, over, toy_run, trained, wins

__all__ = ["artifacts"]

# -- gradient descent on quadratics (section 2) ------------------------------------------------------------------------

STEEP, FLAT = 10.0, 0.5  # λ_max and λ_min of the loss ½ Σ λ_i v_i²
STEPS = 20
RATES = {  # η in units of 1/λ_max
    "η < 1/λ_max": 0.5,
    "η = 1/λ_max": 1.0,
    "1/λ_max < η < 2/λ_max": 1.8,
    "isotropic, η = 1/λ_max": 1.0,
}


def descend(eigenvalues: tuple[float, ...], rate: float, steps: int) -> list[list[float]]:
    """The path of v ← (1 - ηλ_i) v_i from (1, ..., 1)."""
    path = [[1.0] * len(eigenvalues)]
    for _ in range(steps):
        path.append([(1 - rate * value) * v for value, v in zip(eigenvalues, path[-1], strict=True)])
    return path


def quadratics(toy: bool) -> dict[str, Any]:
    """(along the flat direction, along the steep one) at every step."""
    return {
        name: descend((STEEP if "isotropic" in name else FLAT, STEEP), rate / STEEP, STEPS)
        for name, rate in RATES.items()
    }


def quadratics_cells(data: Mapping[str, list[list[float]]]) -> Means:
    """Signed distance to the minimum along the steep direction after one step and two, and in all at the end."""
    found: dict[tuple[str, ...], float] = {}
    for name, path in data.items():
        found[name, "steep, after 1 step"] = path[1][1]
        found[name, "steep, after 2 steps"] = path[2][1]
        found[name, f"distance after {STEPS}"] = math.hypot(*path[-1])
    return found


def draw_quadratics(data: Mapping[str, list[list[float]]], figure: Any) -> None:
    for axes, (name, path) in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, data.items(), strict=True):
        axes.plot(*zip(*path, strict=True), marker=".")
        axes.plot(0, 0, "k+")
        axes.set_title(name, fontsize="small")
    figure.supxlabel("flat direction")
    figure.supylabel("steep direction")


QUADRATICS = Artifact(
    name="arpit2019/quadratics",
    title="Gradient descent on a quadratic with three step sizes",
    says="Below 1/λ_max every direction shrinks without a change of sign; between 1/λ_max and 2/λ_max the steep one "
    "oscillates; at 1/λ_max it is done in one step. On an isotropic loss that is all: normalization makes the loss "
    "isotropic.",
    protocol=f"v ← (1 - ηλ)v from (1, 1) with λ = {STEEP:g} and {FLAT:g}, for the isotropic loss {STEEP:g} and "
    f"{STEEP:g}. The slides draw this without numbers.",
    claims=(
        Claim(
            "η < 1/λ_max: the steep direction shrinks without changing sign",
            lambda m: 0 < m["η < 1/λ_max", "steep, after 2 steps"] < m["η < 1/λ_max", "steep, after 1 step"] < 1,
        ),
        Claim(
            "1/λ_max < η < 2/λ_max: it changes sign at every step and shrinks",
            lambda m: (
                -1 < m["1/λ_max < η < 2/λ_max", "steep, after 1 step"] < 0
                and 0 < m["1/λ_max < η < 2/λ_max", "steep, after 2 steps"] < 1
            ),
        ),
        Claim(
            "η = 1/λ_max: the steep direction is done in one step, the flat one is not",
            lambda m: (
                m["η = 1/λ_max", "steep, after 1 step"] == 0 and m["η = 1/λ_max", f"distance after {STEPS}"] > 0.1
            ),
        ),
        Claim(
            "Isotropic: everything is done",
            lambda m: m["isotropic, η = 1/λ_max", f"distance after {STEPS}"] == 0,
        ),
    ),
    compute=Compute(quadratics, quadratics_cells, draw_quadratics),
    unit="",
)

# -- weight norm on CIFAR-10 (section 4, after Salimans & Kingma 2016) -------------------------------------------------

CNN = Run(
    data=Data("cifar10"),
    model=Model("convpool_cnn_c", {"init": "normal"}),
    optim=Optim(lr=0.003, schedule=Linear(hold=0.5), name="adam"),
    epochs=200,
    batch=100,
    precision="bfloat16",
)
CNN_NORMS: dict[str, dict[str, Any]] = {
    "WN + mean-only BN": {"norm": "weightnorm+mean_only_batchnorm"},
    "BN": {"norm": "batchnorm"},
    "normal parameterization": {"norm": "none", "bias": True, "data_init": True},
    "WN": {"norm": "weightnorm"},
    "mean-only BN": {"norm": "mean_only_batchnorm"},
}
CNN_ERRORS = {  # %
    "WN + mean-only BN": 7.31,
    "BN": 8.05,
    "normal parameterization": 8.43,
    "WN": 8.46,
    "mean-only BN": 8.52,
}
SLOW = 0.1  # of the learning rate, without normalization

WEIGHT_NORM = Artifact(
    name="arpit2019/weight-norm",
    title="Weight norm on CIFAR-10 (ConvPool-CNN-C)",
    says="Test errors without augmentation: WN with mean-only BN 7.31, BN 8.05, normal parameterization 8.43, WN "
    "8.46, mean-only BN 8.52 %.",
    protocol="ConvPool-CNN-C as Salimans & Kingma changed it; no augmentation, batch 100, 200 epochs; weight norm "
    "and the normal parameterization start from data. Adam with lr 0.003 (0.0003 for the normal parameterization), "
    "constant for 100 epochs and then decayed linearly to 0. In the original, inputs were ZCA-whitened; ours are "
    "normalized per channel, so absolute numbers need not agree and the claims are about the order. bfloat16 with "
    "float32 weights on a GPU. One run each.",
    cells=grid(
        CNN_NORMS,
        ("CIFAR-10",),
        lambda row, _: changed(CNN, lr=CNN.optim.lr * (SLOW if row.startswith("normal") else 1.0), **CNN_NORMS[row]),
        n=1,
        paper={row: (round(100 - error, 2),) for row, error in CNN_ERRORS.items()},
    ),
    claims=(
        Claim(
            "WN with mean-only BN is the best",
            lambda means: all(
                wins(means, "WN + mean-only BN", row, ["CIFAR-10"]) for row in CNN_NORMS if row != "WN + mean-only BN"
            ),
        ),
        Claim("WN alone is behind BN", lambda means: bool(wins(means, "BN", "WN", ["CIFAR-10"]))),
    ),
    shrink=toy_run,
)

SHORTENED = 40  # epochs

WEIGHT_NORM_SHORT = replace(
    WEIGHT_NORM,
    name="arpit2019/weight-norm-short",
    title=f"Weight norm on CIFAR-10 (ConvPool-CNN-C), {SHORTENED} epochs instead of 200",
    protocol=WEIGHT_NORM.protocol.replace("One run each.", "")
    + f"Here the schedule is shortened to {SHORTENED} epochs, the learning rate constant for the first half of them: "
    "numbers are those of a shorter training and need not agree with the slides'. n = 2.",
    cells=tuple(
        replace(cell, runs=seeds(replace(cell.runs[0], epochs=SHORTENED), 2), paper=None) for cell in WEIGHT_NORM.cells
    ),
    variant_of="arpit2019/weight-norm",
)

# -- scaled weight norm and recurrent nets on MNIST (sections 5 and 6) -------------------------------------------------

MNIST_DEPTHS = (5, 10, 20)
MNIST_ROWS: dict[str, dict[str, Any]] = {
    "He's start, no norm": {"norm": "none"},
    "BN": {"norm": "batchnorm"},
    "WN": {"norm": "weightnorm", "data_init": False},
    "WN, started from data": {"norm": "weightnorm"},
    "scaled WN": {"norm": "scaled_weightnorm"},
}
MNIST = Run(
    data=Data("mnist"),
    model=Model("fc", {"width": 500, "init": "he"}),
    optim=Optim(lr=0.01, momentum=0.9, schedule=Linear()),
    epochs=10,
    batch=128,
)

SCALED_MNIST = Artifact(
    name="arpit2019/scaled-weight-norm-mnist",
    title="Scaled weight norm: training deep nets on MNIST",
    says="Drawn without numbers: deep nets on MNIST train with scaled weight norm.",
    protocol="Fully connected nets of width 500 with ReLUs; 10 epochs of SGD with momentum 0.9, batch 128, learning "
    "rate 0.01 decayed linearly to 0 for every row, nothing chosen. The slides give no settings, so all are ours. "
    "Weight norm without a start from data keeps the lengths of He's start. n = 3. Matrix products in TF32 on a GPU.",
    cells=grid(MNIST_ROWS, MNIST_DEPTHS, lambda row, depth: changed(MNIST, hidden=depth, **MNIST_ROWS[row]), n=3),
    claims=(
        Claim(
            "Nets of every depth train with scaled weight norm",
            lambda means: all(trained(means, "scaled WN", depth) for depth in MNIST_DEPTHS),
        ),
    ),
    kind="lines",
    x_label="intermediary layers",
    shrink=lambda run: toy_run(run, hidden=2),
)

ROW_NORMS: dict[str, dict[str, Any]] = {
    "no norm": {"norm": "none"},
    "layer norm": {"norm": "layernorm"},
    "weight norm": {"norm": "weightnorm", "data_init": False},
}
ROW_LSTM = Run(
    data=Data("mnist"),
    model=Model("row_lstm", {"width": 128, "bias": False, "init": "xavier"}),
    optim=Optim(lr=1e-3, schedule=Linear(), name="adam"),
    epochs=5,
    batch=128,
)

RECURRENT = Artifact(
    name="arpit2019/recurrent",
    title="An LSTM that reads MNIST row by row",
    says="Layer norm is aimed at recurrent nets: its validation curves, drawn for another task, fall faster.",
    protocol="The slides show a reader's validation curves of Ba et al. 2016. Here an LSTM of 128 units reads the "
    "28 rows "
    "of an image and classifies by its last state: Adam, lr 0.001 decayed linearly to 0, batch 128, 5 epochs, n = 3; "
    "nothing chosen. Layer norm acts on the pre-activation of all gates together, weight norm on both matrices. Matrix "
    "products in TF32 on a GPU.",
    cells=grid(ROW_NORMS, ("MNIST",), lambda row, _: changed(ROW_LSTM, **ROW_NORMS[row]), n=3),
    claims=(
        Claim(
            "Layer norm is ahead of no norm after the first epoch",
            lambda means: (
                means["layer norm", "MNIST", "test_accuracy@1"] > means["no norm", "MNIST", "test_accuracy@1"]
            ),
        ),
    ),
    kind="curves",
    shrink=toy_run,
)

# -- scaled weight norm (section 5): how norms travel through a network at its start -----------------------------------

WIDTH, DEPTH = 500, 20
DEPTHS, WIDTHS = (1, 5, 10, 20, 50), (10, 50, 100, 500, 1000)
DRAWS = 3  # networks, with one batch of inputs each
BLOCKS, BLOCK_WIDTHS = (1, 2, 5, 10, 20, 50), (10, 50, 100, 500)
SCHEMES: dict[str, Callable[[nn.Module], object]] = {
    "WN": weight_norm_,
    "scaled WN": scaled_weight_norm_,
}


def relu_net(width: int, depth: int, scheme: str) -> nn.Sequential:
    """`depth` square linear layers, each with a ReLU; Gaussian directions, γ = 1, no biases."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    for layer in layers:
        nn.init.normal_(layer.weight)
        if scheme == "WN":  # γ = 1: rows of length 1
            with torch.no_grad():
                layer.weight.div_(torch.linalg.vector_norm(layer.weight, dim=1, keepdim=True))
    net = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    SCHEMES[scheme](net)
    return net


class ResidualReLU(nn.Module):
    """x + branch(x), B times; a branch is a ReLU layer and a linear one, divided by B (arpit2019, residual "
    "networks)."""

    def __init__(self, width: int, blocks: int, divide: bool) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False))
            for _ in range(blocks)
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        ends = [f"branches.{i}.2" for i in range(blocks)]
        scaled_weight_norm_(self, branch_ends=ends, blocks=blocks if divide else 1)

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.branches:
            x = x + branch(x)
        return x


def norm_ratio(output: Tensor, x: Tensor) -> float:
    """√(mean ‖f(x)‖² / mean ‖x‖²)."""
    return math.sqrt(float(output.square().sum() / x.square().sum()))


def _mean_ratio(make: Callable[[], nn.Module], width: int) -> float:
    """The geometric mean over networks; seeds are fixed."""
    logs = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for seed in range(DRAWS):
            torch.manual_seed(seed)
            net, x = make(), torch.randn(16, width)
            logs.append(math.log(max(norm_ratio(net(x), x), 1e-300)))
    return math.exp(statistics.fmean(logs))


def layer_norms(width: int, depth: int, scheme: str) -> dict[str, list[float]]:
    """Forward: ‖h_l‖ / ‖x‖ behind each layer. Backward: ‖∂ℓ/∂h_l‖ over that at the output, ℓ linear in the output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, x = relu_net(width, depth, scheme), torch.randn(16, width)
        hidden = [x.requires_grad_()]
        for i in range(0, len(net), 2):
            hidden.append(net[i : i + 2](hidden[-1]))
        gradients = torch.autograd.grad((hidden[-1] * torch.randn_like(hidden[-1])).sum(), hidden)
    return {
        "forward": [norm_ratio(h.detach(), x.detach()) for h in hidden],
        "backward": [norm_ratio(g, gradients[-1]) for g in gradients],
    }


def propagation(toy: bool) -> dict[str, Any]:
    return {scheme: layer_norms(64 if toy else WIDTH, DEPTH, scheme) for scheme in SCHEMES}


def propagation_cells(data: Mapping[str, Mapping[str, list[float]]]) -> Means:
    """The norm at the far end: behind the last layer, and of the gradient that reaches the input."""
    ends = {"forward": -1, "backward": 0}
    return {(scheme, way): found[way][end] for scheme, found in data.items() for way, end in ends.items()}


def draw_propagation(data: Mapping[str, Mapping[str, list[float]]], figure: Any) -> None:
    for axes, way in zip(figure.subplots(1, 2, sharey=True), ("forward", "backward"), strict=True):
        for scheme, found in data.items():
            axes.semilogy(found[way], marker=".", label=scheme)
        axes.set(xlabel="layer", title=f"{way} pass")
    figure.axes[0].set_ylabel("norm, relative")
    figure.axes[0].legend()


FAN = "Linear layers of equal fan-in and fan-out with ReLUs, Gaussian directions, gamma = 1, no biases, Gaussian inputs"

PROPAGATION = Artifact(
    name="arpit2019/propagation",
    title="Norms through a deep ReLU network at its start",
    says="Vanilla weight norm lets activations and gradients vanish or explode; scaled weight norm keeps both.",
    protocol=f"{FAN}: {DEPTH} layers of width {WIDTH}. Weight norm without data-dependent initialization. The slides "
    "draw this without numbers. One network (seed 0), 16 inputs.",
    claims=(
        Claim(
            "With scaled weight norm the norm stays within a factor of 2, forward and backward",
            lambda means: all(0.5 < means["scaled WN", way] < 2 for way in ("forward", "backward")),
        ),
        Claim(
            "With weight norm it vanishes (below 1 %), forward and backward",
            lambda means: all(means["WN", way] < 0.01 for way in ("forward", "backward")),
        ),
    ),
    compute=Compute(propagation, propagation_cells, draw_propagation),
    unit="",
    x_label="pass",
)

Plot = dict[str, dict[str, float]]  # row -> column -> ‖f(x)‖ / ‖x‖


def plot_cells(data: Mapping[str, Mapping[str, float]]) -> Means:
    return {(row, column): value for row, line in data.items() for column, value in line.items()}


def draw_plot(x_label: str) -> Callable[[Mapping[str, Mapping[str, float]], Any], None]:
    def draw(data: Mapping[str, Mapping[str, float]], figure: Any) -> None:
        axes = figure.subplots()
        for row, line in data.items():
            axes.loglog([int(column) for column in line], list(line.values()), marker=".", label=row)
        axes.set(xlabel=x_label, ylabel="‖f(x)‖ / ‖x‖")
        axes.legend()

    return draw


def _lines(columns: Iterable[int], ratio: Callable[[str, int], float], rows: Iterable[str]) -> Plot:
    return {row: {str(column): ratio(row, column) for column in columns} for row in rows}


def depth_plot(toy: bool) -> Plot:
    width, depths = (32, DEPTHS[:3]) if toy else (WIDTH, DEPTHS)
    return _lines(depths, lambda row, depth: _mean_ratio(lambda: relu_net(width, depth, row), width), SCHEMES)


def width_plot(toy: bool) -> Plot:
    widths = WIDTHS[:2] if toy else WIDTHS
    return _lines(widths, lambda row, width: _mean_ratio(lambda: relu_net(width, DEPTH, row), width), SCHEMES)


RESIDUAL = {"divided by B": True, "not divided": False}


def block_plot(toy: bool) -> Plot:
    blocks = BLOCKS[:3] if toy else BLOCKS
    return _lines(blocks, lambda row, b: _mean_ratio(lambda: ResidualReLU(100, b, RESIDUAL[row]), 100), RESIDUAL)


def block_width_plot(toy: bool) -> Plot:
    widths = BLOCK_WIDTHS[:2] if toy else BLOCK_WIDTHS
    return _lines(widths, lambda row, w: _mean_ratio(lambda: ResidualReLU(w, 10, RESIDUAL[row]), w), RESIDUAL)


def _kept(row: str, columns: Iterable[int], factor: float) -> Callable[[Means], bool]:
    return lambda means: all(1 / factor <= means[row, str(column)] <= factor for column in columns)


DEPTH_PLOT = Artifact(
    name="arpit2019/depth",
    title="Scaled weight norm: norm of the output over depth",
    says="A sufficiently wide network with scaled weight norm keeps the norm of its input at every depth.",
    protocol=f"{FAN}, width {WIDTH}. Geometric mean over {DRAWS} networks with 16 inputs each.",
    claims=(
        Claim("Scaled WN keeps the norm within a factor of 2 up to 50 layers", _kept("scaled WN", DEPTHS, 2.0)),
        Claim(
            "WN loses half of the squared norm with every layer: below 1e-2 from 20 layers on",
            lambda m: m["WN", "20"] < 1e-2,
        ),
    ),
    compute=Compute(depth_plot, plot_cells, draw_plot("layers")),
    unit="",
    x_label="layers",
)

WIDTH_PLOT = Artifact(
    name="arpit2019/width",
    title="Scaled weight norm: norm of the output over width",
    says="The wider the network, the better the norm is kept.",
    protocol=f"{FAN}, {DEPTH} layers. Geometric mean over {DRAWS} networks with 16 inputs each.",
    claims=(
        Claim("From width 100 on the norm is kept within a factor of 2", _kept("scaled WN", WIDTHS[2:], 2.0)),
        Claim(
            "Width 500 and more is nearer to 1 than width 10",
            lambda means: (
                abs(math.log(over(means, "scaled WN", WIDTHS[3:]))) < abs(math.log(means["scaled WN", str(WIDTHS[0])]))
            ),
        ),
    ),
    compute=Compute(width_plot, plot_cells, draw_plot("width")),
    unit="",
    x_label="width",
)

RESIDUAL_PROTOCOL = (
    "x + branch(x), B times; a branch is a ReLU layer scaled by √(2 fan-in / fan-out) and a linear layer scaled by "
    f"√(fan-in / fan-out), its output divided by B. Gaussian directions and inputs; geometric mean over {DRAWS} "
    "networks with 16 inputs each. «Not divided» is ours, to show what the division does."
)

BLOCK_PLOT = Artifact(
    name="arpit2019/residual-blocks",
    title="Scaled weight norm in residual networks: number of blocks",
    says="With the output of each of B blocks divided by B, ‖x‖²/e² ≤ ‖f(x)‖² ≤ e²·‖x‖².",
    protocol=f"{RESIDUAL_PROTOCOL} Width 100.",
    claims=(
        Claim("The norm stays within a factor of e for every number of blocks", _kept("divided by B", BLOCKS, math.e)),
        Claim(
            "Without the division it explodes: above 100 with 50 blocks (ours)", lambda m: m["not divided", "50"] > 100
        ),
    ),
    compute=Compute(block_plot, plot_cells, draw_plot("residual blocks")),
    unit="",
    x_label="residual blocks",
)

BLOCK_WIDTH_PLOT = Artifact(
    name="arpit2019/residual-width",
    title="Scaled weight norm in residual networks: width",
    says="The same bounds hold for every width.",
    protocol=f"{RESIDUAL_PROTOCOL} 10 blocks.",
    claims=(Claim("The norm stays within a factor of e for every width", _kept("divided by B", BLOCK_WIDTHS, math.e)),),
    compute=Compute(block_width_plot, plot_cells, draw_plot("width")),
    unit="",
    x_label="width",
)


def artifacts() -> list[Artifact]:
    slides = [QUADRATICS, WEIGHT_NORM, PROPAGATION, DEPTH_PLOT, WIDTH_PLOT, BLOCK_PLOT, BLOCK_WIDTH_PLOT]
    return [*slides, WEIGHT_NORM_SHORT, SCALED_MNIST, RECURRENT]
