"""The weight norm family put on the layers of a model, in place."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..models.filters import centre_filters, filter_norm
from ..models.flat import refuse_shards
from ..models.layers import LAYERS, TRANSPOSED, LayerReport, fans, filter_dim, select, tied_weights
from ..models.parametrized import originals, why_not_parametrize
from ..models.patterns import Keep
from ..models.saving import guard_saving_
from .parametrizations import CentredWeightNorm, ScaledWeightNorm, WeightNorm, WeightStandardization

__all__ = [
    "centred_weight_norm_",
    "have_directions",
    "scaled_weight_norm_",
    "weight_norm_",
    "weight_standardization_",
    "why_no_filters",
]


def weight_norm_(model: nn.Module, *, keep: Iterable[str] = (), layers: Iterable[str] | None = None) -> LayerReport:
    """Weight norm, w = g · v / ‖v‖ per filter, on every linear and convolutional layer (arpit2019, section 4).

    The function of the model does not change. State-dict keys are those of torch's own `weight_norm`, which
    `data_dependent_init_` and `fold` know as well: `original0` is g, `original1` is v. Make the optimizer afterwards.

    `keep`: names or patterns of modules or parameters that stay as they are. `layers`: the names of the layers that
    are meant, all of them unless given. The other methods of the family take both too.

    >>> print(weight_norm_(model, keep=["head"]))
    """
    selected, skipped = _select(model, keep, layers, centred=False)
    guard_saving_(model)
    for layer in selected.values():
        parametrize.register_parametrization(layer, "weight", WeightNorm(filter_dim(layer)), unsafe=True)
    return LayerReport(tuple(selected), skipped)


def centred_weight_norm_(
    model: nn.Module, *, keep: Iterable[str] = (), layers: Iterable[str] | None = None
) -> LayerReport:
    """Centred weight norm (Huang et al. 2017) on every linear and convolutional layer: see `CentredWeightNorm`.

    Filters lose their means, so the function of the model changes: for the start of training.

    >>> centred_weight_norm_(model)
    """
    selected, skipped = _select(model, keep, layers, centred=True)
    guard_saving_(model)
    for layer in selected.values():
        parametrize.register_parametrization(layer, "weight", CentredWeightNorm(filter_dim(layer)), unsafe=True)
    return LayerReport(tuple(selected), skipped)


def weight_standardization_(
    model: nn.Module, *, keep: Iterable[str] = (), layers: Iterable[str] | None = None, eps: float = 1e-5
) -> LayerReport:
    """Weight standardization (Qiao et al. 2019) on every linear and convolutional layer.

    Layers lose their filters' means and lengths: for the start of training, of layers that a norm follows
    (leave the last one out with `keep`). The weights stay the parameter objects they were.

    >>> weight_standardization_(model, keep=["head"])
    """
    selected, skipped = _select(model, keep, layers, centred=True)
    guard_saving_(model)
    for layer in selected.values():
        parametrize.register_parametrization(layer, "weight", WeightStandardization(filter_dim(layer), eps))
    return LayerReport(tuple(selected), skipped)


@torch.no_grad()
def scaled_weight_norm_(
    model: nn.Module,
    *,
    linear: Collection[str] = (),
    branch_ends: Collection[str] = (),
    blocks: int | None = None,
    learnable: bool = True,
    keep: Iterable[str] = (),
    layers: Iterable[str] | None = None,
) -> LayerReport:
    """Scaled weight norm on every linear and convolutional layer, initialised: γ = 1, biases 0, v as it is.

    arpit2019, section 5: a layer that is followed by a ReLU has scale √(2 fan-in / fan-out), any other one
    √(fan-in / fan-out), so that a layer keeps the squared norm of its input in expectation over v. In a
    residual network with B blocks the output of each branch is divided by B, which keeps ‖f(x)‖² within a
    factor of e² of ‖x‖²; here the weight of the branch's last layer is divided.

    `linear`: the layers, by name, that no ReLU follows. `branch_ends`: the last layer of each residual branch,
    taken as linear; `blocks` is B, the number of names given unless stated. `learnable=False` freezes γ.

    >>> scaled_weight_norm_(model, linear=["fc"], branch_ends=[f"blocks.{i}.conv2" for i in range(54)])
    """
    selected, skipped = _select(model, keep, layers, centred=False)
    if unknown := {*linear, *branch_ends} - {*selected, *skipped}:
        raise ValueError(f"no linear or convolutional layer is called {sorted(unknown)}")
    if blocks is not None and blocks < 1:
        raise ValueError(f"blocks is the number of residual blocks, at least 1; got {blocks}")
    branches = blocks or len(branch_ends)
    kept = Keep(model, keep)
    guard_saving_(model)
    for name, layer in selected.items():
        fan_in, fan_out = fans(layer)
        scale = math.sqrt((1 if name in {*linear, *branch_ends} else 2) * fan_in / fan_out)
        if name in branch_ends:
            scale /= branches
        norm = ScaledWeightNorm(scale, filter_dim(layer))
        parametrize.register_parametrization(layer, "weight", norm, unsafe=True)
        gamma = originals(layer).original0
        gamma.fill_(1.0)
        gamma.requires_grad_(learnable and gamma.requires_grad)
        if layer.bias is not None and f"{name}.bias".lstrip(".") not in kept:
            layer.bias.zero_()  # type: ignore[operator]
    return LayerReport(tuple(selected), skipped)


def _select(
    model: nn.Module, keep: Iterable[str], layers: Iterable[str] | None, *, centred: bool
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """(layers by name, why others were skipped); whatever is wrong is raised here, before any change."""
    refuse_shards(model, "a method of the weight norm family", "put it on the model before it is sharded")
    selected: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    tied = tied_weights(model)
    for name, layer, why in select(model, LAYERS, keep, layers):
        if why := why or why_no_filters(layer, centred) or why_not_parametrize(layer, tied):
            skipped[name] = why
        elif not have_directions(layer, centred):
            raise ValueError(
                f"{name or 'the model'} has a filter of length 0{' without its mean' if centred else ''}, which "
                "has no direction: initialise its weight, or leave the layer out with `keep`"
            )
        else:
            selected[name] = layer
    return selected, skipped


def why_no_filters(layer: nn.Module, centred: bool = False) -> str | None:
    """Why the filters of a layer cannot be normed one by one (less their means, if `centred`); None if they can."""
    if isinstance(layer, TRANSPOSED) and layer.groups > 1:
        return "a grouped transposed convolution: its filters are not slices of its weight"
    if centred and fans(layer)[0] == 1:
        return "filters of one weight: nothing is left of them without their mean"
    return None


def have_directions(layer: nn.Module, centred: bool = False) -> bool:
    """Whether no filter of a layer has length 0 (less its mean, if `centred`); True where nothing is known."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    directions = centre_filters(weight.detach(), filter_dim(layer)) if centred else weight.detach()
    return directions.is_meta or bool((filter_norm(directions, filter_dim(layer)) > 0).all())
