"""What plans of methods are made of: norms in the place of norms, layers in that of layers, parametrized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from .graph import Call, Step
from .kinds import method_hooks
from .noise import add_input_noise_
from .parametrized import originals
from .plan import Norm, Plan
from .surgery import copy_affine_, describe, gain_and_offset, is_parametrized, outputs_of, with_tail

__all__ = [
    "BATCH_NORMS",
    "Parametrization",
    "Place",
    "Roles",
    "batchnorm_for",
    "branch_ends",
    "count_already",
    "fuse_layers",
    "instead_of_norms",
    "norm_behind",
    "only_relus",
    "parametrize_layers",
    "put_noise",
    "replace_norms",
]


# -- norms in the place of norms -------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a norm is to stand."""

    channels: int
    ndim: int
    positions: int
    """Spatial positions in the example, 1 if there are no spatial axes, 0 if that is not known."""
    affine: bool = True
    """Whether the norm is to have parameters of its own."""


def replace_norms(
    plan: Plan,
    make: Callable[[Place], nn.Module | str],
    is_same: Callable[[nn.Module, Place], bool],
    carry_: Callable[[nn.Module, nn.Module], None] = copy_affine_,
) -> dict[Step, nn.Module]:
    """Replace all norms; where there is none of any kind, put one behind every layer but the last.

    `make` gives the new norm or says why there is none; `carry_(new, old)` hands over the parameters. Returns
    the new norms by the step whose output they normalize or replace.
    """
    made: dict[Step, nn.Module] = {}
    for norm in plan.norms:
        affine = gain_and_offset(norm.module) != (None, None)
        place = Place(norm.channels, norm.ndim, norm.positions, affine)
        if is_same(norm.module, place):
            plan.keep(norm.path, f"it is a {describe(norm.module)} already", already=True)
            continue
        new = make(place)
        if isinstance(new, str):
            plan.keep(norm.path, new)
            continue
        new = new.to(**norm.place)
        carry_(new, norm.module)
        plan.swap(norm.path, with_tail(new, norm.tail))
        if len(norm.calls) == 1:
            made[norm.output] = new
    if plan.has_no_norms and not plan.already:
        made |= _put_behind_layers(plan, make)
    return made


def _put_behind_layers(plan: Plan, make: Callable[[Place], nn.Module | str]) -> dict[Step, nn.Module]:
    made: dict[Step, nn.Module] = {}
    ends = plan.ends()
    for call in plan.layers():
        new = "the last layer" if call.path in ends else plan.why_no_norm_behind(call) or norm_behind(plan, call, make)
        if isinstance(new, str):
            plan.keep(call.path, new)
        elif (step := plan.graph.layer_step(call)) is not None:
            made[step] = new
    return made


def norm_behind(plan: Plan, call: Call, make: Callable[[Place], nn.Module | str]) -> nn.Module | str:
    """Note that a new norm goes behind a layer; returns it, or why there is none."""
    step = plan.graph.layer_step(call)
    assert step is not None
    layer, weight = call.module, call.module.weight
    assert isinstance(weight, Tensor)
    new = make(Place(outputs_of(layer), step.ndim, step.value.shape[2:].numel()))
    if isinstance(new, nn.Module):
        new = new.to(device=weight.device, dtype=weight.dtype).requires_grad_(weight.requires_grad)
        row = plan.converted.get(call.path)
        plan.change(call.path, f"{row.now if row else describe(layer)} + {describe(new)}")
        plan.norms_behind.append((layer, new))
    return new


BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
"""By the number of axes of their input."""


def batchnorm_for(place: Place, eps: float = 1e-5, momentum: float | None = 0.1) -> nn.Module:
    return BATCH_NORMS[place.ndim](place.channels, eps=eps, momentum=momentum, affine=place.affine)


def count_already(plan: Plan, kinds: set[type[nn.Module]]) -> None:
    """Note the modules that are what a method would make of them."""
    for path, module in plan.graph.modules.items():
        if type(module) in kinds:
            plan.keep(path, f"it is a {type(module).__name__} already", already=True)


# -- layers that take the place of layer and norm --------------------------------------------------------------


def fuse_layers(
    plan: Plan,
    make: Callable[[Call, Norm | None], nn.Module | str],
    is_same: Callable[[nn.Module], bool],
) -> None:
    """Replace every layer that a norm follows, and the norm; where there is no norm, every layer but the last."""
    norm_after = {norm.layer.path: norm for norm in plan.norms if norm.layer is not None}
    everywhere, ends = plan.has_no_norms and not plan.already, plan.ends()
    reasons: dict[str, str] = {}
    for call in plan.layers():
        norm = norm_after.get(call.path)
        if is_same(call.module):
            plan.keep(call.path, f"it is a {describe(call.module)} already", already=True)
            reasons[call.path] = f"{call.path}, which feeds it, is a {describe(call.module)} and has no place for it"
            continue
        if norm is None and not everywhere:
            plan.keep(call.path, plan.refused(call.path, call.module, replace=False) or "no norm belongs to it")
            continue
        if norm is None and call.path in ends:
            plan.keep(call.path, "the last layer")
            continue
        new = plan.why_not(call, replace=True) or make(call, norm)
        if isinstance(new, str):
            plan.keep(call.path, new)
            reasons[call.path] = f"{call.path}, which feeds it, is kept"
            continue
        if norm is not None:
            plan.remove(norm, f"its work is done by {call.path}")
        plan.swap(call.path, new)
    for norm in plan.norms:
        if norm.path not in plan.converted:
            plan.leave(norm, norm.alone or reasons[norm.layer.path if norm.layer else ""])


# -- parametrized weights --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parametrization:
    """What the methods of the weight norm family have in common, and where they differ."""

    kind: type[nn.Module]
    apply_: Callable[..., Any]
    """Takes the model and the names of its `layers`; raises, if at all, before it changes anything."""
    why_not: Callable[[nn.Module], str]
    """Why a layer cannot have it; empty if it can."""
    same: tuple[type[nn.Module], ...] = ()
    """Other parametrizations that are the same method."""


def parametrize_layers(plan: Plan, method: Parametrization, only: set[str] | None = None, **options: Any) -> set[str]:
    """Note a parametrization for all layers (of those in `only`); returns the paths of those that have it then."""
    chosen: dict[str, nn.Module] = {}
    same: set[str] = set()
    for call in plan.layers():
        path, layer = call.path, call.module
        if is_parametrized(layer) and isinstance(originals(layer)[0], (method.kind, *method.same)):
            plan.keep(path, f"it is a {describe(layer)} already", already=True)
            same.add(path)
        elif only is not None and path not in only:
            plan.keep(path, plan.refused(path, layer, replace=False) or "no norm belongs to it")
        elif why := plan.why_not(call) or method.why_not(layer):
            plan.keep(path, why)
        else:
            chosen[path] = layer
    if chosen:
        # If anything raises it is this, before it changes anything; so it is the first step.
        plan.later(lambda: method.apply_(plan.model, layers=list(chosen), **options))
    for path, layer in chosen.items():
        plan.change(path, f"{describe(layer)} with {method.kind.__name__}")
    return same | set(chosen)


def instead_of_norms(plan: Plan, method: Parametrization) -> None:
    """Parametrize all layers; the norms behind them go, and leave their gains and offsets to them."""
    normed = parametrize_layers(plan, method)
    for norm in plan.norms:
        if why := why_not_instead(plan, norm, normed):
            plan.leave(norm, why)
        else:
            plan.hand_over(norm)


def why_not_instead(plan: Plan, norm: Norm, normed: set[str]) -> str:
    """Why a parametrized weight does not take the place of a norm; empty if it does."""
    if norm.layer is None:
        return norm.alone
    if norm.layer.path not in normed:
        return f"{norm.layer.path}, which feeds it, is kept"
    return plan.why_no_bias(norm.layer)


# -- noise -----------------------------------------------------------------------------------------------------


def put_noise(plan: Plan, amplitude: float, per: str = "element") -> None:
    """Note that noise goes to the inputs of residual units (ruff2020, section 4.4).

    A unit is the module in whose code a residual sum stands, if what it adds to is all that the module reads:
    its input, then, is where skip and branch begin.
    """
    units: dict[str, nn.Module] = {}
    for residual in plan.graph.residual_sums:
        unit = residual.sum.calls[-1]
        if refused := plan.refused(unit.path, unit.module, replace=False):
            plan.keep(unit.path, refused)
        elif method_hooks(unit.module):
            plan.keep(unit.path, "its input is noisy already", already=True)
        elif unit.path and unit.inputs == [residual.start]:
            units[unit.path] = unit.module
        else:
            plan.keep(unit.path, "no noise: its residual sum is not in a module whose only input is what it adds to")
    for path, module in units.items():
        plan.change(path, f"{describe(module)} with InputNoise")
    plan.later(lambda: add_input_noise_(units.values(), amplitude, per))


# -- what layers are to a net ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roles:
    """What the layers of a net that was just built are to it, by name."""

    linear: tuple[str, ...] = ()
    """Layers that no ReLU follows."""
    branch_ends: tuple[str, ...] = ()
    """The last layers of residual branches."""
    classifier: str | None = None


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
