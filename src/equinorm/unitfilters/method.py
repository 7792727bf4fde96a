"""Unit filters as a method of `convert`: norms go, filters of length 1 and noise come; the start is taken from data."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ..models.noise import InputNoise
from ..models.plan import Plan
from ..models.replacing import Parametrization, Roles, parametrize_layers, put_noise, why_not_instead
from ..models.surgery import bias_of, gain_and_offset, outputs_of, shift_outputs_
from ..registry import Method
from .functional import Over, mean_over
from .init import data_init_
from .parametrization import UnitFilter, unit_filters_, why_no_directions

__all__ = ["METHODS"]


def _plan(plan: Plan, zero_mean: bool | Over, learned: bool, classifier: bool, noise: float) -> None:
    over = mean_over(zero_mean)

    def why_not(layer: nn.Module) -> str:
        if layer is last and not classifier:
            return "the last layer"
        return why_no_directions(layer, over) or ""

    last = None if plan.last is None else plan.last.module
    method = Parametrization(UnitFilter, unit_filters_, why_not)
    held = parametrize_layers(plan, method, zero_mean=zero_mean, learned=learned)
    for norm in plan.norms:
        if why := why_not_instead(plan, norm, held):
            plan.leave(norm, why)
            continue
        assert norm.layer is not None
        layer = norm.layer.module
        offset = gain_and_offset(norm.module)[1]
        if offset is not None and bias_of(layer) is None:
            zeros = torch.zeros(outputs_of(layer), device=offset.device, requires_grad=offset.requires_grad)
            plan.later(partial(shift_outputs_, layer, zeros))
        plan.remove(norm, f"{norm.layer.path} has a gain and a bias, which a start from data sets")
    if noise:
        put_noise(plan, noise, per="channel")


def _put(model: nn.Module, roles: Roles, noise: float, **options: Any) -> None:
    if noise:
        raise ValueError("where noise stands is not known of a net that is built: use add_input_noise_ on its units")
    unit_filters_(model, **options)


METHODS = (
    Method(
        "unit_filters",
        "filters of length 1, without batch statistics",
        "weight",
        "this project; Jordan 2024, ruff2020",
        unit_filters_,
        _plan,
        options={"zero_mean": False, "learned": False, "classifier": False, "noise": 0.0},
        init=data_init_,
        put=_put,
        starts_from_data=True,
        modules={InputNoise: lambda _: nn.Identity()},
    ),
)
