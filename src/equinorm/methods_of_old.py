"""The methods that come with the package: what each of them does to a model.

Each function is given a `Plan` and notes there, norm by norm and layer by layer, what is to be changed, and what is
kept and why. Batch norm's gain γ and offset β live on in what takes its place, as far as that has parameters for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _WeightNorm

from .equilibrium import layers as en
from .models.graph import Call, Step
from .models.surgery import (
    OTHER_NORMS,
    Norm,
    Plan,
    bias_of,
    copy_affine_,
    describe,
    gain_and_offset,
    is_noisy,
    is_parametrized,
    outputs_of,
    replace_module,
    scale_outputs_,
    shift_outputs_,
    torch_layer,
)
from .msr import rejection as ms
from .norms import layers as an
from .registry import Place, built_in, fuse_layers, replace_norms
from .weightnorm import parametrizations as wn

WITH_DATA_DEPENDENT_INIT = ("weightnorm", "centred_weightnorm", "scaled_weightnorm", "weightnorm_mean_only")
"""Methods whose gains and biases can be chosen from a batch of data (arpit2019, section 4)."""

# -- EquiNorm --------------------------------------------------------------------------------------------------


_EQUINORM: dict[type[nn.Module], Any] = {
    nn.Conv1d: en.EquiNormConv1d,
    nn.Conv2d: en.EquiNormConv2d,
    nn.Conv3d: en.EquiNormConv3d,
    nn.ConvTranspose2d: en.EquiNormConvTranspose2d,
    nn.Linear: en.EquiNormLinear,
}


@built_in(
    "equinorm",
    "equilibrium normalization of weights",
    "weight",
    "defazio2018",
    en.EquiNormConv2d,
    stats_fraction=1.0,
    two_pass=False,
    momentum="inherit",
    track_running_stats="inherit",
    process_group="inherit",
    eps=en.EPS,
    depthwise=False,
    balance_signs=True,
)
def _equinorm(plan: Plan, depthwise: bool, balance_signs: bool, **options: Any) -> None:
    def make(call: Call, norm: Norm | None) -> nn.Module | str:
        layer = call.module
        kind = _EQUINORM.get(torch_layer(layer))
        if kind is None:
            return f"there is no EquiNorm layer for {type(layer).__name__}"
        if wn.fans(layer)[0] < 2:
            return "a fan-in of 1: EquiNorm balances the weights of an output against each other"
        if not depthwise and getattr(layer, "groups", 1) > 1 and layer.in_channels == layer.groups:
            return "a depthwise convolution, with one input channel per output; convert it with depthwise=True"
        return _equinorm_layer(kind, layer, norm, balance_signs, options)

    fuse_layers(plan, make, lambda module: isinstance(module, en.EquiNormLayer))
    for call in plan.layers():
        if call.path in plan.converted and any(s not in plan.graph.not_negative for s in call.inputs):
            plan.remark(call.path, "its inputs may be negative, which the method is not made for")


@torch.no_grad()
def _equinorm_layer(
    kind: Any, plain: nn.Module, norm: Norm | None, balance_signs: bool, options: Mapping[str, Any]
) -> nn.Module:
    """An EquiNorm layer with a layer's weight, and the gain, offset and habits of the norm behind it."""
    given = {name: value for name, value in options.items() if value != "inherit"}
    if norm is None:
        layer: nn.Module = kind.from_plain(plain, **given)
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
            layer.balance_signs_()  # type: ignore[operator]
    return layer


# -- mean shift rejection --------------------------------------------------------------------------------------


@built_in(
    "msr",
    "mean shift rejection",
    "weight",
    "ruff2020",
    ms.apply_mean_shift_rejection_,
    log_gain=ms.DEFAULT_LOG_GAIN,
    init=True,
    exclude_first=True,
    bias=False,
    noise=0.0,
)
def _msr(plan: Plan, log_gain: float, init: bool, exclude_first: bool, bias: bool, noise: float) -> None:
    """Scaled kernels; batch norms behind layers go, also behind those that have no scaled kernel."""
    spatial = [call.module for call in plan.layers() if ms._is_spatial(call.module)]
    first = spatial[0] if exclude_first and spatial else None

    def why_not(layer: nn.Module) -> str:
        if isinstance(layer, nn.Linear):
            return "a linear layer has no window"
        return "the first spatial convolution: it looks at the data" if layer is first else ms._why_not(layer) or ""

    apply_ = partial(ms.apply_mean_shift_rejection_, exclude_first=False, log_gain=log_gain, init=init)
    scaled = parametrize_layers(plan, Parametrization(ms.ScaledKernel, apply_, why_not))
    for norm in plan.norms:
        if norm.layer is None:
            plan.leave(norm, norm.alone)
        elif norm.layer.path in scaled:
            _drop_for_scaled_kernel(plan, norm, bias)
        elif why := plan.why_not_hand_over(norm):
            plan.leave(norm, why)
        else:
            plan.hand_over(norm, offset=bias)
    if noise:
        _put_noise(plan, noise)
    # Where the first convolution is the only one, its norm is all there is to take. (Transformers have such a first
    # one too, and nothing to convert.)
    transformer = any(isinstance(module, OTHER_NORMS) for module in plan.graph.modules.values())
    plan.already += first is not None and not transformer


def _drop_for_scaled_kernel(plan: Plan, norm: Norm, bias: bool) -> None:
    """The kernel's e^g takes the place of the gain; the paper trains as well without offsets (section 6)."""
    assert norm.layer is not None
    layer, offset = norm.layer.module, gain_and_offset(norm.module)[1]
    if bias and offset is not None and not plan.why_no_bias(norm.layer):
        plan.later(partial(shift_outputs_, layer, offset))
    plan.remove(norm, f"{norm.layer.path} has a gain of its own{' and its offset' if bias else ''}")


def _put_noise(plan: Plan, amplitude: float) -> None:
    """Noise at the inputs of residual units (ruff2020, section 4.4).

    A unit is the module in whose code a residual sum stands, if what it adds to is all that the module reads:
    its input, then, is where skip and branch begin.
    """
    units: dict[str, nn.Module] = {}
    for found in plan.graph.residual_sums:
        unit = found.sum.calls[-1]
        if refused := plan.refused(unit.path, unit.module, replace=False):
            plan.keep(unit.path, refused)
        elif is_noisy(unit.module):
            plan.keep(unit.path, "its input is noisy already", already=True)
        elif unit.path and unit.inputs == [found.start]:
            units[unit.path] = unit.module
        else:
            plan.keep(unit.path, "no noise: its residual sum is not in a module whose only input is what it adds to")
    for path, module in units.items():
        plan.change(path, f"{describe(module)} with InputNoise")
    plan.later(lambda: ms.add_input_noise_(units.values(), amplitude))


# -- parametrized weights --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parametrization:
    """What the methods of the weight norm family have in common, and where they differ."""

    kind: type[nn.Module]
    apply_: Callable[..., Any]
    """Takes the model and `where`; raises, if at all, before it changes anything."""
    why_not: Callable[[nn.Module], str]
    """Why a layer cannot have it; empty if it can."""
    same: tuple[type[nn.Module], ...] = ()
    """Other parametrizations that are the same method."""


def why_no_directions(layer: nn.Module, centred: bool = False) -> str:
    """Why the filters of a layer have no direction of their own; empty if they have."""
    if not (why := wn.why_no_filters(layer, centred)) and not wn.have_directions(layer, centred):
        why = "it has a filter of length 0, which has no direction: initialise it first"
    return why or ""


_WEIGHT_NORM = Parametrization(wn.WeightNorm, wn.apply_weight_norm_, why_no_directions, same=(_WeightNorm,))
_CENTRED = Parametrization(wn.CentredWeightNorm, wn.centred_weight_norm_, partial(why_no_directions, centred=True))
_SCALED = Parametrization(wn.ScaledWeightNorm, wn.scaled_weight_norm_, why_no_directions)
_STANDARDIZED = Parametrization(
    wn.WeightStandardization, wn.weight_standardization_, partial(why_no_directions, centred=True)
)


def parametrize_layers(plan: Plan, method: Parametrization, only: set[str] | None = None, **options: Any) -> set[str]:
    """Note a parametrization for all layers (of those in `only`); returns the paths of those that have it then."""
    chosen: dict[str, nn.Module] = {}
    same: set[str] = set()
    for call in plan.layers():
        path, layer = call.path, call.module
        if is_parametrized(layer) and isinstance(wn.originals(layer)[0], (method.kind, *method.same)):
            plan.keep(path, f"it is a {describe(layer)} already", already=True)
            same.add(path)
        elif only is not None and path not in only:
            plan.keep(path, plan.refused(path, layer, replace=False) or "no norm belongs to it")
        elif why := plan.why_not(call) or method.why_not(layer):
            plan.keep(path, why)
        else:
            chosen[path] = layer
    if chosen:
        layers = set(chosen.values())
        # If anything raises it is this, before it changes anything; so it is the first step.
        plan.later(lambda: method.apply_(plan.model, where=lambda _, layer: layer in layers, **options))
    for path, layer in chosen.items():
        plan.change(path, f"{describe(layer)} with {method.kind.__name__}")
    return same | set(chosen)


def _weight_norm_instead_of_norms(plan: Plan, method: Parametrization) -> None:
    normed = parametrize_layers(plan, method)
    for norm in plan.norms:
        if why := _why_not_instead(plan, norm, normed):
            plan.leave(norm, why)
        else:
            plan.hand_over(norm)


def _why_not_instead(plan: Plan, norm: Norm, normed: set[str]) -> str:
    """Why a parametrized weight does not take the place of a norm; empty if it does."""
    if norm.layer is None:
        return norm.alone
    if norm.layer.path not in normed:
        return f"{norm.layer.path}, which feeds it, is kept"
    return plan.why_no_bias(norm.layer)


@built_in("weightnorm", "weight norm", "weight", "arpit2019", wn.apply_weight_norm_)
def _weightnorm(plan: Plan) -> None:
    _weight_norm_instead_of_norms(plan, _WEIGHT_NORM)


@built_in("centred_weightnorm", "centred weight norm", "weight", "Huang et al. 2017", wn.centred_weight_norm_)
def _centred_weightnorm(plan: Plan) -> None:
    _weight_norm_instead_of_norms(plan, _CENTRED)


@built_in(
    "scaled_weightnorm",
    "scaled weight norm",
    "weight",
    "arpit2019",
    wn.scaled_weight_norm_,
    learnable=True,
    blocks=None,
)
def _scaled_weightnorm(plan: Plan, learnable: bool, blocks: int | None) -> None:
    ends = branch_ends(plan)
    linear = [call.path for call in plan.layers() if call.path not in ends and not plan.graph.rectified(call)]
    normed = parametrize_layers(plan, _SCALED, learnable=learnable, linear=linear, branch_ends=ends, blocks=blocks)
    for norm in plan.norms:
        why = _why_not_instead(plan, norm, normed)
        if norm.layer is None or why:
            plan.leave(norm, why)
            continue
        layer, offset = norm.layer.module, gain_and_offset(norm.module)[1]
        if offset is not None and bias_of(layer) is None:  # the method starts from γ = 1 and b = 0
            zeros = torch.zeros_like(offset, requires_grad=offset.requires_grad)
            plan.later(partial(shift_outputs_, layer, zeros))
        plan.remove(norm, f"{norm.layer.path} starts with a gain of 1 and a bias of 0")


def branch_ends(plan: Plan) -> list[str]:
    """The last layers of residual branches: between them and the sum is a norm, dropout or a scale at most."""
    ends: dict[str, None] = {}
    norms = {call: call.inputs[0] for norm in plan.norms for call in norm.calls}
    layers = {plan.graph.layer_step(call): call for call in plan.layers()}
    for found in plan.graph.residual_sums:
        step = found.branch
        while step not in layers:
            before = [norms[call] for call in step.calls if call in norms]
            if not before and step.op in ("dropout", "feature_dropout", "mul", "div"):
                before = step.sources[:1]
            if not before:
                break
            step = before[0]
        if step in layers:
            ends[layers[step].path] = None
    return list(ends)


@built_in(
    "weight_standardization",
    "weight standardization, before the norms the model has",
    "weight + activation",
    "Qiao et al. 2019",
    wn.weight_standardization_,
    eps=1e-5,
)
def _weight_standardization(plan: Plan, eps: float) -> None:
    followed = {norm.layer.path for norm in plan.norms if norm.layer is not None}
    parametrize_layers(plan, _STANDARDIZED, only=followed, eps=eps)
    for norm in plan.norms:
        plan.keep(norm.path, norm.alone or "weight standardization goes with a norm")


@built_in(
    "weightnorm_mean_only",
    "weight norm with mean-only batch norm",
    "weight + activation",
    "arpit2019; Salimans & Kingma 2016",
    an.MeanOnlyBatchNorm2d,
    momentum=0.1,
)
def _weightnorm_mean_only(plan: Plan, momentum: float | None) -> None:
    parametrize_layers(plan, _WEIGHT_NORM)
    _mean_only_batchnorm(plan, momentum=momentum)


# -- normalization propagation ---------------------------------------------------------------------------------


@built_in(
    "normprop",
    "normalization propagation",
    "weight",
    "Arpit et al. 2016",
    an.NormalizationPropagation,
    gain=1.0,
)
def _normprop(plan: Plan, gain: float) -> None:
    norm_after = {norm.layer.path: norm for norm in plan.norms if norm.layer is not None}
    waiting: dict[Step, Call] = {}
    reasons: dict[str, str] = {}
    for call in plan.layers():
        norm, step = norm_after.get(call.path), plan.graph.layer_step(call)
        if isinstance(plan.graph.modules.get(call.path.rpartition(".")[0]), an.NormalizationPropagation):
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
        replace_module(plan.model, layer, an.NormalizationPropagation(layer, gain))

    if norm is not None:
        plan.swap(norm.path, nn.Identity(), f"{call.path} has a gain and an offset of its own")
    plan.change(call.path, f"NormalizationPropagation of {describe(layer)} with WeightNorm", step=put)


# -- norms of activations --------------------------------------------------------------------------------------

_BATCHNORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_INSTANCENORMS = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
_BATCHRENORMS = {2: an.BatchRenorm1d, 3: an.BatchRenorm1d, 4: an.BatchRenorm2d, 5: an.BatchRenorm3d}
_MEAN_ONLY = {
    2: an.MeanOnlyBatchNorm1d,
    3: an.MeanOnlyBatchNorm1d,
    4: an.MeanOnlyBatchNorm2d,
    5: an.MeanOnlyBatchNorm3d,
}


def batchnorm_for(place: Place, eps: float = 1e-5, momentum: float | None = 0.1) -> nn.Module:
    return _BATCHNORMS[place.ndim](place.channels, eps=eps, momentum=momentum, affine=place.affine)


def groups_for(place: Place, groups: int) -> int:
    """The largest number of groups, `groups` at most, that divides the channels and leaves each two values."""
    fitting = [n for n in range(1, min(groups, place.channels) + 1) if place.channels % n == 0]
    return max((n for n in fitting if place.channels // n * place.positions > 1), default=0)


@built_in("batchnorm", "batch norm", "activation", "Ioffe & Szegedy 2015", nn.BatchNorm2d, eps=1e-5, momentum=0.1)
def _batchnorm(plan: Plan, eps: float, momentum: float | None) -> None:
    replace_norms(
        plan, lambda place: batchnorm_for(place, eps, momentum), lambda module, _: isinstance(module, _BatchNorm)
    )


@built_in("groupnorm", "group norm", "activation", "Wu & He 2018", nn.GroupNorm, groups=32, eps=1e-5)
def _groupnorm(plan: Plan, groups: int, eps: float) -> None:
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")

    def make(place: Place) -> nn.Module | str:
        number = groups_for(place, groups)
        if not number:
            return "its groups would have a single value"
        return nn.GroupNorm(number, place.channels, eps=eps, affine=place.affine)

    def same(module: nn.Module, place: Place) -> bool:
        return isinstance(module, nn.GroupNorm) and module.num_groups == groups_for(place, groups)

    replace_norms(plan, make, same)


@built_in("layernorm", "layer norm over channels and positions", "activation", "arpit2019", nn.GroupNorm, eps=1e-5)
def _layernorm(plan: Plan, eps: float) -> None:
    # As in Wu & He 2018: for inputs with channels in axis 1, layer norm is group norm with one group.
    _groupnorm(plan, groups=1, eps=eps)


@built_in("instancenorm", "instance norm", "activation", "Ulyanov et al. 2016", nn.InstanceNorm2d, eps=1e-5)
def _instancenorm(plan: Plan, eps: float) -> None:
    def make(place: Place) -> nn.Module | str:
        if place.positions < 2:
            return "it has one value per channel and example, which an instance norm would make zero"
        return _INSTANCENORMS[place.ndim](place.channels, eps=eps, affine=place.affine)

    replace_norms(plan, make, lambda module, _: isinstance(module, _InstanceNorm))


@built_in(
    "batchrenorm",
    "batch renormalization",
    "activation",
    "Ioffe 2017",
    an.BatchRenorm2d,
    eps=1e-3,
    momentum=0.01,
    r_max=3.0,
    d_max=5.0,
    r_schedule=(5_000, 40_000),
    d_schedule=(5_000, 25_000),
)
def _batchrenorm(plan: Plan, **options: Any) -> None:
    @torch.no_grad()
    def carry_(new: nn.Module, old: nn.Module) -> None:
        copy_affine_(new, old)
        # so that evaluation gives what it gave before
        mean, var = getattr(old, "running_mean", None), getattr(old, "running_var", None)
        if isinstance(new, an._BatchRenorm) and isinstance(old, _BatchNorm) and mean is not None and var is not None:
            new.running_mean.copy_(mean)
            new.running_std.copy_(torch.sqrt(var + old.eps))

    replace_norms(
        plan,
        lambda place: _BATCHRENORMS[place.ndim](place.channels, affine=place.affine, **options),
        lambda module, _: isinstance(module, an._BatchRenorm),
        carry_,
    )


@built_in(
    "mean_only_batchnorm",
    "mean-only batch norm",
    "activation",
    "Salimans & Kingma 2016",
    an.MeanOnlyBatchNorm2d,
    momentum=0.1,
)
def _mean_only_batchnorm(plan: Plan, momentum: float | None) -> None:
    replace_norms(
        plan,
        lambda place: _MEAN_ONLY[place.ndim](place.channels, momentum=momentum, bias=place.affine),
        lambda module, _: isinstance(module, an._MeanOnlyBatchNorm),
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


@built_in(
    "frn",
    "filter response norm and thresholded linear units",
    "activation",
    "Singh & Krishnan 2019",
    an.FilterResponseNorm,
    eps=1e-6,
    learnable_eps=None,
    tlu=True,
)
def _frn(plan: Plan, eps: float, learnable_eps: bool | None, tlu: bool) -> None:
    def make(place: Place) -> nn.Module:
        # Where there is one value, x / |x| is a bare sign unless ε is learned.
        learn = place.positions == 1 if learnable_eps is None else learnable_eps
        return an.FilterResponseNorm(place.channels, eps=eps, learnable_eps=learn)

    def same(module: nn.Module, _: Place) -> bool:
        return isinstance(module, an.FilterResponseNorm)

    def carry_(new: nn.Module, old: nn.Module) -> None:
        copy_affine_(new, old)
        if isinstance(new, an.FilterResponseNorm) and new.eps_l is not None:
            new.eps_l.requires_grad_(new.weight.requires_grad)

    if tlu:
        for norm in plan.norms:
            for name, module in norm.tail.items():
                if type(module) is nn.ReLU:
                    norm.tail[name] = an.TLU(norm.channels).to(**norm.place)
    norms = replace_norms(plan, make, same, carry_)
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
    return an.TLU(len(weight)).to(weight.device, weight.dtype).requires_grad_(weight.requires_grad)


def only_relus(plan: Plan, outputs: Iterable[Step]) -> dict[str, list[Step]]:
    """`nn.ReLU` modules that read nothing but `outputs`, which nobody else reads; and which of them.

    Only these can be taken out of a model: a functional ReLU, or one that is also called elsewhere, stays.
    """
    found: dict[str, list[Step]] = {}
    for step in outputs:
        calls = [user.calls[-1] if user.calls else None for user in plan.graph.readers(step)]
        call = calls[0] if len(set(calls)) == 1 else None
        if call is not None and type(call.module) is nn.ReLU and not plan.refused(call.path, call.module):
            found.setdefault(call.path, []).append(step)
    return {path: steps for path, steps in found.items() if len(plan.graph.calls[path]) == len(steps)}


@built_in("none", "no normalization", "nothing", "stock2019, repro2019 (baseline)", nn.Identity)
def _none(plan: Plan) -> None:
    plan.already += not plan.norms
    for norm in plan.norms:
        why = plan.why_not_hand_over(norm)
        if norm.layer is not None and why:
            plan.keep(norm.path, why)
        else:
            plan.hand_over(norm)
