"""Normalization propagation as a method of `convert`: a layer, the norm behind it and their ReLU become one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..models.graph import Call, Step
from ..models.parametrized import originals
from ..models.plan import Norm, Plan
from ..models.replacing import Roles, only_relus
from ..models.surgery import bias_of, describe, outputs_of, replace_module, shift_outputs_
from ..registry import Method
from ..weightnorm.apply import weight_norm_
from ..weightnorm.method import why_no_directions
from .layers import NormalizationPropagation, PropagatedReLU

__all__ = ["METHODS"]


def _plan(plan: Plan, gain: float) -> None:
    norm_after = {norm.layer.path: norm for norm in plan.norms if norm.layer is not None}
    waiting: dict[Step, Call] = {}
    reasons: dict[str, str] = {}
    for call in plan.layers():
        norm, step = norm_after.get(call.path), plan.graph.layer_step(call)
        if isinstance(plan.graph.modules.get(call.path.rpartition(".")[0]), NormalizationPropagation):
            plan.keep(call.path, "it is part of a NormalizationPropagation already", already=True)
        elif why := plan.why_not(call, replace=True) or why_no_directions(call.module):
            reasons[call.path] = why
        elif norm is not None and [type(module) for module in norm.tail.values()] == [nn.ReLU]:
            _propagate(plan, call, norm, gain)
        elif step is not None:
            waiting[norm.output if norm is not None and not norm.tail else step] = call
    relus = only_relus(plan, waiting)
    for path, steps in relus.items():
        for step in steps:
            call = waiting.pop(step)
            _propagate(plan, call, norm_after.get(call.path), gain)
        plan.swap(path, nn.Identity(), "part of the layers before it")
    reasons |= {call.path: "no nn.ReLU follows it that is called nowhere else" for call in waiting.values()}
    for path, why in reasons.items():
        plan.keep(path, why)
    for norm in plan.norms:
        if norm.path not in plan.converted:
            layer = "" if norm.layer is None else norm.layer.path
            plan.leave(norm, norm.alone or f"{layer}, which feeds it, is kept")


def _propagate(plan: Plan, call: Call, norm: Norm | None, gain: float) -> None:
    """Note that a layer, the norm behind it and their ReLU become one module."""
    layer, weight = call.module, call.module.weight
    assert isinstance(weight, Tensor)

    def put() -> None:
        if norm is not None and bias_of(layer) is None:  # β, which the norm had
            zeros = torch.zeros(outputs_of(layer), device=weight.device, dtype=weight.dtype)
            shift_outputs_(layer, zeros.requires_grad_(weight.requires_grad))
        replace_module(plan.model, layer, NormalizationPropagation(layer, gain))

    if norm is not None:
        plan.swap(norm.path, nn.Identity(), f"{call.path} has a gain and an offset of its own")
    plan.change(call.path, f"NormalizationPropagation of {describe(layer)} with WeightNorm", step=put)


@torch.no_grad()
def _put(model: nn.Module, roles: Roles, *, gain: float) -> None:
    for name in weight_norm_(model, keep=() if roles.classifier is None else (roles.classifier,)).applied:
        originals(model.get_submodule(name)).original0.fill_(gain)


def _relu(channels: int, **options: Any) -> nn.Module:
    return PropagatedReLU()


METHODS = (
    Method(
        "normprop",
        "normalization propagation",
        "weight",
        "Arpit et al. 2016",
        NormalizationPropagation,
        _plan,
        options={"gain": 1.0},
        aliases=("normalization_propagation",),
        layers={NormalizationPropagation: lambda _: "it holds a ReLU; the layer inside it is plain"},
        relu=_relu,
        put=_put,
    ),
)
