"""Energy: how the norm of a network is spread over its layers and columns, and how far it is from balance.

stock2019, figures 6, 7, 9 and 10: the norm of every column before ENorm, the energy of every layer by ENorm cycle, and
the norm of the whole network by cycle and in training. The paper's W_k has inputs as rows and outputs as columns, so a
column is what enters one unit: a filter.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..criteria.norm import Objective, layouts
from ..enorm.enorm import ENorm
from ..symmetry import Symmetry, trace
from .probe import Result, by_filter, filters


@dataclass(frozen=True, eq=False)
class LayerEnergy(Result):
    """‖W_k‖_p^p of every weight."""

    names: list[str]
    energy: Tensor
    p: float

    @property
    def norm(self) -> Tensor:
        """The Lp norm of the whole network (stock2019, equation 3)."""
        return self.energy.sum() ** (1 / self.p)


@dataclass(frozen=True, eq=False)
class ColumnEnergy(Result):
    """‖W_k[:, j]‖_p of every column of every weight: what enters each unit."""

    columns: dict[str, Tensor]
    p: float

    @property
    def spread(self) -> dict[str, Tensor]:
        """Largest over smallest column norm of each weight."""
        return {name: norms.amax() / norms.amin() for name, norms in self.columns.items()}


@dataclass(frozen=True, eq=False)
class EnergyByCycle(Result):
    """The energy of every layer before the first ENorm cycle and after each one."""

    names: list[str]
    energy: Tensor  # (cycles + 1) × layers
    norm: Tensor  # of all weights and gains, which never rises with c = 1 (stock2019, figure 9)
    imbalance: Tensor  # largest |log(incoming / outgoing mass)| after each cycle
    p: float


@dataclass(frozen=True, eq=False)
class Imbalance(Result):
    """How far the scales that a parameter writes are from balance: |log(incoming / outgoing mass)|."""

    names: list[str]
    mean: Tensor  # over the scales that the parameter writes
    largest: Tensor

    @property
    def overall(self) -> Tensor:
        return self.largest.amax() if len(self.names) else self.largest.new_zeros(())


def layer_energy(model: nn.Module, p: float = 2.0) -> LayerEnergy:
    """‖W_k‖_p^p of every weight with rows and columns, in the order of registration.

    >>> energy = layer_energy(model); dict(zip(energy.names, energy.energy))
    """
    found = {name: by_filter(w, axis).abs().pow(p).sum() for name, (w, axis) in _weights(model).items()}
    first = next(iter(found.values()))
    return LayerEnergy(list(found), torch.stack([e.to(first) for e in found.values()]), p)


def column_energy(model: nn.Module, p: float = 2.0) -> ColumnEnergy:
    """The Lp norm of every column of every weight (stock2019, figure 6).

    >>> column_energy(model).columns["layers.5.weight"]
    """
    return ColumnEnergy(
        {n: torch.linalg.vector_norm(by_filter(w, axis), p, dim=1) for n, (w, axis) in _weights(model).items()}, p
    )


@torch.no_grad()
def energy_by_cycle(
    model: nn.Module,
    example_inputs: Any = None,
    cycles: int = 20,
    *,
    p: float = 2.0,
    c: float = 1.0,
    symmetry: Symmetry | None = None,
) -> EnergyByCycle:
    """Run ENorm cycles on a copy of the model and measure every layer after each (stock2019, figures 7 and 9).

    >>> energy_by_cycle(model, x, cycles=50).norm
    """
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    bound = None if symmetry is None else symmetry.bind(twin)
    enorm = ENorm(twin, optimizer, example_inputs, p=p, c=c, bias="plain", symmetry=bound)
    counted = [enorm.symmetry.tensor(w.name) for w in enorm.symmetry.parameters if w.multiplicative]
    energies, norms, gaps = [], [], []
    for cycle in range(cycles + 1):
        if cycle:
            enorm.step()
        energies.append(layer_energy(twin, p).energy)
        powers = [torch.linalg.vector_norm(w.detach(), p, dtype=torch.float64).pow(p).cpu() for w in counted]
        norms.append(torch.stack(powers).sum() ** (1 / p))
        gaps.append(enorm.imbalance())
    names = layer_energy(twin, p).names
    return EnergyByCycle(names, torch.stack(energies), torch.stack(norms), torch.tensor(gaps), p)


@torch.no_grad()
def imbalance_by_layer(
    model: nn.Module, example_inputs: Any = None, *, p: float = 2.0, c: float = 1.0, symmetry: Symmetry | None = None
) -> Imbalance:
    """|log(incoming / outgoing mass)| of the scales that each weight or gain writes; 0 everywhere at the optimum.

    Scales with mass on one side only (dead units) are left out, as in `equinorm.balance_`.

    >>> found = imbalance_by_layer(model, x); dict(zip(found.names, found.largest))
    """
    symmetry = trace(model, example_inputs) if symmetry is None else symmetry.bind(model)
    n = symmetry.num_scales
    objective = Objective(n, p, layouts(symmetry, p, c, lambda w: w.multiplicative), torch.float64, torch.device("cpu"))
    objective.load(symmetry.tensor)
    point = objective.at(torch.zeros(n, dtype=torch.float64))
    both = (point.up > 0) & (point.down > 0)
    gap = torch.where(both, (point.up / point.down).log().abs(), 0.0)
    names, means, largest = [], [], []
    for w in symmetry.moving:
        if not w.multiplicative or w.out is None:
            continue
        written = w.out.index.unique()
        written = written[written < n]
        written = written[both[written]]
        if len(written):
            names.append(w.name)
            means.append(gap[written].mean())
            largest.append(gap[written].amax())
    empty = torch.zeros(0, dtype=torch.float64)
    return Imbalance(names, torch.stack(means) if names else empty, torch.stack(largest) if names else empty)


def _weights(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    found = filters(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no parameter with rows and columns, so no layer to measure")
    return found


__all__ = [
    "ColumnEnergy",
    "EnergyByCycle",
    "Imbalance",
    "LayerEnergy",
    "column_energy",
    "energy_by_cycle",
    "imbalance_by_layer",
    "layer_energy",
]
