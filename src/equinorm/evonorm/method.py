"""EvoNorm-S0 as a method of `convert`: a norm and the ReLU behind it become one layer."""

from __future__ import annotations

from functools import partial

from torch import nn

from ..models.plan import Plan
from ..models.replacing import Place, only_relus, replace_norms
from ..models.surgery import copy_affine_
from ..registry import Method
from .layers import EvoNormS0

__all__ = ["METHODS"]


def _norm(place: Place, groups: int, eps: float) -> nn.Module | str:
    if place.positions != 1:
        return EvoNormS0(place.channels, groups, eps)
    if place.channels == 1:
        return "it has one value per example, which has no variance"
    return EvoNormS0(place.channels, min(groups, place.channels // 2), eps)  # a group needs two values


def _plan(plan: Plan, groups: int, eps: float) -> None:
    """The authors' program has the layer in the place of norm and activation, and γ x + β where there is no activation.

    So a ReLU goes if it is a module that reads nothing but such norms; where it stays, the layer has none of its own.
    """
    rectified = []
    for norm in plan.norms:
        relus = [name for name, module in norm.tail.items() if type(module) is nn.ReLU]
        rectified += [norm.output] if relus else []
        for name in relus:
            norm.tail[name] = nn.Identity()
    norms = replace_norms(
        plan, partial(_norm, groups=groups, eps=eps), lambda module, _: isinstance(module, EvoNormS0), _carry_
    )
    bare = {step: norm for step, norm in norms.items() if step not in rectified}
    for path, steps in only_relus(plan, bare).items():
        plan.swap(path, nn.Identity(), "part of the norm before it")
        for step in steps:
            del bare[step]
    for step, layer in bare.items():
        assert isinstance(layer, EvoNormS0)
        layer.v = None
        if step.home in plan.converted:
            plan.remark(step.home, "without an activation: no nn.ReLU behind it that could go")


def _carry_(new: nn.Module, old: nn.Module) -> None:
    copy_affine_(new, old)
    if isinstance(new, EvoNormS0) and new.v is not None:
        new.v.requires_grad_(new.weight.requires_grad)


def _no_relu(channels: int, groups: int, eps: float) -> nn.Module:
    return nn.Identity()


METHODS = (
    Method(
        "evonorm_s0",
        "normalization and activation as one layer",
        "activation",
        "Liu et al. 2020",
        EvoNormS0,
        _plan,
        options={"groups": 32, "eps": 1e-5},
        aliases=("evonorm",),
        norms={EvoNormS0: lambda _: None},
        norm=_norm,
        relu=_no_relu,
    ),
)
