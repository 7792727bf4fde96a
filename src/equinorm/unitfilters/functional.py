"""The mathematics of unit filters: back to the sphere, along the sphere, and orthogonalized updates.

A filter is a slice of a weight along its first axis, `w[i]` of a linear layer or a convolution; along the second one
(`dim=1`) of a transposed convolution. Its length is its Euclidean norm over all that is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "NEWTON_SCHULZ",
    "Filters",
    "Over",
    "mean_over",
    "orthogonalize",
    "project_",
    "project_all_",
    "tangent_all_",
]

Over = Literal["filter", "window"]
"""What the mean is taken over that zero-mean filters lose: all of a filter, or the window of each input channel."""

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""a, b, c of s ← as + bs³ + cs⁵ (Jordan 2024, Muon): as steep at zero as it can be, at the price of not ending at 1."""

_SMALLEST_LENGTH = 1e-30
"""Shorter filters are divided by this: one of zeros stays one."""
_ROUNDING = 16.0
"""In units of the dtype's precision: what the mean leaves of a constant filter is rounding, and no direction."""
_SMALLEST_GRADIENT = 1e-12
"""Matrices of a smaller norm are divided by this: the squares of what is smaller still may be zero."""


# -- the sphere --------------------------------------------------------------------------------------------------------


class Filters(NamedTuple):
    """A weight, and what its filters are."""

    weight: Tensor
    dim: int = 0
    """The axis of the filters."""
    over: Over | None = None
    """What zero-mean filters lose their mean over; None for others."""

    @property
    def within(self) -> tuple[int, ...]:
        """The axes of one filter."""
        return tuple(axis for axis in range(self.weight.ndim) if axis != self.dim)

    @property
    def mean_axes(self) -> tuple[int, ...]:
        """The axes of the mean that filters lose, none if they keep it. A window of one point has nothing to lose."""
        if self.over is None:
            return ()
        if self.over == "filter":
            return self.within
        return tuple(range(2, self.weight.ndim)) if math.prod(self.weight.shape[2:]) > 1 else ()


def mean_over(zero_mean: bool | Over) -> Over | None:
    """What `zero_mean=` says: True is "filter", False is None.

    >>> mean_over(True)
    'filter'
    """
    if isinstance(zero_mean, bool):
        return "filter" if zero_mean else None
    if zero_mean not in ("filter", "window"):
        raise ValueError(f'zero_mean is True, False, "filter" or "window", got {zero_mean!r}')
    return zero_mean


@torch.no_grad()
def project_(weight: Tensor, zero_mean: bool = False, *, over: Over = "filter", dim: int = 0) -> Tensor:
    """w ← w / ‖w‖ for every filter, in place; with `zero_mean` each loses its mean first. A filter of zeros stays one.

    The mean is over inputs and window, or with `over="window"` over the window for each input channel, as in mean
    shift rejection (ruff2020, section 3.2).

    >>> project_(conv.weight)
    """
    project_all_([Filters(weight, dim, over if zero_mean else None)])
    return weight


@torch.no_grad()
def project_all_(filters: Sequence[Filters]) -> None:
    """`project_` for many weights: about two launches for each, and nothing is read on the host."""
    lengths = []
    for one in filters:
        if not one.mean_axes:
            lengths.append(_length(one))
            continue
        before = _length(one)
        one.weight.sub_(one.weight.mean(one.mean_axes, keepdim=True))
        length = _length(one)
        directed = length > _ROUNDING * torch.finfo(one.weight.dtype).eps * before
        lengths.append(length.where(directed, math.inf))
    if lengths:
        torch._foreach_clamp_min_(lengths, _SMALLEST_LENGTH)
        torch._foreach_div_([one.weight for one in filters], lengths)


def _length(one: Filters) -> Tensor:
    exact = torch.promote_types(one.weight.dtype, torch.float32)
    return torch.linalg.vector_norm(one.weight, dim=one.within, keepdim=True, dtype=exact)


@torch.no_grad()
def tangent_all_(filters: Sequence[Filters]) -> None:
    """∇w ← ∇w - (∇w·w / w·w) w for every filter that has a gradient: what is left points along the sphere.

    Zero-mean filters' gradients lose their means too: that is the tangent space of the zero-mean sphere.

    >>> tangent_all_([Filters(conv.weight)])
    """
    for one in filters:
        weight, gradient = one.weight, one.weight.grad
        if gradient is None:
            continue
        if one.mean_axes:
            gradient.sub_(gradient.mean(one.mean_axes, keepdim=True))
        exact = torch.promote_types(weight.dtype, torch.float32)
        w, g = weight.to(exact), gradient.to(exact)
        radial = (g * w).sum(one.within, keepdim=True) / (w * w).sum(one.within, keepdim=True).clamp_min(
            _SMALLEST_LENGTH
        )
        gradient.copy_(g - radial * w)


# -- orthogonalization -------------------------------------------------------------------------------------------------


@torch.no_grad()
def orthogonalize(matrix: Tensor, steps: int = 3) -> Tensor:
    """U f(Σ/‖Σ‖) Vᵀ for matrix = UΣVᵀ, where f brings all but tiny singular values near 1 (Jordan 2024, Muon).

    f is `steps` times the quintic with the coefficients `NEWTON_SCHULZ`, computed by products alone, without Σ:
    X ← aX + (bA + cA²)X with A = XXᵀ. After three steps singular values above 0.02 of the matrix' Euclidean norm lie
    in [0.68, 1.21]; smaller ones are multiplied by at most 41. Leading axes of `matrix` are those of a batch.

    On CUDA the products are made in bfloat16 and on a CPU in float32; float64 stays float64 everywhere.

    >>> orthogonalize(gradient.flatten(1))
    """
    a, b, c = NEWTON_SCHULZ
    exact = torch.promote_types(matrix.dtype, torch.float32)
    length = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True, dtype=exact)
    X = (matrix / length.clamp_min_(_SMALLEST_GRADIENT)).to(_product_dtype(matrix))
    X = X.reshape(-1, *matrix.shape[-2:])
    tall = X.shape[-2] > X.shape[-1]  # the smaller of XXᵀ and XᵀX is the cheaper one
    X = X.mT if tall else X
    for _ in range(steps):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    X = X.mT if tall else X
    return X.reshape(matrix.shape).to(matrix.dtype)


def _product_dtype(matrix: Tensor) -> torch.dtype:
    if matrix.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if matrix.is_cuda else torch.float32
