"""Weight norm with mean-only batch norm, as Salimans & Kingma 2016 made them for each other."""

from __future__ import annotations

from ..models.plan import Plan
from ..models.replacing import parametrize_layers
from ..norms.layers import MeanOnlyBatchNorm2d
from ..norms.method import plan_mean_only
from ..registry import Method
from ..weightnorm.init import data_dependent_init_
from ..weightnorm.method import WEIGHT_NORM

__all__ = ["METHODS"]


def _plan(plan: Plan, momentum: float | None) -> None:
    parametrize_layers(plan, WEIGHT_NORM)
    plan_mean_only(plan, momentum=momentum)


METHODS = (
    Method(
        "weightnorm_mean_only",
        "weight norm with mean-only batch norm",
        "weight + activation",
        "arpit2019; Salimans & Kingma 2016",
        MeanOnlyBatchNorm2d,
        _plan,
        options={"momentum": 0.1},
        init=data_dependent_init_,
    ),
)
