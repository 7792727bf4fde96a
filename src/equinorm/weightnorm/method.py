"""The weight norm family as methods of `convert`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _WeightNorm

from ..models.plan import Plan
from ..models.replacing import (
    Parametrization,
    Roles,
    branch_ends,
    instead_of_norms,
    parametrize_layers,
    why_not_instead,
)
from ..models.surgery import bias_of, gain_and_offset, shift_outputs_
from ..registry import Method
from .apply import (
    centred_weight_norm_,
    have_directions,
    scaled_weight_norm_,
    weight_norm_,
    weight_standardization_,
    why_no_filters,
)
from .init import data_dependent_init_
from .parametrizations import CentredWeightNorm, ScaledWeightNorm, WeightNorm, WeightStandardization

__all__ = ["METHODS", "WEIGHT_NORM"]


def why_no_directions(layer: nn.Module, centred: bool = False) -> str:
    """Why the filters of a layer have no direction of their own; empty if they have."""
    if not (why := why_no_filters(layer, centred)) and not have_directions(layer, centred):
        why = "it has a filter of length 0, which has no direction: initialise it first"
    return why or ""


WEIGHT_NORM = Parametrization(WeightNorm, weight_norm_, why_no_directions, same=(_WeightNorm,))
_CENTRED = Parametrization(CentredWeightNorm, centred_weight_norm_, partial(why_no_directions, centred=True))
_SCALED = Parametrization(ScaledWeightNorm, scaled_weight_norm_, why_no_directions)
_STANDARDIZED = Parametrization(
    WeightStandardization, weight_standardization_, partial(why_no_directions, centred=True)
)


def _plan_scaled(plan: Plan, learnable: bool, blocks: int | None) -> None:
    ends = branch_ends(plan)
    linear = [call.path for call in plan.layers() if call.path not in ends and not plan.graph.rectified(call)]
    normed = parametrize_layers(plan, _SCALED, learnable=learnable, linear=linear, branch_ends=ends, blocks=blocks)
    for norm in plan.norms:
        why = why_not_instead(plan, norm, normed)
        if norm.layer is None or why:
            plan.leave(norm, why)
            continue
        layer, offset = norm.layer.module, gain_and_offset(norm.module)[1]
        if offset is not None and bias_of(layer) is None:  # the method starts from γ = 1 and b = 0
            zeros = torch.zeros_like(offset, requires_grad=offset.requires_grad)
            plan.later(partial(shift_outputs_, layer, zeros))
        plan.remove(norm, f"{norm.layer.path} starts with a gain of 1 and a bias of 0")


def _plan_standardized(plan: Plan, eps: float) -> None:
    followed = {norm.layer.path for norm in plan.norms if norm.layer is not None}
    parametrize_layers(plan, _STANDARDIZED, only=followed, eps=eps)
    for norm in plan.norms:
        plan.keep(norm.path, norm.alone or "weight standardization goes with a norm")


def _put_scaled(model: nn.Module, roles: Roles, **options: Any) -> None:
    scaled_weight_norm_(model, linear=roles.linear, branch_ends=roles.branch_ends, **options)


def _put_standardized(model: nn.Module, roles: Roles, **options: Any) -> None:
    weight_standardization_(model, keep=() if roles.classifier is None else (roles.classifier,), **options)


METHODS = (
    Method(
        "weightnorm",
        "weight norm",
        "weight",
        "arpit2019",
        weight_norm_,
        lambda plan: instead_of_norms(plan, WEIGHT_NORM),
        aliases=("wn",),
        init=data_dependent_init_,
        put=lambda model, _: weight_norm_(model),
        starts_from_data=True,
    ),
    Method(
        "centred_weightnorm",
        "centred weight norm",
        "weight",
        "Huang et al. 2017",
        centred_weight_norm_,
        lambda plan: instead_of_norms(plan, _CENTRED),
        init=data_dependent_init_,
        put=lambda model, _: centred_weight_norm_(model),
        starts_from_data=True,
    ),
    Method(
        "scaled_weightnorm",
        "scaled weight norm",
        "weight",
        "arpit2019",
        scaled_weight_norm_,
        _plan_scaled,
        options={"learnable": True, "blocks": None},
        init=data_dependent_init_,
        put=_put_scaled,
    ),
    Method(
        "weight_standardization",
        "weight standardization, before the norms the model has",
        "weight + activation",
        "Qiao et al. 2019",
        weight_standardization_,
        _plan_standardized,
        options={"eps": 1e-5},
        aliases=("ws",),
        put=_put_standardized,
    ),
)
