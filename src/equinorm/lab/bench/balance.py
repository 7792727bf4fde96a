"""How long tracing and balancing take, and how many plain ENorm cycles the same optimum would need.

    equinorm bench balance                                     all networks
    equinorm bench balance --only resnet18 --repeats 3         some of them

Every network starts from random weights (seed 0) with BatchNorm folded into the convolution before it, unless its name
says otherwise (densenet121 keeps the norms that have none before them). Each repeat multiplies all free scales by
exp(N(0, 1)) and balances from there, p = 2, c = 1, to an imbalance below 1e-8; so do the cycles, Gauss-Seidel as in
algorithm 1 of stock2019, on the same reduced matrices, in float64. No unit of these networks is dead, so nothing has to
be held where it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import equinorm

from ...criteria.norm import Objective, imbalance, layouts
from ...solver import Cycle
from ...tools.sources import load

TOLERANCE = 1e-8

# -- networks ----------------------------------------------------------------------------------------------------------


def folded(model: nn.Module) -> nn.Module:
    """Put every BatchNorm that follows a convolution, and nothing else, into that convolution."""
    graph = fx.symbolic_trace(model.eval())
    modules = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        if node.op != "call_module" or not isinstance(modules[node.target], nn.BatchNorm2d):
            continue
        before = node.args[0]
        if before.op == "call_module" and isinstance(modules[before.target], nn.Conv2d) and len(before.users) == 1:
            graph.set_submodule(before.target, fuse_conv_bn_eval(modules[before.target], modules[node.target]))
            node.replace_all_uses_with(before)
            graph.graph.erase_node(node)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph.requires_grad_(False)  # torch makes some of what it folds untrained, which would keep all of it


def vision(name: str, fold: bool = True, relu6: bool = True) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = load(f"torchvision:{name}").model
    if not relu6:  # ReLU6 is not homogeneous: it would freeze nearly everything
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.ReLU6):
                model.set_submodule(path, nn.ReLU())
    return (folded(model) if fold else model), torch.zeros(1, 3, 224, 224)


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


def squared_relu(width: int = 512, depth: int = 8) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), SquaredReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10)), torch.zeros(1, width)


class ResidualUnit(nn.Module):
    """x + conv(x), again and again: one scale per channel of the stream, which is on both sides of every weight."""

    def __init__(self, width: int = 128, depth: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x.relu())
        return self.last(x.mean((2, 3)))


def residual() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return ResidualUnit(), torch.zeros(1, 3, 32, 32)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "resnet18": partial(vision, "resnet18"),
    "resnet18, BN kept": partial(vision, "resnet18", fold=False),
    "resnet50": partial(vision, "resnet50"),
    "mobilenet_v2, ReLU": partial(vision, "mobilenet_v2", relu6=False),
    "googlenet": partial(vision, "googlenet"),
    "densenet121": partial(vision, "densenet121"),
    "vgg16": partial(vision, "vgg16"),
    "8 x ReLU²(Linear(512))": squared_relu,
    "8 x (x + conv(ReLU(x)))": residual,
}

# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BalanceCost:
    network: str
    scales: int
    trace: list[float]  # seconds, all repeats
    balance: list[float]
    iterations: list[int]
    imbalance: float  # the largest of all repeats
    converged: bool
    norm_before: float  # medians
    norm_after: float
    cycles: int  # plain cycles until the same tolerance, or as many as the budget allowed
    cycles_seconds: float
    cycles_imbalance: float


def measure(name: str, repeats: int, budget: float) -> BalanceCost:
    model, example = NETWORKS[name]()
    traces = []
    for _ in range(repeats):
        start = time.perf_counter()
        symmetry = equinorm.trace(model, example)
        traces.append(time.perf_counter() - start)
    start_weights = {key: value.clone() for key, value in model.state_dict().items()}
    reports = []
    for repeat in range(repeats):
        model.load_state_dict(start_weights)
        perturb(symmetry, repeat)
        reports.append(equinorm.balance_(model, symmetry=symmetry, tol=TOLERANCE))
    model.load_state_dict(start_weights)
    perturb(symmetry, 0)
    cycles, seconds, gap = plain_cycles(symmetry, budget)
    return BalanceCost(
        network=name,
        scales=symmetry.num_scales,
        trace=traces,
        balance=[r.seconds for r in reports],
        iterations=[r.iterations for r in reports],
        imbalance=max(r.imbalance for r in reports),
        converged=all(r.converged for r in reports),
        norm_before=statistics.median(r.norm_before for r in reports),
        norm_after=statistics.median(r.norm_after for r in reports),
        cycles=cycles,
        cycles_seconds=seconds,
        cycles_imbalance=gap,
    )


def perturb(symmetry: equinorm.Symmetry, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    symmetry.rescale_(torch.randn(symmetry.num_scales, generator=generator, dtype=torch.float64))


def plain_cycles(symmetry: equinorm.Symmetry, budget: float) -> tuple[int, float, float]:
    """Cycles to the tolerance, the seconds they took, and the imbalance reached; stops when the budget is spent."""
    start = time.perf_counter()
    chosen = layouts(symmetry, 2.0, 1.0, lambda w: w.multiplicative)
    objective = Objective(symmetry.num_scales, 2.0, chosen, torch.float64, torch.device("cpu"))
    objective.load(symmetry.tensor)
    cycle = Cycle(objective, symmetry.birth)
    s = torch.zeros(symmetry.num_scales, dtype=torch.float64)
    checking, count, gap = 0.0, 0, float("inf")
    while gap > TOLERANCE and time.perf_counter() - start - checking < budget:
        s = cycle.run(s)
        count += 1
        before = time.perf_counter()
        gap = float(imbalance(objective.at(s), objective.free))
        checking += time.perf_counter() - before  # a user would not look after every cycle
    return count, time.perf_counter() - start - checking, gap


# -- showing -----------------------------------------------------------------------------------------------------------


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table_of(rows: list[BalanceCost]) -> Table:
    table = Table(title=f"seconds: median (least-most) of {len(rows[0].trace)}", title_justify="left")
    table.add_column("network", no_wrap=True)
    for head in (
        "free scales",
        "trace s",
        "balance s",
        "imbalance",
        "norm",
        "plain cycles",
        "cycles s",
        "cycles / balance",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for r in rows:
        reached = r.cycles_imbalance <= TOLERANCE
        ratio = r.cycles_seconds / statistics.median(r.balance)
        table.add_row(
            r.network,
            f"{r.scales:,}",
            spread(r.trace),
            spread(r.balance),
            f"{r.imbalance:.0e}" + ("" if r.converged else " !"),
            f"{r.norm_before:.4g} to {r.norm_after:.4g}",
            f"{r.cycles:,}" if reached else f"over {r.cycles:,} ({r.cycles_imbalance:.0e})",
            f"{r.cycles_seconds:.1f}",
            f"{ratio:.1f}" if reached else f"over {ratio:.1f}",
        )
    return table
