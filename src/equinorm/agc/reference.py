"""Adaptive gradient clipping, one unit after the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["clipped"]


def clipped(weight: Tensor, gradient: Tensor, clipping: float, eps: float) -> Tensor:
    """The gradient after equation 3 of Brock et al. 2021b.

    >>> clipped(layer.weight, layer.weight.grad, 0.01, 1e-3)
    """
    if weight.ndim < 2:
        return clipped(weight.reshape(1, -1), gradient.reshape(1, -1), clipping, eps).reshape(gradient.shape)
    rows = []
    for w, g in zip(weight, gradient, strict=True):
        longest = clipping * max(math.sqrt(float((w * w).sum())), eps)
        length = math.sqrt(float((g * g).sum()))
        rows.append(g * (longest / length) if length > longest else g)
    return torch.stack(rows)
