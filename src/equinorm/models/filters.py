"""Arithmetic on filters, the slices of a weight along the axis `dim`: 0, and 1 for transposed convolutions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["centre_filters", "filter_norm"]


def filter_norm(v: Tensor, dim: int = 0) -> Tensor:
    """The Euclidean norm of each filter, kept as axes of size 1."""
    return torch.linalg.vector_norm(v, dim=_within(v, dim), keepdim=True)


def centre_filters(v: Tensor, dim: int = 0) -> Tensor:
    """Each filter minus its mean over inputs and window."""
    return v - v.mean(dim=_within(v, dim), keepdim=True)


def _within(v: Tensor, dim: int) -> list[int]:
    return [axis for axis in range(v.ndim) if axis != dim]
