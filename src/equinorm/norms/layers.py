"""Norms of activations that weight-based methods are compared or combined with.

=============================  ===========================================================  =====================
layer                          what it does                                                 source
=============================  ===========================================================  =====================
MeanOnlyBatchNorm1d, 2d, 3d    x - μ_batch + b                                              Salimans & Kingma 2016
FilterResponseNorm, TLU        γ x / √(ν² + ε) + β, then max(·, τ)                          Singh & Krishnan 2019
BatchRenorm1d, 2d, 3d          γ ((x - μ_batch) / σ_batch · r + d) + β                      Ioffe 2017
=============================  ===========================================================  =====================

All take inputs with channels in axis 1, put out the input's dtype, compute statistics in float32 at least, and
read no value on the host, so a compiled model is not recompiled from step to step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "BATCH_RENORM_DEFAULTS",
    "TLU",
    "BatchRenorm",
    "BatchRenorm1d",
    "BatchRenorm2d",
    "BatchRenorm3d",
    "FilterResponseNorm",
    "MeanOnlyBatchNorm",
    "MeanOnlyBatchNorm1d",
    "MeanOnlyBatchNorm2d",
    "MeanOnlyBatchNorm3d",
]


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """[C] -> [1, C, 1, ...], to meet x."""
    return values.view(1, -1, *[1] * (x.ndim - 2))


def _all_but_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.ndim) if axis != 1]


class _ChannelNorm(nn.Module):
    """What has one value per channel, and inputs of one of the numbers of axes that its class was made with."""

    axes: tuple[int, ...] = (2, 3, 4, 5)

    def __init_subclass__(cls, axes: tuple[int, ...] | None = None) -> None:
        super().__init_subclass__()
        cls.axes = axes or cls.axes

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def _check(self, x: Tensor) -> None:
        if x.ndim not in self.axes or x.shape[1] != self.num_features:
            raise ValueError(
                f"{type(self).__name__} expects {' or '.join(map(str, self.axes))} axes and {self.num_features} "
                f"channels in axis 1, got an input of shape {tuple(x.shape)}"
            )

    def extra_repr(self) -> str:
        return f"{self.num_features}"


# Mean-only batch norm


class MeanOnlyBatchNorm(_ChannelNorm):
    """y = x - μ + b, with μ the mean over the batch while training and its running average otherwise.

    Salimans & Kingma 2016: made to go with weight norm, which takes care of the variance.
    `momentum`, the weight of the newest batch, is torch's; `None` averages over all batches alike.
    """

    running_mean: Tensor
    num_batches_tracked: Tensor

    def __init__(self, num_features: int, momentum: float | None = 0.1, bias: bool = True) -> None:
        super().__init__(num_features)
        self.momentum = momentum
        self.bias = nn.Parameter(torch.zeros(num_features)) if bias else None
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        if self.training:
            mean = _exact(x).mean(_all_but_channels(x))
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                batches = self.num_batches_tracked.to(mean.dtype)
                newest = batches.reciprocal() if self.momentum is None else self.momentum
                self.running_mean.add_(newest * (mean - self.running_mean))
        else:
            mean = self.running_mean
        shift = -mean if self.bias is None else self.bias - mean
        return (x + _per_channel(shift, x)).to(x.dtype)


class MeanOnlyBatchNorm1d(MeanOnlyBatchNorm, axes=(2, 3)): ...


class MeanOnlyBatchNorm2d(MeanOnlyBatchNorm, axes=(4,)): ...


class MeanOnlyBatchNorm3d(MeanOnlyBatchNorm, axes=(5,)): ...


# Filter response norm


class FilterResponseNorm(_ChannelNorm):
    """y = γ x / √(ν² + ε) + β, with ν² the mean of x² over one example's channel; no batch statistics.

    Singh & Krishnan 2019, with their constants. To be followed by a `TLU`, since nothing centres y. Inputs are
    [N, C, ...]. Where the map is 1×1, or there is none ([N, C]), x / √ν² is a bare sign: `learnable_eps=True`
    then makes ε = `eps` + |ε_l| with a parameter ε_l per channel that starts at 1e-4.

    >>> nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), FilterResponseNorm(32), TLU(32))
    """

    def __init__(self, num_features: int, eps: float = 1e-6, learnable_eps: bool = False) -> None:
        super().__init__(num_features)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.eps_l = nn.Parameter(torch.full((num_features,), 1e-4)) if learnable_eps else None

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        exact = _exact(x)
        squares = exact.square()
        if x.ndim > 2:
            squares = squares.mean(list(range(2, x.ndim)), keepdim=True)
        if self.eps_l is not None:
            squares = squares + _per_channel(self.eps_l.abs(), x)
        gain = _per_channel(self.weight, x) * torch.rsqrt(squares + self.eps)
        return (exact * gain + _per_channel(self.bias, x)).to(x.dtype)


class TLU(_ChannelNorm):
    """max(y, τ) with a threshold τ per channel, a parameter that starts at 0 (Singh & Krishnan 2019)."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.threshold = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        return torch.maximum(x, _per_channel(self.threshold, x).to(x.dtype))


# Batch renormalization


class BatchRenorm(_ChannelNorm):
    """Batch norm whose training output is, up to clipping, what evaluation would give (Ioffe 2017).

    y = γ ((x - μ_B) / σ_B · r + d) + β with σ_B = √(ε + var_B) and, not differentiated through,

        r = clip(σ_B / σ, 1/r_max, r_max),    d = clip((μ_B - μ) / σ, -d_max, d_max),

    where μ and σ are running averages of μ_B and σ_B, in which the newest batch has weight `momentum`. Plain
    batch norm (r_max 1, d_max 0) at first; `r_schedule` and `d_schedule` are the steps between which the
    limits rise linearly to `r_max` and `d_max`. Limits and steps are by default those of Ioffe 2017, which are for a
    long run: scale the steps to yours. `eps` and `momentum` are the defaults of TensorFlow's batch renorm.
    """

    running_mean: Tensor
    running_std: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-3,
        momentum: float = 0.01,
        r_max: float = 3.0,
        d_max: float = 5.0,
        r_schedule: tuple[int, int] = (5_000, 40_000),
        d_schedule: tuple[int, int] = (5_000, 25_000),
        affine: bool = True,
    ) -> None:
        super().__init__(num_features)
        if r_max < 1 or d_max < 0:
            raise ValueError(f"limits must be r_max ≥ 1 and d_max ≥ 0, got {r_max} and {d_max}")
        for schedule in (r_schedule, d_schedule):
            if not 0 <= schedule[0] <= schedule[1]:
                raise ValueError(f"a schedule is (first, last) step with 0 ≤ first ≤ last, got {schedule}")
        self.eps, self.momentum, self.r_max, self.d_max = eps, momentum, r_max, d_max
        self.r_schedule, self.d_schedule = r_schedule, d_schedule
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_std", torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def limits(self) -> tuple[Tensor, Tensor]:
        """(r_max, d_max) of the next training step."""
        return 1 + (self.r_max - 1) * self._risen(self.r_schedule), self.d_max * self._risen(self.d_schedule)

    def _risen(self, schedule: tuple[int, int]) -> Tensor:
        """0 up to the first step of the schedule, 1 from the last one on, linear between."""
        first, last = schedule
        steps = (self.num_batches_tracked - first).to(self.running_mean.dtype)
        return (steps / (last - first)).clamp(0.0, 1.0) if last > first else (steps >= 0).to(steps.dtype)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        if not self.training:
            gain, shift = 1 / self.running_std, -self.running_mean / self.running_std
        else:
            variance, mean = torch.var_mean(_exact(x), dim=_all_but_channels(x), correction=0)
            std = torch.sqrt(variance + self.eps)
            with torch.no_grad():
                r_max, d_max = self.limits()
                r = torch.minimum(torch.maximum(std / self.running_std, 1 / r_max), r_max)
                d = torch.minimum(torch.maximum((mean - self.running_mean) / self.running_std, -d_max), d_max)
                self.running_mean.add_(self.momentum * (mean - self.running_mean))
                self.running_std.add_(self.momentum * (std - self.running_std))
                self.num_batches_tracked.add_(1)
            gain, shift = r / std, d - mean * r / std
        if self.weight is not None and self.bias is not None:
            gain, shift = gain * self.weight, shift * self.weight + self.bias
        return (x * _per_channel(gain, x) + _per_channel(shift, x)).to(x.dtype)


class BatchRenorm1d(BatchRenorm, axes=(2, 3)): ...


class BatchRenorm2d(BatchRenorm, axes=(4,)): ...


class BatchRenorm3d(BatchRenorm, axes=(5,)): ...


BATCH_RENORM_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        parameter.name: parameter.default
        for parameter in inspect.signature(BatchRenorm).parameters.values()
        if parameter.name not in ("num_features", "affine")
    }
)
"""The settings of `BatchRenorm` and their defaults, for whoever offers them: eps, momentum, limits and schedules."""
