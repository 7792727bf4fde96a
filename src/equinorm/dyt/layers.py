"""The function that takes the place of a norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["DynamicTanh"]


class DynamicTanh(nn.Module):
    """y = γ tanh(α x) + β, with one learned number α and γ and β per channel (Zhu et al. 2025).

    Made for the place of LayerNorm and RMSNorm in transformers, where `axis` is -1. The authors report that it does not
    do for BatchNorm in classic convolutional networks; here channels in axis 1 are for that comparison. α starts at
    `alpha`: 0.5 but in large language models, where the paper searches for it.

    >>> DynamicTanh(768, axis=-1)
    """

    def __init__(self, num_features: int, alpha: float = 0.5, axis: int = 1) -> None:
        super().__init__()
        self.num_features, self.axis = num_features, axis
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[self.axis] != self.num_features:
            raise ValueError(
                f"DynamicTanh expects {self.num_features} channels in axis {self.axis}, got an input of shape "
                f"{tuple(x.shape)}"
            )
        shape = [1] * x.ndim
        shape[self.axis] = -1
        y = torch.tanh(self.alpha * x) * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, axis={self.axis}"
