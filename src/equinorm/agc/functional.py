"""Brock et al. 2021b, equation 3."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_gradients_", "unit_norms"]

LEAST = 1e-6
"""A gradient shorter than this is taken to have this length, so that nothing is divided by zero."""


def unit_norms(x: Tensor) -> Tensor:
    """The length of each unit: of a weight its rows (of a convolution inputs and window), of a vector all of it.

    >>> unit_norms(torch.ones(8, 3, 5, 5)).shape
    torch.Size([8, 1, 1, 1])
    """
    axes = None if x.ndim < 2 else list(range(1, x.ndim))
    return torch.linalg.vector_norm(x, dim=axes, keepdim=True)


@torch.no_grad()
def clip_gradients_(parameters: Iterable[Tensor], clipping: float = 0.01, eps: float = 1e-3) -> None:
    """G_i ← λ ‖W_i‖* / ‖G_i‖ G_i where ‖G_i‖ > λ ‖W_i‖*, with ‖W_i‖* = max(‖W_i‖, ε) and λ = `clipping`.

    >>> loss.backward(); clip_gradients_(model.parameters()); optimizer.step()
    """
    for p in parameters:
        if p.grad is not None:
            longest = clipping * unit_norms(p.detach()).clamp_min(eps)
            p.grad.mul_((longest / unit_norms(p.grad).clamp_min(LEAST)).clamp_max(1.0))
