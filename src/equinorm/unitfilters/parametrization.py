"""Layers whose filters have length 1, times a gain each: w = gain · v for `torch.nn.utils.parametrize`.

v is the weight's own parameter object, which the optimizer moves and `UnitFilters` holds on the sphere. The gain is a
buffer, set once (by `unit_filters_` or from data by `data_init_`), or with `learned=True` a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..models.flat import refuse_shards
from ..models.layers import LAYERS, TRANSPOSED, LayerReport, filter_dim, select, tied_weights
from ..models.parametrized import originals, parametrized_layers, why_not_parametrize
from ..models.saving import guard_saving_
from ..models.unwrapping import unwrap
from .functional import Filters, Over, mean_over, project_all_

__all__ = ["UnitFilter", "has_unit_filters", "parameter_groups", "unit_filters_"]


class UnitFilter(nn.Module):
    """w = gain · v per filter, with v of length 1 (and of zero mean).

    A weight that is assigned is taken apart: gain is the length of a filter (without its mean, if `zero_mean`), v its
    direction; a filter of zeros stays one, with gain 1. Nothing here keeps v at length 1 while it is trained:
    `UnitFilters` does.
    """

    gain: Tensor
    holds_length = True  # a direction has no length that could decay

    def __init__(self, weight: Tensor, *, dim: int = 0, zero_mean: bool | Over = False, learned: bool = False) -> None:
        super().__init__()
        self.dim, self.over, self.learned = dim, mean_over(zero_mean), learned
        gain = torch.ones(weight.shape[dim], device=weight.device, dtype=weight.dtype)
        if learned:
            self.gain = nn.Parameter(gain, requires_grad=weight.requires_grad)
        else:
            self.register_buffer("gain", gain)

    def forward(self, v: Tensor) -> Tensor:
        return self._along_filters(self.gain, v) * v

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> Tensor:
        v = weight.clone()
        project_all_([Filters(v, self.dim, self.over)])
        gain = (weight * v).sum(Filters(v, self.dim).within)  # v has the direction of the weight without its mean
        self.gain.copy_(gain.where(gain > 0, 1.0))
        return v

    def _along_filters(self, gain: Tensor, v: Tensor) -> Tensor:
        return gain.reshape([-1 if axis == self.dim else 1 for axis in range(v.ndim)])

    def filters(self, v: Tensor) -> Filters:
        """What `functional` needs to know of v."""
        return Filters(v, self.dim, self.over)

    def extra_repr(self) -> str:
        mean = f", zero_mean={self.over!r}" if self.over else ""
        return f"{'learned' if self.learned else 'fixed'} gain, dim={self.dim}{mean}"


def has_unit_filters(layer: nn.Module) -> bool:
    """Whether the weight of this very layer is a gain times filters of length 1."""
    return parametrize.is_parametrized(layer, "weight") and isinstance(originals(layer)[0], UnitFilter)


@torch.no_grad()
def unit_filters_(
    model: nn.Module,
    *,
    keep: Iterable[str] = (),
    zero_mean: bool | Over = False,
    learned: bool = False,
    classifier: bool = False,
    layers: Iterable[str] | None = None,
) -> LayerReport:
    """Make every filter of linear and convolutional layers a unit vector times a gain, except in the last layer.

    The function stays as it is; with `zero_mean` it changes, since filters lose their means: True for the mean over
    inputs and window, "window" for the mean over the window of each input channel.

    Args:
        model: changed in place. Make the optimizer afterwards if `learned`; without, parameters are what they were.
        keep: names and patterns of modules or parameters that are left as they are.
        learned: gains are parameters, not buffers.
        classifier: the last layer that the model registers is treated as all others.
        layers: the names of all layers that are meant, the last one too if it is among them.

    Returns which layers were changed, and which not and why.

    >>> print(unit_filters_(model, keep=["stem"]))
    """
    refuse_shards(model, "unit_filters_", "put it on the model before it is sharded")
    model, over = unwrap(model), mean_over(zero_mean)
    tied = tied_weights(model)
    every = list(select(model, LAYERS, keep, layers))
    changed: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    for number, (name, layer, why) in enumerate(every):
        if number == len(every) - 1 and layers is None and not classifier:
            why = why or "the last layer"
        if why := why or why_not_parametrize(layer, tied) or why_no_directions(layer, over):
            skipped[name] = why
        else:
            changed[name] = layer
    guard_saving_(model)
    for layer in changed.values():
        weight = layer.weight
        assert isinstance(weight, Tensor)
        gains = UnitFilter(weight, dim=filter_dim(layer), zero_mean=over or False, learned=learned)
        parametrize.register_parametrization(layer, "weight", gains)
    return LayerReport(tuple(changed), skipped)


def why_no_directions(layer: Any, over: Over | None) -> str | None:
    """Why the filters of a layer have no directions that could be kept, None if they have."""
    if isinstance(layer, TRANSPOSED) and layer.groups > 1:
        return "a grouped transposed convolution: its filters are not slices of its weight"
    weight = layer.weight.detach()
    filters = Filters(weight.clone(), filter_dim(layer), over)
    if filters.mean_axes and weight[0].numel() == 1:
        return "filters of one weight: nothing is left of them without their mean"
    if weight.is_meta:
        return None
    project_all_([filters])
    if not filters.weight.abs().amax(filters.within).all():
        return f"a filter of length 0{' without its mean' if filters.mean_axes else ''}, which has no direction"
    return None


def parameter_groups(model: nn.Module, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Parameter groups for one optimizer: v and the gains without weight decay, everything else with `weight_decay`.

    A filter whose length is fixed cannot decay.

    >>> torch.optim.AdamW(parameter_groups(model, weight_decay=0.01), lr=1e-3)
    """
    own: set[int] = set()
    for _, layer in parametrized_layers(unwrap(model), UnitFilter):
        own.update(id(p) for p in originals(layer).parameters())
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if id(p) in own], "weight_decay": 0.0},
        {"params": [p for p in parameters if id(p) not in own], "weight_decay": weight_decay},
    ]
    return [group for group in groups if group["params"]]
