"""Caps as a method of `convert`: ReLU6, Hardtanh(0, c) and clamp(0, c) get a cap per channel, which carries a scale."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models.graph import LAYER_OPS, Call, Step
from ..models.plan import Plan
from ..models.surgery import describe
from ..registry import Method
from .layers import Cap, FunctionCaps, bounds_of, has_caps, put_caps_

__all__ = ["METHODS"]

_CAPPING = frozenset({"relu6", "hardtanh", "clamp", "clip"})
_MODULES = (nn.ReLU6, nn.Hardtanh)


def _plan(plan: Plan) -> None:
    for path, module in plan.graph.modules.items():
        if isinstance(module, Cap | FunctionCaps):
            plan.keep(path, f"it is a {type(module).__name__} already", already=True)
    steps = [step for step in plan.graph.steps if _cap_of(step) is not None]
    in_modules = {id(step) for step in steps if _as_module(plan, step)}
    by_owner: dict[str, dict[Call, list[Step]]] = {}
    for step in steps:
        if id(step) not in in_modules and (owner := _owner(plan, step)) is not None:
            by_owner.setdefault(owner.path, {}).setdefault(owner, []).append(step)
    for path, calls in sorted(by_owner.items(), key=lambda item: _depth(item[0]), reverse=True):  # inner ones first
        _as_functions(plan, path, calls)


def _cap_of(step: Step) -> float | None:
    """c, if a step is min(max(x, 0), c)."""
    if step.op not in _CAPPING or step.is_state:
        return None
    if step.op == "relu6":
        return 6.0
    low: Any
    high: Any
    low, high = (-1.0, 1.0) if step.op == "hardtanh" else (None, None)
    args, kwargs = step.node.args, step.node.kwargs
    low = args[1] if len(args) > 1 else kwargs.get("min", kwargs.get("min_val", low))
    high = args[2] if len(args) > 2 else kwargs.get("max", kwargs.get("max_val", high))
    return bounds_of(low, high)


def _as_module(plan: Plan, step: Step) -> bool:
    """Replace the module whose only call makes a step by a `Cap`; whether that was done or refused."""
    call = step.calls[-1] if step.calls else None
    if call is None or type(call.module) not in _MODULES or len(plan.graph.calls[call.path]) > 1 or not call.path:
        return False
    if why := plan.refused(call.path, call.module):
        plan.keep(call.path, why)
    else:
        plan.swap(call.path, _made(plan, step))
    return True


def _owner(plan: Plan, step: Step) -> Call | None:
    """The module call in whose code a function caps; of an `nn.ReLU6` that is called often, the caller."""
    calls = list(step.calls)
    while calls and type(calls[-1].module) in _MODULES:
        if why := plan.refused(calls[-1].path, calls[-1].module, replace=False):
            plan.keep(calls[-1].path, why)
            return None
        calls.pop()
    return calls[-1] if calls else None


def _as_functions(plan: Plan, path: str, calls: dict[Call, list[Step]]) -> None:
    """Put caps in the place of the functions that a module's code calls."""
    module = plan.graph.modules[path]
    if has_caps(module):
        return  # its own caps were counted above
    lists = [[(_cap_of(step), _place(step)) for step in steps] for steps in calls.values()]
    why = plan.refused(path, module, replace=False)
    if not why and any(other != lists[0] for other in lists):
        why = "its calls do not cap the same channels in the same order"
    if not why and hasattr(module, "caps"):
        why = "it has an attribute called caps already"
    if why:
        plan.keep(path, why)
        return
    steps = next(iter(calls.values()))
    # the kept modules inside it call functions too, which are counted but left alone
    seen = [step for step in next(iter(calls)).steps if _cap_of(step) is not None and _outside(plan, step, module)]
    numbers = {id(step): number for number, step in enumerate(steps)}
    order = [(float(_cap_of(step) or 0), numbers.get(id(step))) for step in seen]
    caps = FunctionCaps([_made(plan, step) for step in steps], order)
    plan.change(path, f"{describe(module)} with {len(steps)} caps", step=partial(put_caps_, module, caps))


def _outside(plan: Plan, step: Step, owner: nn.Module) -> bool:
    """Whether a step is called while no module inside `owner` has caps of its own."""
    outermost = next(number for number, call in enumerate(step.calls) if call.module is owner)
    return all(call.path not in plan.converted for call in step.calls[outermost + 1 :])


def _depth(path: str) -> int:
    """How many modules a module is inside of."""
    return len(path.split(".")) if path else 0


def _made(plan: Plan, step: Step) -> Cap:
    channels, axis = _place(step)
    cap = Cap(channels, float(_cap_of(step) or 0), axis)
    trains = any(parameter.requires_grad for parameter in plan.model.parameters())
    cap.cap.requires_grad_(trains)
    return cap.to(device=step.value.device, dtype=step.value.dtype)


def _place(step: Step) -> tuple[int, int]:
    """Channels of what a step reads, and their axis from the end: that of the layer it comes from."""
    shape = step.value.shape
    layer, seen = step, {step}
    waiting = list(step.sources)
    while waiting and layer.op not in LAYER_OPS:
        layer = waiting.pop(0)
        waiting += [source for source in layer.sources if source not in seen and not source.is_state]
        seen.update(layer.sources)
    linear = layer.op not in LAYER_OPS or layer.op == "linear"
    spatial = 0 if linear else int(layer.op[-2])  # conv2d, conv_transpose2d
    axis = -1 - spatial if len(shape) > spatial else -1
    return (int(shape[axis]), axis) if len(shape) else (1, -1)


@torch.no_grad()
def _plain(cap: nn.Module) -> nn.Module | str:
    assert isinstance(cap, Cap)
    values: Tensor = cap.cap
    if not bool((values == values[0]).all()):
        low, high = values.min().item(), values.max().item()
        return f"its caps differ from channel to channel, from {low:.4g} to {high:.4g}"
    number = values[0].item()
    return nn.ReLU6() if number == 6 else nn.Hardtanh(0.0, number)


@torch.no_grad()
def _plain_functions(caps: nn.Module) -> nn.Module | str:
    assert isinstance(caps, FunctionCaps)
    for number, which in caps.calls:
        if which is not None and not bool((caps.caps[which] == number).all()):
            return f"one of its caps is not {number:.4g} everywhere any more, which its code has"
    return nn.Identity()


METHODS = (
    Method(
        "caps",
        "a cap per channel in the place of ReLU6",
        "nothing",
        "equinorm",
        Cap,
        _plan,
        aliases=("cap", "relu6"),
        looks_for="ReLU6, Hardtanh(0, c) or clamp(0, c)",
        modules={Cap: _plain, FunctionCaps: _plain_functions},
    ),
)
