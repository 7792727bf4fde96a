"""Mean shift rejection as a method of `convert`: scaled kernels in the place of kernels and of norms; noise."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import nn

from ..models.kinds import OTHER_NORMS
from ..models.noise import InputNoise
from ..models.plan import Norm, Plan
from ..models.replacing import Parametrization, Roles, parametrize_layers, put_noise
from ..models.surgery import gain_and_offset, shift_outputs_
from ..registry import Method
from .apply import DEFAULT_LOG_GAIN, is_spatial, mean_shift_rejection_, why_not_scale
from .parametrization import ScaledKernel

__all__ = ["METHODS"]

CHAIN_LOG_GAIN = math.log(1.71)
"""Keeps the scale of a chain, where each layer multiplies; in a residual network each block adds to the stream."""


def _plan(
    plan: Plan, log_gain: float | None, init: bool, exclude_first: bool, scale_first: bool, bias: bool, noise: float
) -> None:
    """Scaled kernels; batch norms behind layers go, also behind those that have no scaled kernel."""
    spatial = [call.module for call in plan.layers() if is_spatial(call.module)]
    first = spatial[0] if exclude_first and spatial else None
    if log_gain is None:
        log_gain = DEFAULT_LOG_GAIN if plan.graph.residual_sums else CHAIN_LOG_GAIN

    def why_not(layer: nn.Module) -> str:
        if isinstance(layer, nn.Linear):
            return "a linear layer has no window"
        if layer is first and not scale_first:
            return "the first spatial convolution: it looks at the data"
        return why_not_scale(layer) or ""

    scales_first = exclude_first and scale_first
    apply_ = partial(
        mean_shift_rejection_, exclude_first=scales_first, scale_first=scales_first, log_gain=log_gain, init=init
    )
    scaled = parametrize_layers(plan, Parametrization(ScaledKernel, apply_, why_not))
    for norm in plan.norms:
        if norm.layer is None:
            plan.leave(norm, norm.alone)
        elif norm.layer.path in scaled:
            _drop_for_scaled_kernel(plan, norm, bias)
        elif why := plan.why_not_hand_over(norm):
            plan.leave(norm, why)
        else:
            plan.hand_over(norm, offset=bias)
    if noise:
        put_noise(plan, noise)
    # Where the first convolution is the only one, its norm is all there is to take. (Transformers have such a first
    # one too, and nothing to convert.)
    transformer = any(isinstance(module, OTHER_NORMS) for module in plan.graph.modules.values())
    plan.already += first is not None and not transformer


def _drop_for_scaled_kernel(plan: Plan, norm: Norm, bias: bool) -> None:
    """The kernel's e^g takes the place of the gain; the paper trains as well without offsets (section 6)."""
    assert norm.layer is not None
    layer, offset = norm.layer.module, gain_and_offset(norm.module)[1]
    if bias and offset is not None and not plan.why_no_bias(norm.layer):
        plan.later(partial(shift_outputs_, layer, offset))
    plan.remove(norm, f"{norm.layer.path} has a gain of its own{' and its offset' if bias else ''}")


def _put(model: nn.Module, roles: Roles, *, log_gain: float | None, bias: bool, noise: float, **options: Any) -> None:
    if bias or noise:
        raise ValueError("a net that is built with mean shift rejection has options of its own for bias and noise")
    if log_gain is None:
        log_gain = DEFAULT_LOG_GAIN if roles.branch_ends else CHAIN_LOG_GAIN
    if not mean_shift_rejection_(model, log_gain=log_gain, **options).applied:
        raise ValueError("mean shift rejection needs spatial convolutions besides the first one; this model has none")


METHODS = (
    Method(
        "msr",
        "mean shift rejection",
        "weight",
        "ruff2020",
        mean_shift_rejection_,
        _plan,
        options={
            "log_gain": None,  # what keeps the scale: e^g = 0.5 in residual networks, 1.71 in chains
            "init": True,
            "exclude_first": True,
            "scale_first": False,
            "bias": False,
            "noise": 0.0,
        },
        aliases=("mean_shift_rejection",),
        modules={InputNoise: lambda _: nn.Identity()},
        put=_put,
        biased=False,
    ),
)
