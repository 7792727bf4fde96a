"""SkipInit as a method of `convert`: norms go, and each residual branch ends in a learned scale."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..models.plan import Plan
from ..models.replacing import Place, branch_ends, norm_behind
from ..registry import Method
from .layers import BranchScale

__all__ = ["METHODS"]


def _plan(plan: Plan, start: float) -> None:
    ends = set(branch_ends(plan))
    for norm in plan.norms:
        if isinstance(norm.module, BranchScale):
            plan.keep(norm.path, "it is a BranchScale already", already=True)
        elif why := plan.why_not_hand_over(norm):
            plan.leave(norm, why)
        else:
            plan.hand_over(norm)
    scaled = {norm.layer.path for norm in plan.norms if isinstance(norm.module, BranchScale) and norm.layer}
    for call in plan.layers():
        if call.path in ends - scaled:
            put = plan.why_no_norm_behind(call) or norm_behind(plan, call, partial(_scale, start=start))
            if isinstance(put, str):
                plan.keep(call.path, put)


def _scale(place: Place, start: float) -> nn.Module:
    return BranchScale(place.channels, start)


def _affine(scale: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(scale, BranchScale)
    with torch.no_grad():
        return scale.affine()


METHODS = (
    Method(
        "skipinit",
        "a learned scale at the end of each residual branch",
        "nothing",
        "De & Smith 2020; Bachlechner et al. 2020",
        BranchScale,
        _plan,
        options={"start": 0.0},
        aliases=("rezero",),
        norms={BranchScale: _affine},
    ),
)
