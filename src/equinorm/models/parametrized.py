"""Layers with a parametrized weight (`torch.nn.utils.parametrize`): which can have one, which have, and plain again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = [
    "bake_weight_",
    "bake_weights_",
    "dtype_in_use",
    "originals",
    "parametrized_layers",
    "why_not_parametrize",
]


def why_not_parametrize(layer: nn.Module, tied: Mapping[int, list[str]]) -> str | None:
    """Why the weight of `layer` cannot be parametrized, None if it can; raises if it does not exist yet."""
    if parametrize.is_parametrized(layer, "weight"):
        return "its weight is parametrized already"
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is not a parameter of its own"
    if isinstance(weight, nn.UninitializedParameter):
        raise ValueError(f"{layer} has no weight yet: run the model once, then apply the method")
    if id(weight) in tied:
        # The other name would go on meaning the bare tensor.
        return f"its weight is shared: {' = '.join(tied[id(weight)])}"
    return None


def originals(layer: nn.Module) -> Any:
    """The ParametrizationList of a layer's weight."""
    return layer.parametrizations["weight"]  # type: ignore[index]


def parametrized_layers(model: nn.Module, *kinds: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of every layer whose weight is parametrized by one of `kinds`."""
    for name, layer in model.named_modules():
        if parametrize.is_parametrized(layer, "weight") and isinstance(originals(layer)[0], kinds):
            yield name, layer


def bake_weights_(layers: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Make the weights of layers that have one parametrization each plain, all or none; returns the layers' names."""
    for name, layer in layers.items():
        if len(originals(layer)) > 1:
            raise ValueError(f"{name}.weight has further parametrizations on top; remove those first")
    for layer in layers.values():
        bake_weight_(layer)
    return tuple(layers)


def bake_weight_(layer: nn.Module) -> None:
    """Replace a parametrized weight by its present value, a parameter as before, frozen if it was.

    A parametrized module has a class of its own, which its deep copies share; torch takes `weight` off that class,
    and so off all of them. A new class keeps the others whole.
    """
    kind = type(layer)
    content = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    layer.__class__ = type(kind.__name__, kind.__bases__, content)
    with torch.enable_grad():  # torch tells from the result whether it is to be trained
        parametrize.remove_parametrizations(layer, "weight")
    weight = layer._buffers.pop("weight", None)
    if weight is not None:  # where nothing requires a gradient, torch makes the weight a buffer
        layer.weight = nn.Parameter(weight, requires_grad=False)


def dtype_in_use(v: Tensor) -> torch.dtype:
    """In which precision a weight that is made of v now will be used.

    Under autocast, on CUDA and with gradients on, an operation would round it to autocast's precision next, and torch
    caches such a rounding for plain parameters only. `parametrize.cached()` may keep it for a place without autocast.
    """
    rounded = torch.is_autocast_enabled("cuda") and torch.is_grad_enabled() and not parametrize._cache_enabled
    return torch.get_autocast_dtype("cuda") if rounded else v.dtype
