"""Dynamic tanh as a method of `convert`: in the place of norms over channels, and of LayerNorm and RMSNorm."""

from __future__ import annotations

import torch
from torch import nn

from ..models.kinds import OTHER_NORMS
from ..models.plan import Plan
from ..models.replacing import Place, replace_norms
from ..models.surgery import copy_affine_
from ..registry import Method
from .layers import DynamicTanh

__all__ = ["METHODS"]


def _norm(place: Place, alpha: float) -> nn.Module:
    return DynamicTanh(place.channels, alpha)


def _plan(plan: Plan, alpha: float) -> None:
    others = {path: module for path, module in plan.graph.modules.items() if isinstance(module, OTHER_NORMS)}
    for path, module in plan.graph.modules.items():
        if isinstance(module, DynamicTanh) and all(path != norm.path for norm in plan.norms):
            plan.keep(path, "it is a DynamicTanh already", already=True)
    for path, module in others.items():
        if why := plan.refused(path, module):
            plan.keep(path, why)
        elif len(module.normalized_shape) == 1:
            plan.swap(path, _in_place_of(module, module.normalized_shape[0], alpha))
    if plan.norms or not others:
        replace_norms(
            plan, lambda place: _norm(place, alpha), lambda module, _: isinstance(module, DynamicTanh), _carry_
        )


def _in_place_of(norm: nn.LayerNorm | nn.RMSNorm, size: int, alpha: float) -> DynamicTanh:
    new = DynamicTanh(size, alpha, axis=-1)
    if norm.weight is not None:
        new = new.to(norm.weight.device, norm.weight.dtype)
    _carry_(new, norm)
    return new


@torch.no_grad()
def _carry_(new: nn.Module, old: nn.Module) -> None:
    copy_affine_(new, old)
    if isinstance(new, DynamicTanh):
        new.alpha.requires_grad_(new.weight.requires_grad)


METHODS = (
    Method(
        "dyt",
        "dynamic tanh in the place of norms",
        "activation",
        "Zhu et al. 2025",
        DynamicTanh,
        _plan,
        options={"alpha": 0.5},
        aliases=("dynamic_tanh",),
        norms={DynamicTanh: lambda _: None},
        norm=_norm,
    ),
)
