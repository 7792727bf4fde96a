"""Normalization propagation: (ReLU(γ W x / ‖W‖ + β) - 1/√(2π)) / √(½ (1 - 1/π)) (Arpit et al. 2016).

Inputs have channels in axis 1; no statistics are computed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.layers import LAYERS
from ..models.parametrized import originals
from ..weightnorm import weight_norm_

__all__ = ["NormalizationPropagation", "PropagatedReLU", "propagated_relu"]

_RELU_MEAN = 1 / math.sqrt(2 * math.pi)
_RELU_STD = math.sqrt((1 - 1 / math.pi) / 2)


def propagated_relu(x: Tensor) -> Tensor:
    """(ReLU(x) - 1/√(2π)) / √(½ (1 - 1/π)): zero mean and unit variance if x is a standard Gaussian.

    Arpit et al. 2016: the moments of a rectified Gaussian in closed form.
    """
    return (F.relu(x) - _RELU_MEAN) / _RELU_STD


class PropagatedReLU(nn.Module):
    """The ReLU of normalization propagation: zero mean and unit variance behind a normalized layer."""

    def forward(self, x: Tensor) -> Tensor:
        return propagated_relu(x)


class NormalizationPropagation(nn.Module):
    """A linear or convolutional layer and its ReLU that hand on zero mean and unit variance, without statistics.

    o = (ReLU(γ W x / ‖W‖ + β) - 1/√(2π)) / √(½ (1 - 1/π)) per filter (Arpit et al. 2016). Normalised
    Gaussian inputs in, normalised outputs out: normalise the data once, over the whole training set.

    `layer` is weight-normed in place: its gain is γ and starts at `gain`, its bias is β and starts at 0; one
    without bias goes without. `gain=1` keeps the variance of activations; 1/1.21 keeps that of gradients instead,
    since the mean squared slope of the function is ½ / (½ (1 - 1/π)) = 1.21². `equinorm.fold` makes the
    weight plain.

    >>> nn.Sequential(NormalizationPropagation(nn.Conv2d(3, 16, 3)), NormalizationPropagation(nn.Conv2d(16, 16, 3)))
    """

    def __init__(self, layer: nn.Module, gain: float = 1.0) -> None:
        super().__init__()
        if not isinstance(layer, LAYERS):
            raise TypeError(f"normalization propagation cannot wrap {layer}: not a linear or convolutional layer")
        report = weight_norm_(layer, layers=[""])
        if not report.applied:
            why = "; ".join(report.skipped.values())
            raise TypeError(f"normalization propagation cannot wrap {layer}: {why}")
        with torch.no_grad():
            originals(layer).original0.fill_(gain)
            if isinstance(layer.bias, Tensor):
                layer.bias.zero_()
        self.layer = layer

    @property
    def wrapped_layer(self) -> nn.Module:
        return self.layer

    def forward(self, x: Tensor) -> Tensor:
        return propagated_relu(self.layer(x))
