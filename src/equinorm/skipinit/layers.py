"""The scale at the end of a residual branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["BranchScale"]


class BranchScale(nn.Module):
    """y = α x with one learned number α, which starts at `start` (De & Smith 2020; Bachlechner et al. 2020).

    With α = 0 a residual block starts as the identity, so no norm is needed to keep a deep network's scale.

    >>> branch = nn.Sequential(conv, nn.ReLU(), conv, BranchScale(64))
    """

    def __init__(self, num_features: int, start: float = 0.0) -> None:
        super().__init__()
        self.num_features = num_features
        self.alpha = nn.Parameter(torch.tensor(float(start)))

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x

    def affine(self) -> tuple[Tensor, Tensor]:
        """a and c of y = a x + c per channel, in float64."""
        a = self.alpha.double().expand(self.num_features)
        return a, torch.zeros_like(a)

    def extra_repr(self) -> str:
        return f"{self.num_features}"
