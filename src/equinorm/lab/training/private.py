"""Gradients for differential privacy: each example's gradient is clipped, noise is added to their sum (DP-SGD).

How private that is, an accountant says (Opacus'): of the noise multiplier, the part of the images in a batch, and the
number of steps. Recipes have the multiplier that it gave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _NormBase

from ...equilibrium.layers import EquiNormLayer
from ...launch import plain_only

__all__ = ["PrivateGradients", "per_example_gradients"]

Loss = Callable[[Tensor, Tensor], Tensor]


def per_example_gradients(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(gradients of every example by parameter, losses, logits); examples along the first axis of each.

    >>> gradients, losses, logits = per_example_gradients(model, F.cross_entropy, images, labels)
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def one(values: dict[str, Tensor], image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional_call(model, values, (image.unsqueeze(0),)).float()
        return loss(logits, label.unsqueeze(0)), logits[0]

    both = vmap(grad_and_value(one, has_aux=True), in_dims=(None, 0, 0), randomness="different")
    detached = {name: p.detach() for name, p in parameters.items()}
    gradients, (losses, logits) = both(detached, x, y)
    return gradients, losses, logits


class PrivateGradients:
    """`gradients(x, y)` puts the private gradient of a batch where `backward` would put its own (Abadi et al. 2016):

        g = 1/B (Σ_i g_i min(1, clip / ‖g_i‖) + clip · multiplier · N(0, 1))

    >>> gradients = PrivateGradients(model, F.cross_entropy, clip=1.0, multiplier=1.1)
    >>> loss, logits = gradients(images, labels); optimizer.step()

    The model must not mix examples: batch norm and EquiNorm are refused. `chunk` examples are looked at together; all
    parameters' gradients of so many are in memory.
    """

    def __init__(self, model: nn.Module, loss: Loss, clip: float, multiplier: float, chunk: int = 128) -> None:
        for name, module in model.named_modules():
            if isinstance(module, EquiNormLayer | _NormBase):
                raise ValueError(
                    f"{name} ({type(module).__name__}) mixes the examples of a batch, which have no gradients of their "
                    "own then: take groupnorm, msr or unit_filters"
                )
        if not clip > 0 or multiplier < 0:
            raise ValueError(f"clip must be positive and the noise multiplier not negative, got {clip}, {multiplier}")
        self.model, self.loss, self.clip, self.multiplier, self.chunk = model, loss, clip, multiplier, chunk
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss and the logits; gradients are in the parameters."""
        sums = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        losses, logits = [], []
        for images, labels in zip(x.split(self.chunk), y.split(self.chunk), strict=True):
            with plain_only():  # kernels know nothing of examples by themselves
                gradients, some, scores = per_example_gradients(self.model, self.loss, images, labels)
            losses.append(some.detach())
            logits.append(scores.detach())
            add_clipped_(sums, gradients, self.clip)
        with torch.no_grad():
            for name, p in self._parameters.items():
                noise = self.clip * self.multiplier * torch.randn_like(p)
                p.grad = (sums[name] + noise).div_(len(x))
        return torch.cat(losses).mean(), torch.cat(logits)


@torch.no_grad()
def add_clipped_(sums: dict[str, Tensor], gradients: dict[str, Tensor], clip: float) -> None:
    """Add every example's gradient, made no longer than `clip` over all parameters together."""
    squares: Any = sum(g.float().flatten(1).square().sum(1) for g in gradients.values())
    factors = (clip / squares.sqrt().clamp_min(1e-12)).clamp_max(1.0)
    for name, g in gradients.items():
        sums[name] += torch.tensordot(factors, g.float(), dims=1)
