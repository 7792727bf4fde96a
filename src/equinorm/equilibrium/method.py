"""EquiNorm as a method of `convert`: its layers take the place of layers and of the norms behind them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..models.graph import Call, Step
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
from .relu import SummingReLU

__all__ = ["METHODS"]

LAYERS: dict[type[nn.Module], Any] = {
    nn.Conv1d: EquiNormConv1d,
    nn.Conv2d: EquiNormConv2d,
    nn.Conv3d: EquiNormConv3d,
    nn.ConvTranspose2d: EquiNormConvTranspose2d,
    nn.Linear: EquiNormLinear,
}


def _plan(plan: Plan, depthwise: bool, balance_signs: bool, pairs: bool, **options: Any) -> None:
    made: dict[str, EquiNormLayer] = {}

    def make(call: Call, norm: Norm | None) -> nn.Module | str:
        layer = call.module
        kind = LAYERS.get(torch_layer(layer))
        if kind is None:
            return f"there is no EquiNorm layer for {type(layer).__name__}"
        if fans(layer)[0] < 2:
            return "a fan-in of 1: EquiNorm balances the weights of an output against each other"
        if not depthwise and getattr(layer, "groups", 1) > 1 and layer.in_channels == layer.groups:
            return "a depthwise convolution, with one input channel per output; convert it with depthwise=True"
        made[call.path] = _layer(kind, layer, norm, balance_signs, options)
        return made[call.path]

    fuse_layers(plan, make, lambda module: isinstance(module, EquiNormLayer))
    for call in plan.layers():
        if call.path in plan.converted and any(s not in plan.graph.not_negative for s in call.inputs):
            plan.remark(call.path, "its inputs may be negative, which the method is not made for")
    if pairs:
        _pair(plan, made)


def _pair(plan: Plan, made: Mapping[str, EquiNormLayer]) -> None:
    """Let ReLUs leave the channel sums of what they put out to the layers that read it, and layers rectify for them.

    `made` are the layers that are to take the place of others. ReLUs are only ever replaced by ReLUs.
    """
    graph = plan.graph
    layers = {path: module for path, module in graph.modules.items() if isinstance(module, EquiNormLayer)}
    layers.update({path: layer for path, layer in made.items() if path in plan.converted})
    fractions: dict[Step, float] = {}  # what is read by layers alone in their calls, and for which part of the batch
    for path, layer in layers.items():
        for call in graph.calls.get(path, []):
            if len(call.inputs) == 1:
                fractions.setdefault(call.inputs[0], layer.stats_fraction)
    relus = {
        path: [(call, max((fractions.get(step, 0.0) for step in call.outputs), default=0.0)) for call in calls]
        for path, calls in graph.calls.items()
        if type(graph.modules[path]) in (nn.ReLU, SummingReLU) and not plan.refused(path, graph.modules[path])
    }
    norms = {norm.layer.path: norm for norm in plan.norms if norm.layer is not None and norm.path in plan.converted}
    followed: set[str] = set()
    for path, layer in layers.items():
        norm, only = norms.get(path), graph.only_call(path)
        if only is None or (norm is not None and norm.tail):
            continue
        outputs = only.outputs if norm is None else [norm.output]
        readers = {reader.calls[-1] if reader.calls else None for step in outputs for reader in graph.readers(step)}
        for relu, calls in relus.items():
            for read, fraction in calls:
                if readers == {read}:
                    plan.later(partial(setattr, layer, "relu_follows", fraction))
                    followed.add(relu)
    for path, calls in relus.items():
        fraction = max(fraction for _, fraction in calls)
        old = graph.modules[path]
        if (fraction or path in followed) and getattr(old, "fraction", None) != fraction:
            plan.swap(path, SummingReLU(old.inplace, fraction).train(old.training))  # type: ignore[arg-type]


@torch.no_grad()
def _layer(
    kind: Any, plain: nn.Module, norm: Norm | None, balance_signs: bool, options: Mapping[str, Any]
) -> EquiNormLayer:
    """An EquiNorm layer with a layer's weight, and the gain, offset and habits of the norm behind it."""
    given = {name: value for name, value in options.items() if value != "inherit"}
    if norm is None:
        layer: EquiNormLayer = kind.from_plain(plain, **given)
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
            layer.balance_signs_()
    return layer


def _plain(layer: nn.Module) -> nn.Module | str:
    assert isinstance(layer, EquiNormLayer)
    if layer.running_mean is None:
        return "it keeps no running statistics, so its weights depend on the batch"
    plain: nn.Module = layer.to_plain()
    return plain


def _plain_relu(relu: nn.Module) -> nn.Module:
    assert isinstance(relu, SummingReLU)
    return nn.ReLU(relu.inplace)


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
            "pairs": False,
        },
        layers={EquiNormLayer: _plain},
        modules={SummingReLU: _plain_relu},
        instead=LAYERS,
    ),
)
