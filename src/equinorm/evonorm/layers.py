"""The layer that Liu et al. found by search."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["EvoNormS0", "fitting_groups"]


def fitting_groups(channels: int, groups: int) -> int:
    """The largest number of groups, `groups` at most, that divides the channels, as in the authors' program."""
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")
    return next(n for n in range(min(groups, channels), 0, -1) if channels % n == 0)


class EvoNormS0(nn.Module):
    """y = γ x σ(v x) / √(s² + ε) + β, with s² the variance of one example's group of channels (Liu et al. 2020).

    It takes the place of a norm and of the activation behind it, and reads no batch statistics: evaluation is what
    training is. γ, β and v are one number per channel; γ and v start at 1, β at 0. Without an activation it is γ x + β
    alone, as in the authors' program, which uses it in networks with the activation first.

    >>> nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), EvoNormS0(32))
    """

    def __init__(self, num_features: int, groups: int = 32, eps: float = 1e-5, activation: bool = True) -> None:
        super().__init__()
        self.num_features, self.eps = num_features, eps
        self.groups = fitting_groups(num_features, groups)
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.v = nn.Parameter(torch.ones(num_features)) if activation else None

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"EvoNormS0 expects {self.num_features} channels in axis 1, got an input of shape {tuple(x.shape)}"
            )
        shape = (1, -1, *[1] * (x.ndim - 2))
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        gain = self.weight.view(shape)
        if self.v is not None:
            groups = exact.unflatten(1, (self.groups, -1))
            variance = groups.var(list(range(2, groups.ndim)), correction=0, keepdim=True)
            scale = torch.rsqrt(variance + self.eps).expand(*groups.shape[:3], *variance.shape[3:]).flatten(1, 2)
            gain = gain * scale * torch.sigmoid(self.v.view(shape) * exact)
        return (exact * gain + self.bias.view(shape)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, groups={self.groups}{'' if self.v is not None else ', activation=False'}"
