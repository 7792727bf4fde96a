"""Chains of linear layers and ReLUs."""

from __future__ import annotations

import itertools

from torch import nn


def chain(*widths: int, bias: bool = True) -> nn.Sequential:
    """A chain of linear layers and ReLUs in float64."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def linears(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]
