"""Fixup (Zhang et al. 2019): residual networks without norms, by their start and a few scalars."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .chain import named
from .fused import Residual

__all__ = ["Scalar", "Scale", "fixup_", "with_scalars"]


class Scalar(nn.Module):
    """x + b with one learned number b, which starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Scale(nn.Module):
    """a x with one learned number a, which starts at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def with_scalars(branch: nn.Sequential) -> nn.Sequential:
    """The branch with a scalar bias before each convolution and activation, and a scale and a bias at its end."""
    parts: dict[str, nn.Module] = {}
    for name, part in branch.named_children():
        parts[f"before_{name}"] = Scalar()
        parts[name] = part
    return named(**parts, scale=Scale(), after=Scalar())


@torch.no_grad()
def fixup_(model: nn.Module, classifier: nn.Module) -> None:
    """The start of section 3 (here for branches of m convolutions, L branches):

    1. the classifier and the last convolution of every branch are 0;
    2. the other convolutions of branches have He's start times L^(-1/(2m - 2)).

    What is in no branch keeps the start it has. In the authors' program He's start counts outputs, "he_fan_out".
    """
    branches = [module.branch for module in model.modules() if isinstance(module, Residual)]
    if not branches:
        raise ValueError("Fixup is for residual networks; this model has no residual branch")
    for branch in branches:
        *others, last = [module for module in branch.modules() if isinstance(module, nn.Conv2d)]
        for conv in others:
            out = conv.kernel_size[0] * conv.kernel_size[1] * conv.out_channels
            std = math.sqrt(2 / out) * len(branches) ** (-1 / (2 * len(others)))
            nn.init.normal_(conv.weight, std=std)
        nn.init.zeros_(last.weight)
    for parameter in classifier.parameters():
        parameter.zero_()
