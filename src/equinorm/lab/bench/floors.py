"""How long tracing takes beside `torch.export` alone, and how long `balance_` takes after it; beside what is aimed at.

    equinorm bench balance --device cuda                       these numbers, on that device
    python -m equinorm.lab.bench.floors --device cuda          the same where there is nothing but torch, numpy and PIL

The networks are the laboratory's own, with random weights (seed 0), biases and no norm, as after folding; nothing
is read from a file. What is counted:

- **export**: `torch.export.export(model, (x,), strict=False)`, which does not run the model.
- **trace**: `equinorm.trace(model, x, verify=False)`. The two take turns, and so do their minima and medians.
- **balance**: the whole call `equinorm.balance_(model, symmetry=symmetry)`: reading the weights, the optimum to an
  imbalance below 1e-8, the multiplication of all weights and both norms of the report. Before it every free scale is
  multiplied by exp(N(0, 1)), which is not counted.

Before anything is timed, a small network is traced and balanced on the device, so that what is loaded once is loaded.
On a CUDA device the clock is read when the device has nothing left to do.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import equinorm

from ...errors import UserError
from ..nets import build
from ..training.trainer import chosen_device
from .facts import facts, save
from .llama import Llama

__all__ = ["NETWORKS", "FloorCost", "measure", "network_names", "table"]

TOLERANCE = 1e-8
RATIO = 1.5  # that tracing may take of torch.export alone


def image_net(name: str, device: torch.device, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = build(name, classes=1000, in_shape=(3, 224, 224), norm="none", bias=True, **options)
    return model.eval().to(device), torch.zeros(1, 3, 224, 224, device=device)


def llama(device: torch.device) -> tuple[nn.Module, Tensor]:
    """1.1 billion parameters, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        return Llama().eval(), torch.zeros(1, 16, dtype=torch.int64)


@dataclass(frozen=True)
class FloorNetwork:
    make: Callable[[torch.device], tuple[nn.Module, Tensor]]
    seconds: dict[str, float]  # aimed at for `balance_`, by the type of the device


NETWORKS = {
    "resnet18": FloorNetwork(partial(image_net, "resnet18"), {"cpu": 0.2}),
    "resnet50": FloorNetwork(partial(image_net, "resnet50"), {"cpu": 0.8, "cuda": 0.1}),
    "vgg16": FloorNetwork(partial(image_net, "vgg", head="fc"), {"cpu": 1.5}),
    "llama-1.1B": FloorNetwork(llama, {"cuda": 1.0}),
}


def network_names(device: torch.device, asked: Collection[str] = ()) -> list[str]:
    """Those that were asked for; if none was named, all but what is for a GPU on a CPU."""
    if asked:
        return [name for name in NETWORKS if name in asked]
    return [name for name, network in NETWORKS.items() if device.type != "cpu" or "cpu" in network.seconds]


@dataclass(frozen=True)
class FloorCost:
    """Seconds, of all repeats."""

    network: str
    device: str
    parameters: int
    scales: int
    export: list[float]
    trace: list[float]
    balance: list[float]
    iterations: list[int]
    imbalance: float  # the largest of all repeats
    converged: bool
    norm_before: float  # medians
    norm_after: float
    floor: float | None

    @property
    def ratio(self) -> float:
        return min(self.trace) / min(self.export)


def measure(name: str, device: torch.device, repeats: int) -> FloorCost:
    model, example = NETWORKS[name].make(device)
    exports: list[float] = []
    traces: list[float] = []
    for _ in range(repeats):
        exports.append(_seconds(device, lambda: torch.export.export(model, (example,), strict=False))[0])
        seconds, symmetry = _seconds(device, lambda: equinorm.trace(model, example, verify=False))
        traces.append(seconds)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    balances: list[float] = []
    reports: list[equinorm.BalanceReport] = []
    for repeat in range(repeats):
        model.load_state_dict(start)
        generator = torch.Generator().manual_seed(repeat)
        symmetry.rescale_(torch.randn(symmetry.num_scales, generator=generator, dtype=torch.float64))
        balance = partial(equinorm.balance_, model, symmetry=symmetry, tol=TOLERANCE)
        seconds, report = _seconds(device, balance)
        balances.append(seconds)
        reports.append(report)
    return FloorCost(
        network=name,
        device=str(device),
        parameters=sum(p.numel() for p in model.parameters()),
        scales=symmetry.num_scales,
        export=exports,
        trace=traces,
        balance=balances,
        iterations=[r.iterations for r in reports],
        imbalance=max(r.imbalance for r in reports),
        converged=all(r.converged for r in reports),
        norm_before=statistics.median(r.norm_before for r in reports),
        norm_after=statistics.median(r.norm_after for r in reports),
        floor=NETWORKS[name].seconds.get(device.type),
    )


def _seconds(device: torch.device, function: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()  # not while the clock runs
    _wait(device)
    start = time.perf_counter()
    result = function()
    _wait(device)
    return time.perf_counter() - start, result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(device: torch.device) -> None:
    """Load what is loaded once: libraries of the device, torch.export, the rules."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 200), nn.ReLU())
    model = model.append(nn.Linear(200, 200)).to(device)
    example = torch.zeros(1, 3, 8, 8, device=device)
    torch.export.export(model, (example,), strict=False)
    equinorm.balance_(model, example, verify=False)
    _wait(device)


# -- showing -----------------------------------------------------------------------------------------------------------

_HEADS = ("network", "parameters", "scales", "export s", "trace s", "ratio", "balance s", "floor", "iterations")


def table(rows: Sequence[FloorCost]) -> str:
    """Plain text: least and median of the repeats, the ratio of the least, and whether floors are reached."""
    lines = [_HEADS, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADS))]
    shown = ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    n = len(rows[0].export) if rows else 0
    said = [
        f"seconds: least (median) of {n}, on {rows[0].device if rows else 'no device'}",
        f"ratio: trace / export, the least of each; at most {RATIO} is aimed at. balance: the whole call after",
        f"tracing, to an imbalance of {TOLERANCE:g}, scales perturbed by exp(N(0, 1)); the least beside the floor.",
    ]
    return "\n".join([*said, "", *shown, ""])


def _cells(row: FloorCost) -> tuple[str, ...]:
    least = min(row.balance)
    floor = "" if row.floor is None else f"{row.floor:g} {'reached' if least <= row.floor else 'MISSED'}"
    return (
        row.network,
        f"{row.parameters:,}",
        f"{row.scales:,}",
        _spread(row.export),
        _spread(row.trace),
        f"{row.ratio:.2f}{' (more than aimed at)' if row.ratio > RATIO else ''}",
        _spread(row.balance) + ("" if row.converged else f", NOT at the optimum: {row.imbalance:.0e}"),
        floor,
        f"{statistics.median(row.iterations):g}",
    )


def _spread(seconds: Sequence[float]) -> str:
    return f"{min(seconds):.3f} ({statistics.median(seconds):.3f})"


def main(arguments: Sequence[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="equinorm.lab.bench.floors", description=__doc__, formatter_class=raw)
    parser.add_argument("--device", help="cuda if there is one")
    parser.add_argument("--only", action="append", default=[], choices=NETWORKS, help="only this network; repeat it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("out/bench"), help="where the log and the json are written")
    options = parser.parse_args(arguments)
    device = chosen_device(options.device)
    about, rows = facts(device), []
    warm_up(device)
    for name in network_names(device, options.only):
        rows.append(measure(name, device, options.repeats))
        print(f"{name}: {dict(zip(_HEADS, _cells(rows[-1]), strict=True))}", flush=True)
        # each network anew: an interrupt loses nothing
        written = save(options.output, f"bench_floors_{device.type}", table(rows), rows, about)
    print(f"\n{table(rows)}\nWritten: {', '.join(map(str, written))}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"equinorm: {error}")
