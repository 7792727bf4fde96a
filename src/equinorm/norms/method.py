"""The norms of activations as methods of `convert`; and "none", which takes norms off."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..models.plan import Norm, Plan
from ..models.replacing import Place, batchnorm_for, only_relus, replace_norms
from ..models.surgery import copy_affine_, describe, gain_and_offset, replace_module, scale_outputs_
from ..registry import Method
from .layers import (
    BATCH_RENORM_DEFAULTS,
    TLU,
    BatchRenorm,
    BatchRenorm1d,
    BatchRenorm2d,
    BatchRenorm3d,
    FilterResponseNorm,
    MeanOnlyBatchNorm,
    MeanOnlyBatchNorm1d,
    MeanOnlyBatchNorm2d,
    MeanOnlyBatchNorm3d,
)

__all__ = ["METHODS", "plan_mean_only"]

_INSTANCE_NORMS = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
_BATCH_RENORMS = {2: BatchRenorm1d, 3: BatchRenorm1d, 4: BatchRenorm2d, 5: BatchRenorm3d}
_MEAN_ONLY = {2: MeanOnlyBatchNorm1d, 3: MeanOnlyBatchNorm1d, 4: MeanOnlyBatchNorm2d, 5: MeanOnlyBatchNorm3d}

# -- norms, each made for a place ------------------------------------------------------------------------------


def _groupnorm(place: Place, groups: int, eps: float) -> nn.Module | str:
    number = _groups_for(place, groups)
    if not number:
        return "its groups would have a single value"
    return nn.GroupNorm(number, place.channels, eps=eps, affine=place.affine)


def _groups_for(place: Place, groups: int) -> int:
    """The largest number of groups, `groups` at most, that divides the channels and leaves each two values.

    Where the positions are not known, a single channel is taken to have several.
    """
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")
    fitting = [n for n in range(1, min(groups, place.channels) + 1) if place.channels % n == 0]
    return max(
        (n for n in fitting if place.channels // n * max(place.positions, 1) > 1), default=int(place.positions == 0)
    )


def _instancenorm(place: Place, eps: float) -> nn.Module | str:
    if place.positions == 1:
        return "it has one value per channel and example, which an instance norm would make zero"
    return _INSTANCE_NORMS[place.ndim](place.channels, eps=eps, affine=place.affine)


def _batchrenorm(place: Place, r_schedule: Iterable[int], d_schedule: Iterable[int], **options: Any) -> nn.Module:
    (r_first, r_last), (d_first, d_last) = r_schedule, d_schedule
    options |= {"r_schedule": (r_first, r_last), "d_schedule": (d_first, d_last)}
    return _BATCH_RENORMS[place.ndim](place.channels, affine=place.affine, **options)


def _mean_only(place: Place, momentum: float | None) -> nn.Module:
    return _MEAN_ONLY[place.ndim](place.channels, momentum=momentum, bias=place.affine)


def _frn(place: Place, eps: float, learnable_eps: bool | None, tlu: bool) -> nn.Module:
    # Where there is one value, x / |x| is a bare sign unless ε is learned.
    learn = place.positions == 1 if learnable_eps is None else learnable_eps
    return FilterResponseNorm(place.channels, eps=eps, learnable_eps=learn)


# -- what they are in evaluation -------------------------------------------------------------------------------


def _mean_only_affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(norm, MeanOnlyBatchNorm)
    mean = norm.running_mean.double()
    return torch.ones_like(mean), -mean if norm.bias is None else norm.bias.double() - mean


def _batchrenorm_affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(norm, BatchRenorm)
    std = norm.running_std.double()
    a = torch.ones_like(std) / std if norm.weight is None else norm.weight.double() / std
    return a, (0.0 if norm.bias is None else norm.bias.double()) - a * norm.running_mean.double()


# -- plans -----------------------------------------------------------------------------------------------------


def _plan_batchnorm(plan: Plan, eps: float, momentum: float | None) -> None:
    replace_norms(
        plan, lambda place: batchnorm_for(place, eps, momentum), lambda module, _: isinstance(module, _BatchNorm)
    )


def _plan_groupnorm(plan: Plan, groups: int, eps: float) -> None:
    def same(module: nn.Module, place: Place) -> bool:
        return isinstance(module, nn.GroupNorm) and module.num_groups == _groups_for(place, groups)

    replace_norms(plan, lambda place: _groupnorm(place, groups, eps), same)


def _plan_layernorm(plan: Plan, eps: float) -> None:
    # As in Wu & He 2018: for inputs with channels in axis 1, layer norm is group norm with one group.
    _plan_groupnorm(plan, groups=1, eps=eps)


def _plan_instancenorm(plan: Plan, eps: float) -> None:
    replace_norms(plan, lambda place: _instancenorm(place, eps), lambda module, _: isinstance(module, _InstanceNorm))


def _plan_batchrenorm(plan: Plan, **options: Any) -> None:
    @torch.no_grad()
    def carry_(new: nn.Module, old: nn.Module) -> None:
        copy_affine_(new, old)
        # so that evaluation gives what it gave before
        mean, var = getattr(old, "running_mean", None), getattr(old, "running_var", None)
        if isinstance(new, BatchRenorm) and isinstance(old, _BatchNorm) and mean is not None and var is not None:
            new.running_mean.copy_(mean)
            new.running_std.copy_(torch.sqrt(var + old.eps))

    replace_norms(
        plan,
        lambda place: _batchrenorm(place, **options),
        lambda module, _: isinstance(module, BatchRenorm),
        carry_,
    )


def plan_mean_only(plan: Plan, momentum: float | None) -> None:
    replace_norms(
        plan,
        lambda place: _mean_only(place, momentum),
        lambda module, _: isinstance(module, MeanOnlyBatchNorm),
        _carry_offset_,
    )
    for norm in plan.norms:
        gain = gain_and_offset(norm.module)[0]
        if norm.path in plan.converted and gain is not None and not bool((gain == 1).all()):
            _hand_gain_to_layer(plan, norm, gain)


@torch.no_grad()
def _carry_offset_(new: nn.Module, old: nn.Module) -> None:
    offset = gain_and_offset(old)[1]
    if offset is not None and isinstance(new.bias, Tensor):
        new.bias.copy_(offset)
        new.bias.requires_grad_(offset.requires_grad)


def _hand_gain_to_layer(plan: Plan, norm: Norm, gain: Tensor) -> None:
    """A norm without gain takes the place of one with: the layer before it multiplies by the gain instead."""
    if why := plan.why_not_hand_over(norm):
        plan.remark(norm.path, f"it has no gain; {why}")
        return
    assert norm.layer is not None
    layer, row = norm.layer.module, plan.converted.get(norm.layer.path)
    now = row.now if row else describe(layer)
    plan.change(norm.layer.path, now, f"has the gain of {norm.path}", partial(scale_outputs_, layer, gain))


def _plan_frn(plan: Plan, eps: float, learnable_eps: bool | None, tlu: bool) -> None:
    def same(module: nn.Module, _: Place) -> bool:
        return isinstance(module, FilterResponseNorm)

    def carry_(new: nn.Module, old: nn.Module) -> None:
        copy_affine_(new, old)
        if isinstance(new, FilterResponseNorm) and new.eps_l is not None:
            new.eps_l.requires_grad_(new.weight.requires_grad)

    if tlu:
        for norm in plan.norms:
            for name, module in norm.tail.items():
                if type(module) is nn.ReLU:
                    norm.tail[name] = TLU(norm.channels).to(**norm.place)
    norms = replace_norms(plan, lambda place: _frn(place, eps, learnable_eps, tlu), same, carry_)
    if tlu:
        for path, steps in only_relus(plan, norms).items():
            _put_thresholds(plan, path, [norms.pop(step) for step in steps])
        for step in norms:  # what is left has no ReLU behind it, or one that stays
            if any(reader.op == "relu" for reader in step.users):
                plan.remark(step.home, "no TLU: the ReLU behind it is a function, or is called elsewhere too")


def _put_thresholds(plan: Plan, relu: str, norms: list[nn.Module]) -> None:
    """Thresholded linear units in the place of a ReLU that is called after each of `norms`, and only there."""
    if len(norms) == 1:
        plan.swap(relu, _threshold(norms[0]))
        return
    for norm in norms:
        both = nn.Sequential(norm, _threshold(norm))
        plan.later(partial(replace_module, plan.model, norm, both))
        plan.norms_behind = [(layer, both if new is norm else new) for layer, new in plan.norms_behind]
    plan.swap(relu, nn.Identity(), "a threshold stands behind each of the norms before it")


def _threshold(norm: nn.Module) -> nn.Module:
    """A thresholded linear unit for what a filter response norm puts out."""
    weight: Any = norm.weight
    return TLU(len(weight)).to(weight.device, weight.dtype).requires_grad_(weight.requires_grad)


def _relu_of_frn(channels: int, tlu: bool, **options: Any) -> nn.Module | None:
    return TLU(channels) if tlu else None


def _plan_none(plan: Plan) -> None:
    plan.already += not plan.norms
    for norm in plan.norms:
        why = plan.why_not_hand_over(norm)
        if norm.layer is not None and why:
            plan.keep(norm.path, why)
        else:
            plan.hand_over(norm)


METHODS = (
    Method(
        "batchnorm",
        "batch norm",
        "activation",
        "Ioffe & Szegedy 2015",
        nn.BatchNorm2d,
        _plan_batchnorm,
        options={"eps": 1e-5, "momentum": 0.1},
        aliases=("bn",),
        norm=batchnorm_for,
    ),
    Method(
        "groupnorm",
        "group norm",
        "activation",
        "Wu & He 2018",
        nn.GroupNorm,
        _plan_groupnorm,
        options={"groups": 32, "eps": 1e-5},
        aliases=("gn",),
        norm=_groupnorm,
    ),
    Method(
        "layernorm",
        "layer norm over channels and positions",
        "activation",
        "arpit2019",
        nn.GroupNorm,
        _plan_layernorm,
        options={"eps": 1e-5},
        aliases=("ln",),
        norm=partial(_groupnorm, groups=1),
    ),
    Method(
        "instancenorm",
        "instance norm",
        "activation",
        "Ulyanov et al. 2016",
        nn.InstanceNorm2d,
        _plan_instancenorm,
        options={"eps": 1e-5},
        aliases=("in",),
        norm=_instancenorm,
    ),
    Method(
        "batchrenorm",
        "batch renormalization",
        "activation",
        "Ioffe 2017",
        BatchRenorm2d,
        _plan_batchrenorm,
        options=BATCH_RENORM_DEFAULTS,
        aliases=("brn",),
        norms={BatchRenorm: _batchrenorm_affine},
        norm=_batchrenorm,
    ),
    Method(
        "mean_only_batchnorm",
        "mean-only batch norm",
        "activation",
        "Salimans & Kingma 2016",
        MeanOnlyBatchNorm2d,
        plan_mean_only,
        options={"momentum": 0.1},
        aliases=("mean_only_bn",),
        norms={MeanOnlyBatchNorm: _mean_only_affine},
        norm=_mean_only,
    ),
    Method(
        "frn",
        "filter response norm and thresholded linear units",
        "activation",
        "Singh & Krishnan 2019",
        FilterResponseNorm,
        _plan_frn,
        options={"eps": 1e-6, "learnable_eps": None, "tlu": True},
        aliases=("filter_response", "filter_response_norm"),
        norms={FilterResponseNorm: lambda _: None},
        norm=_frn,
        relu=_relu_of_frn,
    ),
    Method("none", "no normalization", "nothing", "stock2019, repro2019 (baseline)", nn.Identity, _plan_none),
)
