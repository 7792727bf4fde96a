"""Unit filters as a method of `convert`: norms go, filters of length 1 and noise come; the start is taken from data."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ..models.noise import InputNoise
from ..models.plan import Plan
from ..models.replacing import Parametrization, parametrize_layers, put_noise, why_not_instead
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
        layer, weight = norm.layer.module, norm.layer.module.weight
        if gain_and_offset(norm.module)[1] is not None and bias_of(layer) is None:
            zeros = torch.zeros(outputs_of(layer), device=weight.device, requires_grad=True)  # type: ignore[arg-type]
            plan.later(partial(shift_outputs_, layer, zeros))
        plan.remove(norm, f"{norm.layer.path} has a gain and a bias, which a start from data sets")
    if noise:
        put_noise(plan, noise, per="channel")


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
        modules={InputNoise: lambda _: nn.Identity()},
    ),
)
