"""Mean shift and covariate shift: the means of channels by depth and time, and of kernels over their windows.

defazio2018 and ruff2020 both blame the mean: activations after a ReLU are positive, so a channel's mean travels on and
adds up. ruff2020's cure is kernels that sum to zero over their window, which do not see a constant (`kernel_means`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .probe import Result, by_filter, channel_axis, filters, layers, run, watching, wider


@dataclass(frozen=True, eq=False)
class ChannelMeans(Result):
    """Mean and standard deviation of every channel of every layer's output, over the batch and all positions."""

    means: dict[str, Tensor]
    deviations: dict[str, Tensor]

    @property
    def share(self) -> dict[str, Tensor]:
        """Part of each layer's energy that is mean: Σ mean² / Σ (mean² + variance); 1 is a constant signal."""
        found = {}
        for name, mean in self.means.items():
            common, varying = mean.square().sum(), self.deviations[name].square().sum()
            found[name] = common / (common + varying).clamp_min(torch.finfo(common.dtype).tiny)
        return found


@dataclass(frozen=True, eq=False)
class Drift(Result):
    """How far the channel means of each layer have moved, in units of the layer's standard deviation."""

    names: list[str]
    drift: Tensor


@dataclass(frozen=True, eq=False)
class KernelMeans(Result):
    """Window means of spatial kernels, one per filter and input channel."""

    means: dict[str, Tensor]  # filters × channels
    share: dict[str, Tensor]  # part of the kernel's energy that its window means hold; 0 rejects a mean shift


def channel_means(model: nn.Module, inputs: Any) -> ChannelMeans:
    """Mean and deviation of every channel of every layer's output.

    >>> channel_means(model, x).share                                  # how much of the signal is mean, by depth
    """
    means: dict[str, Tensor] = {}
    deviations: dict[str, Tensor] = {}

    def look(name: str, layer: nn.Module, _: Any, output: Tensor) -> None:
        values = output.detach().to(wider(output.dtype)).movedim(channel_axis(layer, output), 0).flatten(1)
        variance, mean = torch.var_mean(values, 1, correction=0)
        means[name], deviations[name] = mean, variance.sqrt()

    with torch.no_grad(), watching(layers(model), look):
        run(model, inputs)
    return ChannelMeans(means, deviations)


def drift(before: ChannelMeans, after: ChannelMeans) -> Drift:
    """‖mean_after - mean_before‖ / ‖deviation_before‖ of each layer: the covariate shift between two moments.

    Measure both on the same inputs: `drift(channel_means(model, x), channel_means(model_later, x))`.
    """
    names = [name for name in before.means if name in after.means]
    if not names:
        raise ValueError("the two measurements have no layer in common")
    parts = []
    for name in names:
        size = torch.linalg.vector_norm(before.deviations[name])
        moved = torch.linalg.vector_norm(after.means[name] - before.means[name])
        parts.append(moved / size.clamp_min(torch.finfo(size.dtype).tiny))
    return Drift(names, torch.stack([part.to(parts[0]) for part in parts]))


def kernel_means(model: nn.Module) -> KernelMeans:
    """The mean of every spatial kernel over its window (ruff2020, section 3.2).

    share = k Σ mean² / ‖W‖² with k the size of the window: about 1/k for independent weights, 0 for zero-mean kernels.

    >>> kernel_means(model).share
    """
    means, share = {}, {}
    for name, (weight, axis) in filters(model).items():
        window = math.prod(weight.shape[2:])
        if weight.ndim < 3 or window == 1:
            continue
        kernels = by_filter(weight, axis).unflatten(1, (-1, window))
        means[name] = kernels.mean(2)
        total = kernels.square().sum()
        share[name] = window * means[name].square().sum() / total.clamp_min(torch.finfo(total.dtype).tiny)
    return KernelMeans(means, share)


__all__ = ["ChannelMeans", "Drift", "KernelMeans", "channel_means", "drift", "kernel_means"]
