"""What modules are to `convert` and `fold`: norms of channels, layers that a method made, hooks that a method hung on.

torch's own norms stand here; each room says of its modules what they are, when its method is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

__all__ = [
    "OTHER_NORMS",
    "Affine",
    "MethodHook",
    "Plain",
    "affine_of",
    "declare",
    "is_channel_norm",
    "is_method_layer",
    "is_norm",
    "method_hooks",
    "plain_of",
    "remove_method_hooks_",
]

Affine = Callable[[nn.Module], "tuple[Tensor, Tensor] | None"]
"""a and c of y = a x + c per channel, which a norm is in evaluation, in float64; None if it depends on its input."""
Plain = Callable[[nn.Module], "nn.Module | str"]
"""The plain module that computes what a method's module does in evaluation; or why there is none."""

OTHER_NORMS = (nn.LayerNorm, nn.RMSNorm)
"""Norms of each position by itself, not of channels over positions."""


def _by_statistics(norm: nn.Module) -> tuple[Tensor, Tensor] | None:
    """What torch's norms with running statistics are in evaluation."""
    mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    if not isinstance(norm, _NormBase) or mean is None or var is None:
        return None
    gain = torch.ones_like(var, dtype=torch.float64) if norm.weight is None else norm.weight.double()
    a = gain / torch.sqrt(var.double() + norm.eps)
    return a, (0.0 if norm.bias is None else norm.bias.double()) - a * mean.double()


_channel_norms: dict[type[nn.Module], Affine] = {
    _BatchNorm: _by_statistics,
    nn.GroupNorm: lambda _: None,
    _InstanceNorm: _by_statistics,
}
_method_layers: dict[type[nn.Module], Plain] = {}
_method_modules: dict[type[nn.Module], Plain] = {}


def declare(
    *,
    norms: Mapping[type[nn.Module], Affine] | None = None,
    layers: Mapping[type[nn.Module], Plain] | None = None,
    modules: Mapping[type[nn.Module], Plain] | None = None,
) -> None:
    """Say what the modules of a method are: norms over the channels in axis 1, any of which can stand where another
    one stood; layers with a gain and an offset of their own; other modules that `fold` replaces."""
    _channel_norms.update(norms or {})
    _method_layers.update(layers or {})
    _method_modules.update(modules or {})


def is_channel_norm(module: nn.Module) -> bool:
    return isinstance(module, tuple(_channel_norms))


def is_norm(module: nn.Module) -> bool:
    return is_channel_norm(module) or isinstance(module, OTHER_NORMS)


def is_method_layer(module: nn.Module) -> bool:
    return isinstance(module, tuple(_method_layers))


def affine_of(norm: nn.Module) -> tuple[Tensor, Tensor] | None:
    """a and c of y = a x + c per channel, which a norm is in evaluation; None if it uses statistics of its input."""
    return next(affine(norm) for kind, affine in _channel_norms.items() if isinstance(norm, kind))


def plain_of(module: nn.Module) -> nn.Module | str | None:
    """The plain module for one that a method made, or why there is none; None for what no method made."""
    kinds = {**_method_layers, **_method_modules}
    return next((plain(module) for kind, plain in kinds.items() if isinstance(module, kind)), None)


class MethodHook:
    """A forward pre-hook that a method hangs on a module, and that `fold` takes off again."""

    label = "a hook"


def method_hooks(module: nn.Module) -> list[str]:
    """The labels of what methods have hung on a module."""
    hooks: list[object] = list(module._forward_pre_hooks.values())
    return [hook.label for hook in hooks if isinstance(hook, MethodHook)]


def remove_method_hooks_(module: nn.Module) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, MethodHook)]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
