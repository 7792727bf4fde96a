"""EquiNorm as a method of `convert`: its layers take the place of layers and of the norms behind them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..models.graph import Call
from ..models.layers import fans
from ..models.plan import Norm, Plan
from ..models.replacing import fuse_layers
from ..models.surgery import gain_and_offset, torch_layer
from ..registry import Method
from .functional import EPS
from .layers import (
    EquiNormConv1d,
    EquiNormConv2d,
    EquiNormConv3d,
    EquiNormConvTranspose2d,
    EquiNormLayer,
    EquiNormLinear,
)

__all__ = ["METHODS"]

LAYERS: dict[type[nn.Module], Any] = {
    nn.Conv1d: EquiNormConv1d,
    nn.Conv2d: EquiNormConv2d,
    nn.Conv3d: EquiNormConv3d,
    nn.ConvTranspose2d: EquiNormConvTranspose2d,
    nn.Linear: EquiNormLinear,
}


def _plan(plan: Plan, depthwise: bool, balance_signs: bool, **options: Any) -> None:
    def make(call: Call, norm: Norm | None) -> nn.Module | str:
        layer = call.module
        kind = LAYERS.get(torch_layer(layer))
        if kind is None:
            return f"there is no EquiNorm layer for {type(layer).__name__}"
        if fans(layer)[0] < 2:
            return "a fan-in of 1: EquiNorm balances the weights of an output against each other"
        if not depthwise and getattr(layer, "groups", 1) > 1 and layer.in_channels == layer.groups:
            return "a depthwise convolution, with one input channel per output; convert it with depthwise=True"
        return _layer(kind, layer, norm, balance_signs, options)

    fuse_layers(plan, make, lambda module: isinstance(module, EquiNormLayer))
    for call in plan.layers():
        if call.path in plan.converted and any(s not in plan.graph.not_negative for s in call.inputs):
            plan.remark(call.path, "its inputs may be negative, which the method is not made for")


@torch.no_grad()
def _layer(
    kind: Any, plain: nn.Module, norm: Norm | None, balance_signs: bool, options: Mapping[str, Any]
) -> nn.Module:
    """An EquiNorm layer with a layer's weight, and the gain, offset and habits of the norm behind it."""
    given = {name: value for name, value in options.items() if value != "inherit"}
    if norm is None:
        layer: nn.Module = kind.from_plain(plain, **given)
        layer.requires_grad_(plain.weight.requires_grad)  # type: ignore[arg-type]
    else:
        old = norm.module
        if isinstance(old, _BatchNorm):
            given = {"momentum": old.momentum, "track_running_stats": old.track_running_stats, **given}
        if isinstance(old, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized():
            given = {"process_group": old.process_group or dist.group.WORLD, **given}
        gain, offset = gain_and_offset(old)
        layer = kind.from_plain(plain, affine=gain is not None, **given)
        # the bias of the layer had no effect: the norm took the mean off
        for mine, theirs in ((layer.gain, gain), (layer.bias, offset)):
            if isinstance(mine, Tensor) and theirs is not None:
                mine.copy_(theirs)
                mine.requires_grad_(theirs.requires_grad)
    if balance_signs and not layer.weight.is_meta:
        with suppress(ValueError):  # pruned kernels have no signs to balance
            layer.balance_signs_()  # type: ignore[operator]
    return layer


def _plain(layer: nn.Module) -> nn.Module | str:
    assert isinstance(layer, EquiNormLayer)
    if layer.running_mean is None:
        return "it keeps no running statistics, so its weights depend on the batch"
    plain: nn.Module = layer.to_plain()
    return plain


METHODS = (
    Method(
        "equinorm",
        "equilibrium normalization of weights",
        "weight",
        "defazio2018",
        EquiNormConv2d,
        _plan,
        options={
            "stats_fraction": 1.0,
            "two_pass": False,
            "momentum": "inherit",
            "track_running_stats": "inherit",
            "process_group": "inherit",
            "eps": EPS,
            "depthwise": False,
            "balance_signs": True,
        },
        layers={EquiNormLayer: _plain},
        instead=LAYERS,
    ),
)
