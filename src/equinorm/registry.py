"""The methods that `convert` knows by name, and what each of them does to a model.

A method is a function that is given a `Plan` and notes there, norm by norm and layer by layer, what is to be
changed, and what is kept and why.

>>> print(*equinorm.methods(), sep="\\n")
>>> equinorm.register_method("rms", norm=lambda channels, eps: MyRMSNorm2d(channels, eps), options={"eps": 1e-6})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from .models.graph import Call, Step
from .models.surgery import Norm, Plan, copy_affine_, describe, gain_and_offset, outputs_of, with_tail

__all__ = ["Method", "find_method", "methods", "register_method"]


@dataclass(frozen=True)
class Method:
    """A method that `convert` can put on a model."""

    name: str
    title: str
    kind: str
    """What it normalizes: "weight", "activation", "weight + activation" or "nothing"."""
    source: str
    """The paper, by the project's short name for it or by authors and year."""
    layer: Any
    """The layer class, or the function, that is put in."""
    options: Mapping[str, Any]
    """What `convert` takes for this method, with defaults."""
    plan: Callable[..., None] = field(repr=False, compare=False)
    """`plan(Plan, **options)` notes what is to be done."""

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.name}: {self.title} ({self.kind}; {self.source}){'; ' if options else ''}{options}"


_METHODS: dict[str, Method] = {}

_ELSEWHERE = {
    "enorm": "ENorm leaves all layers as they are and goes with the optimizer: "
    "equinorm.ENorm(model, optimizer, example_inputs).attach()",
    "pathsgd": "Path-SGD is an optimizer: equinorm.PathSGD(model, example_inputs, lr=...)",
}


def methods() -> tuple[Method, ...]:
    """All methods that `convert` knows.

    >>> [method.name for method in equinorm.methods() if method.kind == "weight"]
    """
    return tuple(_METHODS.values())


def find_method(name: str | Method) -> Method:
    if isinstance(name, Method):
        return name
    if not isinstance(name, str):
        raise TypeError(f"expected the name of a method, got {type(name).__name__}")
    if name not in _METHODS:
        hint = "; " + _ELSEWHERE[name.lower()] if name.lower() in _ELSEWHERE else ""
        raise ValueError(f"unknown method {name!r}; expected one of {', '.join(map(repr, _METHODS))}{hint}")
    return _METHODS[name]


def register_method(
    name: str,
    *,
    norm: Callable[..., nn.Module] | None = None,
    layer: Callable[..., nn.Module] | None = None,
    plan: Callable[..., None] | None = None,
    title: str = "",
    source: str = "",
    options: Mapping[str, Any] | None = None,
) -> Method:
    """Make a method of your own known to `convert`, by one of

    - `norm(channels, **options)`, which makes the module that takes the place of a norm,
    - `layer(layer, **options)`, which makes the module that takes the place of a linear or convolutional layer
      and of the norm behind it; a ValueError from it is the reason why that layer is kept,
    - `plan(plan, **options)`, which may do anything that `equinorm.surgery.Plan` offers.

    `options` are the options the method has, with their defaults.

    >>> register_method("l1norm", layer=lambda layer, p: L1Norm(layer, p), options={"p": 1.0})
    """
    if name in _METHODS:
        raise ValueError(f"there is a method called {name!r} already")
    if sum(given is not None for given in (norm, layer, plan)) != 1:
        raise TypeError("register_method takes one of norm, layer and plan")
    kind, work = "weight", plan
    if norm is not None:
        kind, work = "activation", _plan_from_norm(norm)
    elif layer is not None:
        work = _plan_from_layer(layer)
    assert work is not None
    method = Method(name, title or name, kind, source, norm or layer or plan, dict(options or {}), work)
    _METHODS[name] = method
    return method


def built_in(name: str, title: str, kind: str, source: str, layer: Any, **options: Any) -> Callable[..., Any]:
    def register(plan: Callable[..., None]) -> Callable[..., None]:
        _METHODS[name] = Method(name, title, kind, source, layer, options, plan)
        return plan

    return register


def _plan_from_norm(norm: Callable[..., nn.Module]) -> Callable[..., None]:
    made: set[type[nn.Module]] = {norm} if isinstance(norm, type) else set()

    def plan_(plan: Plan, **options: Any) -> None:
        _count_already(plan, made)

        def make(place: Place) -> nn.Module:
            module = norm(place.channels, **options)
            made.add(type(module))
            return module

        replace_norms(plan, make, lambda module, _: type(module) in made)

    return plan_


def _plan_from_layer(make: Callable[..., nn.Module]) -> Callable[..., None]:
    made: set[type[nn.Module]] = {make} if isinstance(make, type) else set()

    def plan_(plan: Plan, **options: Any) -> None:
        _count_already(plan, made)

        def fused(call: Call, norm: Norm | None) -> nn.Module | str:
            try:
                module = make(call.module, **options)
            except ValueError as error:
                return str(error)
            made.add(type(module))
            return module

        fuse_layers(plan, fused, lambda module: type(module) in made)

    return plan_


def _count_already(plan: Plan, kinds: set[type[nn.Module]]) -> None:
    for path, module in plan.graph.modules.items():
        if type(module) in kinds:
            plan.keep(path, f"it is a {type(module).__name__} already", already=True)


# -- norms in the place of norms -------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a norm is to stand."""

    channels: int
    ndim: int
    positions: int
    """Spatial positions in the example, 1 if there are no spatial axes."""
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
