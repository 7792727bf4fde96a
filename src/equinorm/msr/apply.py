"""Mean shift rejection put on a model, in place, and the parameter groups it asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..models.flat import refuse_shards
from ..models.inputs import call
from ..models.layers import CONVOLUTIONS, TRANSPOSED, LayerReport, select, tied_weights
from ..models.modes import evaluating
from ..models.parametrized import originals, parametrized_layers, why_not_parametrize
from ..models.saving import guard_saving_
from .functional import unit_init_
from .parametrization import ScaledKernel

__all__ = [
    "DEFAULT_LOG_GAIN",
    "first_spatial",
    "is_spatial",
    "mean_shift_rejection_",
    "parameter_groups",
    "scaled_kernels",
    "why_not_scale",
]


DEFAULT_LOG_GAIN = math.log(0.5)
"""ruff2020 says 0.8 or less; with 0.5 a network of 54 residual blocks keeps its scale, with 0.8 it explodes."""


def mean_shift_rejection_(
    model: nn.Module,
    exclude_first: bool = True,
    log_gain: float = DEFAULT_LOG_GAIN,
    *,
    init: bool = True,
    scale_first: bool = False,
    example_inputs: Any = None,
    keep: Iterable[str] = (),
    layers: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
) -> LayerReport:
    """Turn every spatial kernel of `model` into e^g · V, drawn anew by `zero_mean_init_` with g = `log_gain`.

    Spatial are convolutions whose window has more than one point. The first of them is left as it is: a shift
    of its input, the data, is information (ruff2020, section 1). "First" is by registration; with
    `example_inputs` (a tensor, a tuple of arguments or a dict of keyword arguments) by execution. `scale_first`
    makes e^g · V of it too, with V of unit length but not zero-mean (section 3.1 has "each" kernel).
    `exclude_first=False` treats it as all others.

    `log_gain`: ruff2020 sets e^g to 0.8 and says that smaller values start better. The default fits deep
    residual networks, where every block adds to the stream. In a chain without skips each layer multiplies
    instead, and e^g = 1.71 keeps the variance: `log_gain=math.log(1.71)`; see docs/mean-shift-rejection.md.
    `init=False` keeps the weights and with them the function: V has length 1, but its mean is what it is.

    `keep`: names or patterns of modules or parameters that stay as they are. `layers`: the names of the layers that
    are meant, all of them unless given.

    Make the optimizer afterwards, g is new. Returns which layers were changed, which not and why.

    >>> print(mean_shift_rejection_(model, keep=["decoder"]))
    """
    refuse_shards(model, "mean_shift_rejection_", "put it on the model before it is sharded")
    first = first_spatial(model, example_inputs) if exclude_first else None
    scaled: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    tied = tied_weights(model)
    for name, layer, why in select(model, (*CONVOLUTIONS, *TRANSPOSED), keep, layers):
        if layer is first and not scale_first:
            skipped[name] = "the first spatial convolution: it looks at the data"
        elif why := why or why_not_scale(layer) or why_not_parametrize(layer, tied):
            skipped[name] = why
        else:
            scaled[name] = layer
    guard_saving_(model)
    for layer in scaled.values():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        centred = layer is not first
        parametrize.register_parametrization(layer, "weight", ScaledKernel(weight, centred))
        if init:
            unit_init_(originals(layer).original, generator, centred)
            originals(layer)[0].g.data.fill_(log_gain)
    return LayerReport(tuple(scaled), skipped)


def why_not_scale(layer: nn.Module) -> str | None:
    """Why the method is not for a layer that is not linear; None if it is."""
    if isinstance(layer, TRANSPOSED):
        # With a stride, an output sees only part of the window, and that part need not sum to zero.
        return "a transposed convolution: a window that sums to zero does not make it reject a shift"
    return None if is_spatial(layer) else "its window is a single point"


def is_spatial(layer: nn.Module) -> bool:
    """Whether a layer is a convolution whose window has more than one point."""
    return isinstance(layer, CONVOLUTIONS) and math.prod(layer.kernel_size) > 1


def first_spatial(model: nn.Module, example_inputs: Any = None) -> nn.Module | None:
    """The first spatial convolution that runs on these inputs or, without any, that the model registers."""
    spatial = [layer for layer in model.modules() if is_spatial(layer)]
    if example_inputs is None or not spatial:
        return spatial[0] if spatial else None
    order: list[nn.Module] = []
    hooks = [layer.register_forward_pre_hook(lambda layer, _: order.append(layer)) for layer in spatial]
    try:
        with evaluating(model), torch.no_grad():
            call(model, example_inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not order:
        raise ValueError("the example inputs run through no spatial convolution of the model")
    return order[0]


def scaled_kernels(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of every layer whose weight is a `ScaledKernel`."""
    yield from parametrized_layers(model, ScaledKernel)


def parameter_groups(model: nn.Module, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: V and g without weight decay, everything else with `weight_decay`.

    LUMA takes the place of decay on V and g has none (ruff2020, sections 1 and 3.4). The paper decays nothing
    else either, which is the default; then all parameters are one group, and a fused optimizer does them at once.

    >>> torch.optim.SGD(parameter_groups(model, weight_decay=5e-4), lr=0.4, momentum=0.9)
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not weight_decay:
        return [{"params": parameters, "weight_decay": 0.0}]
    layers = [originals(layer) for _, layer in scaled_kernels(model)]
    own = {id(p) for layer in layers for p in (layer.original, layer[0].g)}
    groups = [
        {"params": [p for p in parameters if id(p) in own], "weight_decay": 0.0},
        {"params": [p for p in parameters if id(p) not in own], "weight_decay": weight_decay},
    ]
    return [group for group in groups if group["params"]]
