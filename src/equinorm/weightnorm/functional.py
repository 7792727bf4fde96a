"""The equation of the weight norm family; `equinorm.weightnorm.kernels` is its twin on CUDA."""

from __future__ import annotations

import math

from torch import Tensor

from ..models.filters import centre_filters, filter_norm

__all__ = ["normalized_filters"]


def normalized_filters(
    v: Tensor, g: Tensor | None, dim: int = 0, *, scale: float = 1.0, centred: bool = False, eps: float | None = None
) -> Tensor:
    """scale · g · c / ‖c‖ per filter, c = v or v - v̄; with `eps` c / (σ + ε) in place of c / ‖c‖, σ² the mean of c².

    >>> w = normalized_filters(v, g)                                      # weight norm
    >>> w = normalized_filters(v, None, centred=True, eps=1e-5)           # weight standardization
    """
    c = centre_filters(v, dim) if centred else v
    length = filter_norm(c, dim)
    if eps is not None:
        length = length / math.sqrt(v.numel() / v.shape[dim]) + eps
    return (scale if g is None else scale * g) / length * c
