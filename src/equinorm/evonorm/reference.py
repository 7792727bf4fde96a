"""EvoNorm-S0 by its equation, one example and one group of channels after the other."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["evonorm_s0"]


def evonorm_s0(x: Tensor, gamma: Tensor, beta: Tensor, v: Tensor, groups: int, eps: float) -> Tensor:
    """γ x σ(v x) / √(s² + ε) + β (Liu et al. 2020, table 2).

    >>> evonorm_s0(x, norm.weight, norm.bias, norm.v, norm.groups, norm.eps)
    """
    y = torch.empty_like(x)
    size = x.shape[1] // groups
    for n in range(len(x)):
        for g in range(groups):
            members = range(g * size, (g + 1) * size)
            mean = sum(x[n, c].sum() for c in members) / x[n, list(members)].numel()
            square = sum((x[n, c] - mean).square().sum() for c in members) / x[n, list(members)].numel()
            for c in members:
                activated = x[n, c] / (1 + torch.exp(-v[c] * x[n, c]))
                y[n, c] = gamma[c] * activated / (square + eps) ** 0.5 + beta[c]
    return y
