"""How curved the loss is: the top eigenvalue of the Hessian, and sharpness along a network's orbit.

Gradient descent on a quadratic needs a step size below 2/λ_max (arpit2019, key insights). All networks of one orbit
compute the same function, but their Hessians differ: `before_and_after_balancing` measures the same function twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..balance import balance_
from ..symmetry import Symmetry
from .probe import Batch, Loss, Probe, Result, dot, norm

T = TypeVar("T")
Vector = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Eigenvalue(Result):
    """The largest eigenvalue of the Hessian, and how well its equation holds."""

    value: Tensor  # λ
    residual: Tensor  # ‖Hv - λv‖ / |λ|: some eigenvalue lies within residual · |λ| of λ
    iterations: int
    converged: bool


@dataclass(frozen=True, eq=False)
class Sharpness(Result):
    """How much the loss can rise nearby."""

    loss: Tensor  # at θ
    highest: Tensor  # found within the radius
    radius: float

    @property
    def rise(self) -> Tensor:
        return self.highest - self.loss


def top_eigenvalue(
    model: nn.Module, loss_fn: Loss, batch: Batch, *, iterations: int = 200, tolerance: float = 1e-3, seed: int = 0
) -> Eigenvalue:
    """The algebraically largest eigenvalue of the Hessian of the loss, by power iteration.

    Power iteration finds the eigenvalue of largest magnitude. If that one is negative, the Hessian is shifted by it
    and the iteration done again, so that the largest one wins. Every iteration costs about two backward passes. It
    stops when ‖Hv - λv‖ ≤ tolerance · |λ|.

    >>> 2 / top_eigenvalue(model, F.cross_entropy, (x, y)).value        # the largest stable step of gradient descent
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    probe = Probe(model, loss_fn, batch)
    leaves = probe.leaves()
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        _, gradient = probe.gradient_at(leaves, create_graph=True)

        def product(v: Vector) -> Vector:
            if not any(g.requires_grad for g in gradient.values()):  # a loss that is linear in the parameters
                return {name: torch.zeros_like(x) for name, x in v.items()}
            pairs = [(g, v[name]) for name, g in gradient.items() if g.requires_grad]
            outputs, cotangents = zip(*pairs, strict=True)
            found = torch.autograd.grad(
                outputs, list(leaves.values()), cotangents, retain_graph=True, materialize_grads=True
            )
            return dict(zip(leaves, found, strict=True))

        start = _random_direction(probe.parameters, seed)
        found = _power_iteration(product, start, iterations, tolerance)
        if float(found.value) >= 0:
            return found
        shift = float(found.value)
        lifted = _power_iteration(
            lambda v: {n: h - shift * v[n] for n, h in product(v).items()}, start, iterations, tolerance
        )
        return Eigenvalue(
            lifted.value + shift,
            lifted.residual * (lifted.value / (lifted.value + shift).abs().clamp_min(1e-30)),
            found.iterations + lifted.iterations,
            lifted.converged,
        )


def _power_iteration(
    product: Callable[[Vector], Vector], start: Vector, iterations: int, tolerance: float
) -> Eigenvalue:
    v, done, converged = start, 0, False
    value = residual = norm(v) * 0
    while done < iterations:
        done += 1
        image = product(v)
        value = dot(v, image)
        length = norm(image)
        size = value.abs().clamp_min(torch.finfo(value.dtype).tiny)
        residual = norm({name: image[name] - value * v[name] for name in v}) / size
        if float(length) == 0.0 or float(residual) <= tolerance:
            converged = True
            residual = residual if float(length) else length
            break
        v = {name: (x / length).to(x.dtype) for name, x in image.items()}
    return Eigenvalue(value, residual, done, converged)


def _random_direction(parameters: Vector, seed: int) -> Vector:
    """A unit vector of random numbers that do not depend on the device, nor touch its generator."""
    draw = torch.Generator().manual_seed(seed)
    found = {n: torch.randn(p.shape, generator=draw).to(p.device, p.dtype) for n, p in parameters.items()}
    length = norm(found)
    return {name: (x / length).to(x.dtype) for name, x in found.items()}


def sharpness(
    model: nn.Module, loss_fn: Loss, batch: Batch, *, radius: float = 0.05, relative: bool = True, steps: int = 5
) -> Sharpness:
    """The highest loss found within a ball around the parameters, by projected gradient ascent.

    The radius is a part of ‖θ‖, or with `relative=False` a length. One step is the ascent direction of
    sharpness-aware minimisation; further ones follow the gradient along the sphere. Gradient ascent may miss the
    highest point: what is found is a lower bound.

    >>> sharpness(model, F.cross_entropy, (x, y), radius=0.02).rise
    """
    if radius <= 0 or steps < 1:
        raise ValueError(f"radius must be positive and steps at least 1, got {radius} and {steps}")
    probe = Probe(model, loss_fn, batch)
    reach = norm(probe.parameters) * radius if relative else torch.as_tensor(radius)
    loss, gradient = probe.gradient()
    highest, offset = loss, {name: torch.zeros_like(p) for name, p in probe.parameters.items()}
    for _ in range(steps):
        length = norm(gradient)
        if float(length) == 0.0:
            break
        offset = {name: o + reach * gradient[name] / length for name, o in offset.items()}
        shrink = reach / norm(offset).clamp_min(1e-30)
        offset = {name: (o * shrink.clamp_max(1.0)).to(o.dtype) for name, o in offset.items()}
        there, gradient = probe.gradient(probe.moved(offset, 1.0))
        highest = torch.maximum(highest, there)
    return Sharpness(loss, highest, float(reach))


def before_and_after_balancing(
    measure: Callable[[nn.Module], T],
    model: nn.Module,
    example_inputs: Any = None,
    *,
    symmetry: Symmetry | None = None,
    **options: Any,
) -> tuple[T, T]:
    """Measure a model and a balanced copy of it: the same function, at another point of its orbit.

    `options` are those of `equinorm.balance_`. The model itself is not changed.

    >>> before, after = before_and_after_balancing(lambda m: top_eigenvalue(m, loss_fn, (x, y)), model, x)
    """
    balanced = copy.deepcopy(model)
    balance_(balanced, example_inputs, symmetry=symmetry, **options)
    return measure(model), measure(balanced)


__all__ = ["Eigenvalue", "Sharpness", "before_and_after_balancing", "sharpness", "top_eigenvalue"]
