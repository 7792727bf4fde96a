"""Operations on modules: replace them, put norms behind them, move gains and offsets into them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm

from .graph import Call, Step
from .layers import LAYERS, TRANSPOSED
from .parametrized import originals

# -- describing and replacing modules --------------------------------------------------------------------------


def torch_layer(layer: nn.Module) -> Any:
    """The torch class of a linear or convolutional layer."""
    return next(kind for kind in LAYERS if isinstance(layer, kind))


def outputs_of(layer: nn.Module) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


def bias_of(layer: nn.Module) -> Tensor | None:
    bias = layer._parameters.get("bias")
    return bias if isinstance(bias, Tensor) else None


def is_parametrized(module: nn.Module) -> bool:
    return parametrize.is_parametrized(module, "weight")


def describe(module: nn.Module) -> str:
    """A module's class; with what its weight is parametrized by, and the norm put behind it."""
    if type(module) is nn.Sequential:
        return " + ".join(describe(child) for child in module) or "Sequential()"
    if isinstance(inner := getattr(module, "wrapped_layer", None), nn.Module):
        return f"{type(module).__name__} of {describe(inner)}"
    text = type(module).__name__
    if is_parametrized(module):
        text = f"{type(module).__bases__[0].__name__} with {describe_parametrizations(module)}"
    return f"{text} + {describe(module.norm)}" if is_attached(module) else text  # type: ignore[arg-type]


def has_gain(parametrization: nn.Module) -> bool:
    """Whether a weight is made of a gain per filter (`original0`) and of directions: weight norm and its kin."""
    return isinstance(parametrization, _WeightNorm) or getattr(parametrization, "has_gain", False)


def describe_parametrizations(layer: nn.Module) -> str:
    return ", ".join(type(p).__name__.lstrip("_") for p in originals(layer))


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that would be lost with it; those of `attach_norm_` do not count."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hook is not _through_norm for hooks in kinds for hook in hooks.values())


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` where `old` is, under all its names, in the same mode and with the norm behind it if it has one."""
    new.train(old.training)
    if is_attached(old):
        attach_norm_(new, old.norm)  # type: ignore[arg-type]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not old:
                continue
            if isinstance(new, nn.Identity) and name == "norm" and is_attached(parent):
                detach_norm_(parent)
            else:
                parent.register_module(name, new)


def with_tail(norm: nn.Module | None, tail: dict[str, nn.Module]) -> nn.Module:
    """A norm (or none), then the modules that were called on its output."""
    if not tail:
        return nn.Identity() if norm is None else norm
    return nn.Sequential(OrderedDict(tail if norm is None else {"norm": norm, **tail}))


def norm_and_tail(call: Call) -> tuple[Step, dict[str, nn.Module]] | None:
    """What a norm with a forward of its own does: its norm op, and the children it calls one after another on it.

    None if there is anything else between its input and its output.
    """
    norms = [step for step in call.own_steps if step.op.endswith("_norm")]
    if len(norms) != 1 or [s for s in norms[0].sources if not s.is_state] != call.inputs:
        return None
    at, tail = norms[0], dict[str, nn.Module]()
    while call.outputs != [at]:
        deeper = [user.calls[user.calls.index(call) + 1 :] for user in at.users if call in user.calls]
        children = {calls[0] if calls else None for calls in deeper}
        child = children.pop() if len(children) == 1 and len(deeper) == len(at.users) else None
        if child is None or child.inputs != [at] or len(child.outputs) != 1:
            return None
        tail[child.path.removeprefix(call.path + ".")] = child.module
        at = child.outputs[0]
    return norms[0], tail


# -- norms behind layers ---------------------------------------------------------------------------------------
# By a hook: a container would change a layer's state-dict keys and hide its attributes from the model's code.


def attach_norm_(layer: nn.Module, norm: nn.Module) -> None:
    """Send what `layer` puts out through `norm`, which becomes its child of that name."""
    layer.register_module("norm", norm.train(layer.training))
    layer.register_forward_hook(_through_norm)


def detach_norm_(layer: nn.Module) -> None:
    for key in [key for key, hook in layer._forward_hooks.items() if hook is _through_norm]:
        del layer._forward_hooks[key]
    del layer.norm


def is_attached(layer: nn.Module) -> bool:
    return _through_norm in layer._forward_hooks.values()


def _through_norm(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
    return layer.norm(output)  # type: ignore[operator]


# -- gains and offsets -----------------------------------------------------------------------------------------


def gain_and_offset(norm: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The parameters γ and β of a norm, where it has them."""
    gain, offset = getattr(norm, "weight", None), getattr(norm, "bias", None)
    return gain if isinstance(gain, Tensor) else None, offset if isinstance(offset, Tensor) else None


@torch.no_grad()
def copy_affine_(new: nn.Module, old: nn.Module) -> None:
    """Give a norm the gain and offset of the one it replaces, where both have them."""
    for mine, given in zip(gain_and_offset(new), gain_and_offset(old), strict=True):
        if mine is not None and given is not None and mine.numel() == given.numel():
            mine.copy_(given.view_as(mine))
            mine.requires_grad_(given.requires_grad)


@torch.no_grad()
def scale_outputs_(layer: nn.Module, gain: Tensor) -> None:
    """Multiply a layer's weight (or the gain of its weight norm) and bias by one factor per output channel."""
    weight: Any = originals(layer).original0 if is_parametrized(layer) else layer.weight
    if isinstance(layer, TRANSPOSED) and not is_parametrized(layer):
        groups: Any = layer.groups  # the weight is (in, out / groups, *window)
        factor = gain.view(groups, 1, -1, *[1] * (weight.ndim - 2))
        scaled = (weight.unflatten(0, (groups, -1)) * factor.to(weight)).flatten(0, 1)
        weight.copy_(scaled)
    elif isinstance(layer, TRANSPOSED):
        weight.mul_(gain.view(1, -1, *[1] * (weight.ndim - 2)).to(weight))
    else:
        weight.mul_(gain.view(-1, *[1] * (weight.ndim - 1)).to(weight))
    if (bias := bias_of(layer)) is not None:
        bias.mul_(gain.to(bias))


@torch.no_grad()
def take_input_affine_(layer: nn.Module, a: Tensor, c: Tensor) -> None:
    """W (a x + c) + b = (W a) x + (b + W c): what was done to each input channel is done by weight and bias.

    For linear layers and convolutions that pad with nothing but their input.
    """
    weight, groups = layer.weight, getattr(layer, "groups", 1)
    assert isinstance(weight, Tensor)

    def meeting(values: Tensor) -> Tensor:
        """[inputs] -> [outputs, inputs / groups, 1, ...]: the input channels that each output sees."""
        seen = values.view(groups, 1, -1).expand(-1, len(weight) // groups, -1).flatten(0, 1)
        return seen.view(*seen.shape, *[1] * (weight.ndim - 2))

    exact = weight.double()
    shift_outputs_(layer, (exact * meeting(c)).flatten(1).sum(1))
    weight.copy_(exact * meeting(a))


@torch.no_grad()
def shift_outputs_(layer: nn.Module, offset: Tensor) -> None:
    """Add to the bias of a layer, which is made if there is none."""
    if (bias := bias_of(layer)) is not None:
        bias.add_(offset.to(bias))
    else:
        weight: Any = layer.weight
        values = offset.detach().to(device=weight.device, dtype=weight.dtype, copy=True)
        layer.bias = nn.Parameter(values, requires_grad=offset.requires_grad)


def inherit_affine_(layer: nn.Module, norm: nn.Module, with_offset: bool = True) -> None:
    """y -> γ y + β by the layer's own parameters: what its norm does where means are 0 and variances 1."""
    gain, offset = gain_and_offset(norm)
    if gain is not None:
        scale_outputs_(layer, gain)
    if offset is not None and with_offset:
        shift_outputs_(layer, offset)
