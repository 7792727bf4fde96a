"""Effective learning rates and filter magnitudes.

A norm after a layer makes it blind to the length of its filters: BN(cWx) = BN(Wx). The gradient is then orthogonal to
the filter and shrinks with its length, so a filter of length ‖w‖ turns as one of length 1 would with the learning rate
lr/‖w‖² (ruff2020, section 4.3: the inverse square law; arpit2019, "role of weight decay", prints η/‖w‖, which goes
with the gradient at w: at ŵ = w/‖w‖ it is ‖w‖ times as long). Weight decay shortens filters and so raises that rate.
ruff2020 (section 1) finds filters that shrink until they learn nothing: `deflated_share`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..models.unwrapping import unwrap
from .probe import Batch, Loss, Probe, Result, by_filter, filters


@dataclass(frozen=True, eq=False)
class FilterNorms(Result):
    """‖w‖ of every filter of every weight."""

    norms: dict[str, Tensor]

    @property
    def all(self) -> Tensor:
        """All filters of the network in one vector."""
        first = next(iter(self.norms.values()))
        return torch.cat([norms.to(first) for norms in self.norms.values()])


@dataclass(frozen=True, eq=False)
class EffectiveLearningRate(Result):
    """lr / ‖w‖² of every filter."""

    rates: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class RelativeSteps(Result):
    """lr · ‖∇w‖ / ‖w‖ of every filter, from the gradients that the parameters hold."""

    steps: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Deflated(Result):
    """Filters much shorter than they should be."""

    share: Tensor  # of all filters
    by_layer: dict[str, Tensor]
    threshold: float


@dataclass(frozen=True, eq=False)
class GradientAlignment(Result):
    """cos ∠(w, ∇w) of every filter: 0 where the loss does not depend on the filter's length."""

    cosines: dict[str, Tensor]

    @property
    def largest(self) -> dict[str, Tensor]:
        return {name: cosine.abs().amax() for name, cosine in self.cosines.items()}


def filter_norms(model: nn.Module) -> FilterNorms:
    """The Euclidean norm of every filter; of weight norm's v, of mean shift rejection's V.

    >>> filter_norms(model).norms["layer1.0.conv1.weight"]
    """
    return FilterNorms({name: _norms(weight, axis) for name, (weight, axis) in filters(model).items()})


def effective_learning_rate(model: nn.Module, optimizer: Optimizer | float) -> EffectiveLearningRate:
    """lr / ‖w‖² of every filter: the learning rate that a filter of length 1 would need to turn as fast.

    It means something for filters whose length does not matter (a norm follows, or weight norm); see
    `gradient_alignment` for which those are. `optimizer` may be a learning rate.

    >>> effective_learning_rate(model, optimizer).rates
    """
    rates = _rates(model, optimizer)
    return EffectiveLearningRate(
        {
            name: rates[name] / _norms(weight, axis).square().clamp_min(_tiny(weight))
            for name, (weight, axis) in filters(model).items()
            if name in rates
        }
    )


def relative_steps(model: nn.Module, optimizer: Optimizer | float) -> RelativeSteps:
    """lr · ‖∇w‖ / ‖w‖ of every filter that holds a gradient: the angle, in radians, that an SGD step turns a filter
    whose length does not matter.

    >>> loss.backward(); relative_steps(model, optimizer).steps
    """
    rates = _rates(model, optimizer)
    held = {name: p.grad for name, p in unwrap(model).named_parameters() if p.grad is not None}
    return RelativeSteps(
        {
            name: rates[name] * _norms(held[name], axis) / _norms(weight, axis).clamp_min(_tiny(weight))
            for name, (weight, axis) in filters(model).items()
            if name in rates and name in held
        }
    )


def deflated_share(
    model: nn.Module, threshold: float = 0.1, reference: FilterNorms | Mapping[str, Tensor] | float | None = None
) -> Deflated:
    """The share of filters shorter than `threshold` times a reference (ruff2020 reports about 25 % lost).

    ruff2020 does not say where "lost" begins. The reference is the median length of the filter's own layer, which a
    layer that shrinks as a whole shares, the lengths at some earlier time, such as `filter_norms(model)` at the start,
    or one number.

    >>> deflated_share(model, 0.1, reference=at_start).share
    """
    found = filter_norms(model).norms
    if isinstance(reference, FilterNorms):
        reference = reference.norms
    short = {}
    for name, norms in found.items():
        if reference is None:
            level = norms.median()
        elif isinstance(reference, Mapping):
            if name not in reference:
                raise ValueError(f"the reference has no filters of {name!r}: measure it on the same model")
            level = torch.as_tensor(reference[name]).to(norms)
        else:
            level = norms.new_tensor(float(reference))
        short[name] = (norms < threshold * level).to(norms.dtype)
    if not short:
        raise ValueError(f"{type(model).__name__} has no parameter that holds filters")
    first = next(iter(short.values()))
    share = torch.cat([s.to(first) for s in short.values()]).mean()
    return Deflated(share, {name: s.mean() for name, s in short.items()}, threshold)


def gradient_alignment(model: nn.Module, loss_fn: Loss, batch: Batch) -> GradientAlignment:
    """cos ∠(w, ∇w) of every filter (arpit2019: with weight norm w ⊥ Δw).

    >>> gradient_alignment(model, F.cross_entropy, (x, y)).largest       # 0: a scale-invariant layer
    """
    _, gradient = Probe(model, loss_fn, batch).gradient()
    cosines = {}
    for name, (weight, axis) in filters(model).items():
        if name in gradient:
            w, g = by_filter(weight, axis), by_filter(gradient[name], axis)
            lengths = torch.linalg.vector_norm(w, dim=1) * torch.linalg.vector_norm(g, dim=1)
            cosines[name] = (w * g).sum(1) / lengths.clamp_min(_tiny(weight))
    return GradientAlignment(cosines)


def _norms(tensor: Tensor, axis: int) -> Tensor:
    return torch.linalg.vector_norm(by_filter(tensor, axis), dim=1)


def _rates(model: nn.Module, optimizer: Optimizer | float) -> dict[str, Tensor | float]:
    """The learning rate of every parameter that has one."""
    named = dict(unwrap(model).named_parameters())
    if not isinstance(optimizer, Optimizer):
        return dict.fromkeys(named, float(optimizer))
    held = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: held[id(p)] for name, p in named.items() if id(p) in held}


def _tiny(tensor: Tensor) -> float:
    return torch.finfo(torch.promote_types(tensor.dtype, torch.float32)).tiny


__all__ = [
    "Deflated",
    "EffectiveLearningRate",
    "FilterNorms",
    "GradientAlignment",
    "RelativeSteps",
    "deflated_share",
    "effective_learning_rate",
    "filter_norms",
    "gradient_alignment",
    "relative_steps",
]
