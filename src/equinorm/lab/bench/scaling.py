"""What ENorm and BatchNorm cost as width, depth and batch grow: ENorm sees the weights, BatchNorm the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from ... import ENorm
from .output import Timing
from .steps import captured, milliseconds

__all__ = ["Point", "draw", "measure", "table"]


@dataclass(frozen=True)
class Point:
    """Milliseconds of a convolutional chain: the step without a norm, what BN adds to it, an ENorm cycle."""

    axis: str
    value: int
    plain: Timing
    batchnorm: Timing
    cycle: Timing

    @property
    def added(self) -> float:
        return self.batchnorm.median - self.plain.median


def points(quick: bool, gpu: bool) -> Iterator[tuple[str, int, dict[str, int]]]:
    middle = {"width": 64 if gpu else 16, "depth": 8, "batch": 128 if gpu else 8}
    if quick:
        middle = {"width": 4, "depth": 2, "batch": 2}
    factors = (0.5, 1, 2) if quick else (0.25, 0.5, 1, 2, 4, 8) if gpu else (0.5, 1, 2, 4)
    for axis in middle:
        for factor in factors:
            value = max(1, int(middle[axis] * factor))
            yield axis, value, {**middle, axis: value}


def chain(width: int, depth: int, norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(depth):
        layers.append(nn.Conv2d(width if i else 3, width, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(width)] if norm else []
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def measure(
    device: torch.device, quick: bool = False, repeats: int = 5, say: Callable[[str], None] = lambda text: None
) -> list[Point]:
    """Chains of 3 x 3 convolutions on 32 x 32 images, one size varied at a time, the rest held."""
    found = []
    gpu = device.type == "cuda"
    for axis, value, size in points(quick, gpu):
        say(f"{axis} {value}")
        x = torch.rand(size["batch"], 3, 32, 32, device=device)
        y = torch.zeros(size["batch"], dtype=torch.int64, device=device)
        steps = {}
        for norm in (False, True):
            torch.manual_seed(0)
            model = chain(size["width"], size["depth"], norm).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

            step = partial(_step, model, optimizer, x, y)
            step()
            steps[norm] = captured(step, device)
            if not norm:
                cycle = captured(ENorm(model, optimizer, x[:1], gradients=False).step, device)
        times = [
            [milliseconds(body, 5 if gpu else 1, device) for body in (steps[False], steps[True], cycle)]
            for _ in range(repeats)
        ]
        found.append(Point(axis, value, *(Timing.of(column) for column in map(list, zip(*times, strict=True)))))
    return found


def table(found: list[Point]) -> Table:
    n = found[0].plain.n
    title = f"3 x 3 convolutions on 32 x 32 images: ms, median (middle half) of {n}, taking turns"
    shown = Table(
        "", "", "step without norm", "BN adds", "ENorm cycle", "cycle / BN", title=title, title_justify="left"
    )
    for point in found:
        ratio = f"{point.cycle.median / point.added:.2f}" if point.added > 0 else ""
        shown.add_row(point.axis, str(point.value), str(point.plain), f"{point.added:.3f}", str(point.cycle), ratio)
    return shown


def draw(found: list[Point], path: Path, hardware: str) -> None:
    """Cost against size, one panel for each of width, depth and batch; both axes logarithmic."""
    from ...diagnostics import style

    title = "ENorm's cost follows the weights, BatchNorm's the activations"
    where = hardware.partition(";")[0]
    caption = f"Chains of 3 x 3 convolutions on 32 x 32 images, one size varied at a time; medians on {where}."
    figure, panels = style.figure(1, 3, title=title, caption=caption, sharey=True)
    for panel, axis in zip(panels, ("width", "depth", "batch"), strict=True):
        chosen = [point for point in found if point.axis == axis]
        sizes = [point.value for point in chosen]
        for number, (label, values) in enumerate(
            {
                "step without a norm": [point.plain.median for point in chosen],
                "BatchNorm adds": [point.added if point.added > 0 else float("nan") for point in chosen],
                "ENorm cycle": [point.cycle.median for point in chosen],
            }.items()
        ):
            panel.plot(sizes, values, label=label if panel is panels[0] else None, **style.line(number))
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel({"width": "channels", "depth": "layers", "batch": "images in a batch"}[axis])
    panels[0].set_ylabel("milliseconds")
    style.finish(panels)
    style.save(figure, path)
