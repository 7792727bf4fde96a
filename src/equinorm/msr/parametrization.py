"""W = e^g · V as a parametrization in torch's sense, `torch.nn.utils.parametrize`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..launch import dense, kernels
from ..models.filters import filter_norm
from ..models.parametrized import dtype_in_use

__all__ = ["ScaledKernel"]


class ScaledKernel(nn.Module):
    """W = e^g · V with a scalar g per filter (ruff2020, section 3.1), for `torch.nn.utils.parametrize`.

    V is stored as the parametrization's `original`, which is the weight's own parameter object. A weight that
    is assigned is taken apart: V gets length 1, g the logarithm of what it had; a filter of zeros stays one.
    `centred=False` is for the first layer: `MeanShiftRejection` leaves the mean of its gradient alone.

    On CUDA W is made in the precision in which it is used, see `models.parametrized.dtype_in_use`.
    """

    holds_length = True  # LUMA takes the place of weight decay on V

    def __init__(self, weight: Tensor, centred: bool = True) -> None:
        super().__init__()
        self.centred = centred
        g = torch.zeros_like(weight[(slice(None),) + (slice(0, 1),) * (weight.ndim - 1)])
        self.g = nn.Parameter(g.contiguous(), requires_grad=weight.requires_grad)

    def forward(self, V: Tensor) -> Tensor:
        fused = kernels("equinorm.msr.kernels", V, self.g) if dense(V) else None
        return self.g.exp() * V if fused is None else fused.scaled_kernel(V, self.g, dtype_in_use(V))

    def right_inverse(self, weight: Tensor) -> Tensor:
        norm = filter_norm(weight)
        norm = torch.where(norm > 0, norm, 1.0)
        self.g.data.copy_(norm.log())
        return weight / norm
