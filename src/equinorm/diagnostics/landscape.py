"""The loss along the gradient: how far can a step go before the gradient stops being true?

Three pictures of Santurkar et al. (2018), shown in arpit2019 ("BatchNorm conditions the loss landscape"), all from the
points θ - η·∇L(θ) for a range of step sizes η:

- the loss there (`gradient_landscape`): a band that is narrow where the landscape is tame;
- how far the gradient there is from the gradient here (`gradient_predictiveness`);
- the largest ratio of that change to the distance moved (`effective_smoothness`), a local Lipschitz constant of the
  gradient.

`gradient_scan` measures all three at the cost of one forward and backward pass per step size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .probe import Batch, Loss, Probe, Result, dot, norm

STEPS = (0.5, 1.0, 2.0, 4.0)
"""Times the learning rate: the range that Santurkar et al. look at for VGG."""


@dataclass(frozen=True, eq=False)
class GradientLandscape(Result):
    """The loss at θ - η·∇L(θ)."""

    steps: Tensor  # η
    loss: Tensor  # at θ
    losses: Tensor  # one per step
    gradient_norm: Tensor  # ‖∇L(θ)‖, so that η · gradient_norm is the distance moved

    @property
    def lowest(self) -> Tensor:
        return self.losses.amin()

    @property
    def highest(self) -> Tensor:
        return self.losses.amax()


@dataclass(frozen=True, eq=False)
class GradientPredictiveness(Result):
    """How much of the gradient at θ is still true at θ - η·∇L(θ)."""

    steps: Tensor
    changes: Tensor  # ‖∇L(θ - η∇L(θ)) - ∇L(θ)‖, one per step
    cosines: Tensor  # of the angle between the two gradients
    gradient_norm: Tensor


@dataclass(frozen=True, eq=False)
class EffectiveSmoothness(Result):
    """The change of the gradient over the distance moved; on a quadratic never more than the largest eigenvalue."""

    steps: Tensor
    ratios: Tensor  # one per step
    beta: Tensor  # the largest of them


@dataclass(frozen=True, eq=False)
class GradientScan(Result):
    """All three in one."""

    steps: Tensor
    loss: Tensor
    losses: Tensor
    gradient_norm: Tensor
    changes: Tensor
    cosines: Tensor

    @property
    def landscape(self) -> GradientLandscape:
        return GradientLandscape(self.steps, self.loss, self.losses, self.gradient_norm)

    @property
    def predictiveness(self) -> GradientPredictiveness:
        return GradientPredictiveness(self.steps, self.changes, self.cosines, self.gradient_norm)

    @property
    def smoothness(self) -> EffectiveSmoothness:
        distance = (self.steps.abs() * self.gradient_norm).to(self.changes)
        ratios = self.changes / distance.clamp_min(torch.finfo(distance.dtype).tiny)
        return EffectiveSmoothness(self.steps, ratios, ratios.amax())


def gradient_landscape(model: nn.Module, loss_fn: Loss, batch: Batch, steps: Sequence[float]) -> GradientLandscape:
    """The loss at θ - η·∇L(θ) for every step size η (Santurkar et al. 2018, figure 4a).

    >>> gradient_landscape(model, F.cross_entropy, (x, y), [0.05, 0.1, 0.2, 0.4]).losses
    """
    _check(steps)
    probe = Probe(model, loss_fn, batch)
    loss, gradient = probe.gradient()
    losses = torch.stack([probe.loss(probe.moved(gradient, -step)) for step in steps])
    return GradientLandscape(_column(steps, losses), loss, losses, norm(gradient))


def gradient_predictiveness(
    model: nn.Module, loss_fn: Loss, batch: Batch, steps: Sequence[float]
) -> GradientPredictiveness:
    """How far the gradient changes over a step along it (Santurkar et al. 2018, figure 4b).

    >>> gradient_predictiveness(model, F.cross_entropy, (x, y), [0.05, 0.1, 0.2, 0.4]).changes
    """
    return gradient_scan(model, loss_fn, batch, steps).predictiveness


def effective_smoothness(model: nn.Module, loss_fn: Loss, batch: Batch, steps: Sequence[float]) -> EffectiveSmoothness:
    """The largest change of the gradient per distance moved along it (Santurkar et al. 2018, figure 4c).

    >>> effective_smoothness(model, F.cross_entropy, (x, y), [0.05, 0.1, 0.2, 0.4]).beta
    """
    return gradient_scan(model, loss_fn, batch, steps).smoothness


def gradient_scan(model: nn.Module, loss_fn: Loss, batch: Batch, steps: Sequence[float]) -> GradientScan:
    """Loss and gradient at θ - η·∇L(θ) for every step size η: all that the three instruments above need.

    >>> scan = gradient_scan(model, F.cross_entropy, (x, y), [0.05, 0.1, 0.2, 0.4])
    >>> scan.landscape.losses, scan.predictiveness.changes, scan.smoothness.beta
    """
    _check(steps)
    probe = Probe(model, loss_fn, batch)
    loss, gradient = probe.gradient()
    length = norm(gradient)
    losses, changes, cosines = [], [], []
    for step in steps:
        there, turned = probe.gradient(probe.moved(gradient, -step))
        losses.append(there)
        changes.append(norm({name: turned[name] - gradient[name] for name in gradient}))
        cosines.append(dot(turned, gradient) / (norm(turned) * length).clamp_min(torch.finfo(length.dtype).tiny))
    stacked = torch.stack(losses)
    return GradientScan(_column(steps, stacked), loss, stacked, length, torch.stack(changes), torch.stack(cosines))


def _check(steps: Sequence[float]) -> None:
    if not len(steps) or any(step == 0 for step in steps):
        raise ValueError(f"give one or more step sizes other than 0, such as [0.05, 0.1, 0.2, 0.4]; got {list(steps)}")


def _column(steps: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor([float(step) for step in steps], dtype=torch.float64).to(like.device, like.dtype)


__all__ = [
    "STEPS",
    "EffectiveSmoothness",
    "GradientLandscape",
    "GradientPredictiveness",
    "GradientScan",
    "effective_smoothness",
    "gradient_landscape",
    "gradient_predictiveness",
    "gradient_scan",
]
